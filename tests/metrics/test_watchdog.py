"""Watching a run: its health file, its log, and what is said of one that stands still."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxrl_llm.metrics.watchdog import STALLED, Watchdog

ROOT = Path(__file__).parents[2]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, "nothing happened within 20 s"
        time.sleep(0.01)


def test_the_health_file_says_where_the_run_stands_and_how_it_ended(tmp_path):
    file = tmp_path / "health.json"
    began = time.time()
    watching = Watchdog(every_s=0.01).start(tmp_path)
    watching.at("collecting", stage="rl", step=7, version=6)
    until(lambda: file.exists() and json.loads(file.read_text())["step"] == 7)
    found = json.loads(file.read_text())
    watching.end()
    place = {"doing": "collecting", "stage": "rl", "step": 7, "version": 6}
    assert {name: found[name] for name in place} == place
    assert (found["rank"], found["pid"], found["outcome"]) == (0, os.getpid(), None)
    assert began <= found["progress"] <= found["time"] <= time.time()
    assert json.loads(file.read_text())["outcome"] == "ended"
    assert {f.name for f in tmp_path.iterdir()} == {"health.json", "log.jsonl"}  # no half-written file is left


def test_a_run_that_fails_leaves_the_reason(tmp_path):
    Watchdog().start(tmp_path).end(ValueError("no rows in\n  data.jsonl"))
    assert json.loads((tmp_path / "health.json").read_text())["outcome"] == "ValueError: no rows in data.jsonl"


def test_log_lines_carry_process_stage_and_step_and_errors_their_stack(tmp_path):
    before = logging.getLogger("jaxrl_llm").level
    watching = Watchdog().start(tmp_path, rank=3)
    watching.at("updating", stage="rl", step=4)
    logging.getLogger("jaxrl_llm.train.step").info("gap of %g", 0.5)
    try:
        raise OSError("disk\nfull")
    except OSError:
        logging.getLogger("orbax").warning("a save failed", exc_info=True)
    logging.getLogger("orbax").info("of no interest")
    watching.end()
    logging.getLogger("jaxrl_llm").warning("after the run")
    assert not (tmp_path / "log.jsonl").exists(), "files of other processes carry their number"
    found = lines(tmp_path / "log.3.jsonl")
    assert [(f["level"], f["message"]) for f in found[1:3]] == [("INFO", "gap of 0.5"), ("WARNING", "a save failed")]
    for line in found[1:3]:
        assert (line["rank"], line["stage"], line["step"], line["doing"]) == (3, "rl", 4, "updating")
    assert "OSError: disk\nfull" in str(found[2]["error"])
    assert str(found[0]["message"]).startswith("the run begins") and found[-1]["message"] == "the run is over: ended"
    assert logging.getLogger("jaxrl_llm").level == before


def test_a_wait_is_named_once_with_every_stack_and_progress_ends_it(tmp_path):
    log = tmp_path / "log.jsonl"

    def warnings() -> list[str]:
        return [str(line["message"]) for line in lines(log) if line["level"] == "WARNING"]

    async def asks_a_sampler() -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        watching.at("collecting", stage="rl", step=2)
        task = asyncio.create_task(asks_a_sampler())
        await asyncio.to_thread(until, warnings)
        await asyncio.sleep(0.3)  # several looks later there is still one warning
        task.cancel()

    watching = Watchdog(every_s=0.02, warn_after_s=0.2).start(tmp_path)
    with asyncio.Runner() as runner:
        runner.run(run())
        assert len(warnings()) == 1
        watching.at("updating")
        time.sleep(0.05)
        until(lambda: len(warnings()) == 2)
    watching.end()
    first, second = warnings()
    assert (
        "while collecting (stage rl, step 2): awaits" in first
        and "asks_a_sampler" in first
        and "in Event.wait" in first
    )
    assert "while updating (stage rl, step 2): in " in second and "until" in second
    stacks = (tmp_path / "stacks.txt").read_text()
    assert stacks.count("--- ") == 2 and "asks_a_sampler" in stacks and "Thread 0x" in stacks
    assert stacks.count("most recent call first") >= 4, "main thread and watching thread, twice"


HANGS = """
import signal, sys, time
from pathlib import Path
from jaxrl_llm.metrics import watchdog

watchdog.GRACE_S = 0.3
watching = watchdog.Watchdog(every_s=0.02, stop_after_s=0.2).start(Path(sys.argv[2]))
watching.at("updating", stage="rl", step=5)
if sys.argv[1] == "ends":
    def end(number, frame):
        watching.end()
        sys.exit(7)

    signal.signal(signal.SIGTERM, end)
else:
    signal.signal(signal.SIGTERM, lambda number, frame: None)
time.sleep(60)
"""


@pytest.mark.parametrize(("how", "code"), [("ends", 7), ("does not react", STALLED)])
def test_a_run_that_stands_still_is_told_to_end_or_ended_with_the_wait_in_its_error(tmp_path, how, code):
    began = time.monotonic()
    command = [sys.executable, "-c", HANGS, how, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert time.monotonic() - began < 20
    said = done.stderr.strip().splitlines()[-1]
    assert "while updating (stage rl, step 5)" in said and "train.Watchdog.stop_after_s = 0.2" in said
    assert said == "error: " + json.loads((tmp_path / "health.json").read_text())["outcome"]
    assert "Current thread 0x" in (tmp_path / "stacks.txt").read_text()


def test_limits_that_are_not_positive_are_refused():
    with pytest.raises(ValueError, match=r"train\.Watchdog\.warn_after_s must be > 0 \(got 0\)"):
        Watchdog(warn_after_s=0)
