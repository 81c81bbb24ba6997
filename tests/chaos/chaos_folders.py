"""Run folders under signals, second launches and other settings: at most the step in progress is lost, and nothing is bent silently."""

import json
import random
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiny_run
from chaos_table import Row, Stopwatch, Trial

from jaxrl_llm.distributed.preemption import STOPPED

# Every second step is evaluated, by a reward that takes a while, so that many moments lie in evaluations.
SLOW = {**tiny_run.RL_ALONE, "evaluate.Evaluation.reward": "@wrap.Wrap()", "train.Watchdog.every_s": 0.02}
SLOWLY = {"REWARD_S": "0.02"}
CHANGED: dict[str, dict[str, object]] = {
    "kl_coef": {"grpo.GRPO.kl_coef": 0.9},
    "clip_low": {"grpo.GRPO.clip_low": 0.1},
    "seed": {"SEED": 3},
    "group size": {"GROUP_SIZE": 2},
    "temperature": {"rl/experience.SamplingParams.temperature": 0.5},
    "weight decay": {"train.Optimizer.weight_decay": 0.3},
    "mini-batches": {"MINIBATCHES": 1},
    "prompts a step": {"PROMPTS_PER_STEP": 2},
    "data of equal length": {"sorting.Sorting.seed": 9},
    "learning rate (free)": {"rl/train.Optimizer.learning_rate": 1e-5},
    "steps (free)": {"STEPS": 3},
    "save every (free)": {"SAVE_EVERY": 1},
}


def start(run_dir: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        tiny_run.command(run_dir, **SLOW), cwd=tiny_run.ROOT, env=tiny_run.environment() | SLOWLY | dict(environment or {}),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def doing(run_dir: Path, process: subprocess.Popen[Any]) -> tuple[str, int]:
    """What a process that runs in a folder is in, and its step; ("", -1) until it says so: the folder may hold what one before it said."""
    try:
        health = json.loads((run_dir / "health.json").read_text())
    except (OSError, ValueError):
        return "", -1
    return (health["doing"], health["step"]) if health["pid"] == process.pid else ("", -1)


def moment(run_dir: Path, process: subprocess.Popen[Any], rng: random.Random, *, evaluates: bool) -> tuple[str, int]:
    """Waits for a random moment of a process's life, or of its evaluations; returns what it is in then, and its step."""
    more = rng.randint(0, 2 if evaluates else 4)  # steps
    if not evaluates and rng.random() < 0.2:  # before it has come far, maybe before it handles signals
        time.sleep(rng.uniform(0, 10))
        return doing(run_dir, process)
    begun, deadline = -1, time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        place, step = doing(run_dir, process)
        if begun < 0 and place not in ("", "starting"):
            begun = step
        if 0 <= begun <= step - more and (place == "evaluating" or not evaluates):
            break
        time.sleep(0.005)
    time.sleep(rng.uniform(0, 0.2 if evaluates else 0.4))
    return doing(run_dir, process)


def preempted(trial: Trial) -> Row:
    """SIGTERM at random moments of a run's life until it ends, each third within an evaluation: exit status 75, no learned step lost, the undisturbed metrics."""
    rng, row, where = random.Random(trial.seed), Row(tried=0, outcome=""), []
    whole = trial.folder / "whole"
    assert start(whole).wait(300) == 0
    while row.tried < trial.times:
        run = trial.folder / f"run{row.tried}"
        for _ in range(trial.times):
            process = start(run)
            place, step = moment(run, process, rng, evaluates=row.tried % 3 == 0)
            process.send_signal(signal.SIGTERM)
            status = process.wait(120)
            if status == 0:
                break
            assert status in (STOPPED, -signal.SIGTERM, 128 + signal.SIGTERM), status
            saved = max((int(p.name) for p in (run / "checkpoints").glob("*") if p.name.isdigit()), default=0)
            assert saved >= step - 1 or status != STOPPED, f"stopped while {place} step {step}, saved {saved}"
            where.append(place)
            row.tried += 1
        watch = Stopwatch()
        assert start(run).wait(300) == 0
        row.recovered_s.append(watch.seconds)
        assert tiny_run.rows(run) == tiny_run.rows(whole)
        row.into += len(tiny_run.rows(whole))
        row.out += len(tiny_run.rows(run))
    evaluating = sum(place == "evaluating" for place in where)
    assert evaluating * 10 >= 3 * trial.times, f"{evaluating} of {len(where)} signals lie in evaluations"
    row.outcome = (
        f"{evaluating} of {len(where)} in evaluations; no learned step lost, the undisturbed metrics bit for bit"
    )
    return row


def launched_twice(trial: Trial) -> Row:
    """A second launch in a folder that is being written is refused by the owner's name; the first ends undisturbed.

    The first is held in its first rewards until the second has ended; the second comes as soon as the first has the folder, or once
    the first is held.
    """
    row, whole, hold = Row(tried=0, outcome=""), trial.folder / "whole", trial.folder / "hold"
    assert start(whole).wait(300) == 0
    for number in range(trial.times):
        run = trial.folder / f"run{number}"
        hold.touch()
        first = start(run, environment={"REWARD_HOLD": str(hold)})
        try:
            while first.poll() is None and not ((run / "owner.json").exists() and (number % 2 or held(run, first))):
                time.sleep(0.01)
            second = tiny_run.launch(run, **SLOW)
            assert second.returncode == 1 and f"process {first.pid} on" in second.stderr, second.stderr
            hold.unlink()
            assert first.wait(300) == 0
        finally:
            first.kill()
        assert tiny_run.rows(run) == tiny_run.rows(whole)
        row.tried += 1
        row.into, row.out = row.into + len(tiny_run.rows(whole)), row.out + len(tiny_run.rows(run))
    row.outcome = "one refused by the owner's name, one whole with the undisturbed metrics bit for bit"
    return row


def held(run_dir: Path, process: subprocess.Popen[Any]) -> bool:
    """Whether a process is in its first evaluation, whose rewards are held."""
    return doing(run_dir, process)[0] == "evaluating"


def resumed_with_other_settings(trial: Trial) -> Row:
    """Each of twelve changed settings: refused with both values and the folder untouched, or taken up and noted."""
    whole, row, free = trial.folder / "whole", Row(tried=0, outcome=""), 0
    limit = {"train.Run.stop_after_s": 0.0}
    assert tiny_run.launch(whole, **tiny_run.RL_ALONE, **limit).returncode == 0
    for number, (name, binding) in list(enumerate(CHANGED.items()))[: trial.times]:
        run = trial.folder / f"run{number}"
        subprocess.run(["cp", "-a", str(whole), str(run)], check=True)
        before = (run / "config.gin").read_text()
        done = tiny_run.launch(run, **{**tiny_run.RL_ALONE, **binding})
        if "(free)" in name:
            assert done.returncode == 0 and "changed after step 1" in done.stdout, (name, done.stderr)
            assert (run / "changes.jsonl").exists()
            free += 1
        else:
            assert done.returncode == 1 and (" was " in done.stderr or "is another one" in done.stderr), (
                name,
                done.stderr,
            )
            assert (run / "config.gin").read_text() == before, name
        row.tried += 1
    row.outcome = f"{row.tried - free} refused with both values and the folder untouched, {free} taken up and noted with their step"
    return row
