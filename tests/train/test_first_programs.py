"""What a run's first step runs is compiled while the run evaluates and samples, from shapes alone: the step then compiles none of it."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
import tiny_run

from jaxrl_llm import command_line
from jaxrl_llm.distributed import ahead, memory
from jaxrl_llm.learner import example
from jaxrl_llm.learner.packing import Packing
from jaxrl_llm.metrics.profiling import EVENT, Compilations
from jaxrl_llm.rollouts.pairs import BestAgainstWorst

LEARNERS = ("score)", "accumulate)", "_applied)", "whole)", "only)")
TAIL = {
    "PROMPTS_PER_STEP": 48,
    "ROWS": 16,
    "ROW_TOKENS": 32,
    "train.Packing.tail": 8,
    "STEPS": 1,
}  # micro-batches of 16 and 8 rows
ONE = {"ROWS": 32, "ROW_TOKENS": 64, "STEPS": 1}  # a minibatch is one micro-batch
compiled: list[tuple[str, str]] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **more: (
        compiled.append((threading.current_thread().name, str(more.get("fun_name")))) if event == EVENT else None
    )
)


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ahead, "cores", lambda: 8)
    monkeypatch.syspath_prepend(str(tiny_run.ROOT / "tests"))
    compiled.clear()
    yield


def run(folder: Path, *gin_files: str, **bindings: Any) -> list[dict[str, Any]]:
    """Runs tests/tiny.gin, and returns its metrics without times."""
    given = tiny_run.bindings(folder, **tiny_run.RL_ALONE, **bindings)
    made, config = command_line.build([tiny_run.GIN_FILE, *gin_files], given)
    made.run(config)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "speed/", "compilations", "sampler/", "memory/")
    return [{n: x for n, x in line.items() if not n.startswith(timed)} for line in lines]


def own(of_step: bool) -> list[str]:
    """The learner's programs that the step compiled itself, or that were compiled beside it."""
    main = threading.main_thread().name
    return sorted(name for thread, name in compiled if name.endswith(LEARNERS) and (thread == main) == of_step)


def slow(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("shape", [TAIL, ONE], ids=["several micro-batches", "one"])
@pytest.mark.parametrize(
    "gin_file",
    [
        "algorithms/grpo",
        *slow(*(f"algorithms/{n}" for n in ("ppo", "gspo", "dapo", "cispo", "clip_cov", "dppo_kl")), "adapters/lora"),
    ],
)  # fmt: skip
def test_the_first_step_compiles_none_of_its_programs(gin_file: str, shape: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path / "run", f"gin/{gin_file}.gin", **shape)
    assert own(of_step=True) == []
    assert len(own(of_step=False)) >= 2


def test_a_scoring_pass_of_a_later_step_is_compiled_ahead_too(tmp_path: Path) -> None:
    later = {"rl/train.Stage.old_logprobs": "'sampler'", "rl/train.Stage.score_every": 3, "STEPS": 4}
    needless = {"grpo.GRPO.kl_coef": 0.0, "grpo.GRPO.entropy_coef": 0.0}
    found = run(tmp_path / "run", **TAIL | later | needless)
    assert ["gap/mean" in line for line in found if line["step"]] == [False, False, True, False]
    assert own(of_step=True) == []
    assert any(name.endswith("score)") for name in own(of_step=False))


def test_the_run_is_the_same_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(tmp_path / "ahead", **TAIL)
    monkeypatch.setattr(ahead, "cores", lambda: 2)
    compiled.clear()
    assert run(tmp_path / "plain", **TAIL) == found
    assert own(of_step=False) == [] and len(own(of_step=True)) >= 2


@pytest.mark.slow
def test_nothing_is_compiled_for_shapes_that_only_the_samples_decide(tmp_path: Path) -> None:
    run(tmp_path / "run", **ONE | {"ROWS": 16, "ROW_TOKENS": 32, "PROMPTS_PER_STEP": 16})
    assert own(of_step=False) == [] and len(own(of_step=True)) >= 2


def test_what_cannot_be_compiled_ahead_is_said_and_left_to_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("no such shape")

    monkeypatch.setattr(example, "batch_of", failing)
    run(tmp_path / "run", **ONE)
    said = [line.getMessage() for line in caplog.records if "ahead of it" in line.getMessage()]
    assert len(said) == 1 and "RuntimeError('no such shape')" in said[0]
    assert own(of_step=False) == [] and len(own(of_step=True)) >= 2


def test_nothing_is_compiled_where_less_than_half_of_a_device_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def lowered() -> list[Any]:
        raise AssertionError("nothing is to be lowered")

    for used, expected in ((60, False), (50, True)):
        device = Mock(memory_stats=lambda used=used: {"bytes_in_use": used, "bytes_limit": 100})
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [Mock(memory_stats=lambda: None), device])
        assert memory.half_free() == expected
    monkeypatch.setattr(ahead, "half_free", lambda: False)
    assert ahead.Background(lowered).wait() == 0


def test_programs_are_compiled_once_and_waiting_again_costs_nothing() -> None:
    double = jax.jit(lambda x: 2 * x)
    work = ahead.Background(lambda: [double.lower(jax.ShapeDtypeStruct((n,), np.float32)) for n in (3, 5)])
    assert work.wait() == 2 and work.wait() == 2
    compiled.clear()
    assert [np.asarray(double(np.ones(n, np.float32))).sum() for n in (3, 5)] == [6.0, 10.0]
    assert compiled == []


@pytest.mark.parametrize(
    ("changes", "packing", "expected"),
    [
        ({}, {"rows": 8}, 1),  # 8 sequences of up to 12 tokens, a row for each
        ({}, {"rows": 8, "tail": 4}, 0),
        ({}, {"rows": 1}, 2),  # 96 tokens, a quarter of them at least, for a row of 16
        ({}, {"rows": 2}, 0),
        ({"skip_silent": True}, {"rows": 1}, 0),
        ({"skip_silent": True}, {"rows": 8}, 1),
        ({"pairing": BestAgainstWorst()}, {"rows": 8}, 0),
        ({}, {"rows": 8, "row_tokens": 64}, 1),
        ({}, {"rows": 2, "row_tokens": 256, "sequences_per_row": 2}, 2),  # four rows, however short they are
    ],
)
def test_what_a_minibatch_takes_is_foreseen_where_it_is_certain(
    changes: dict[str, Any], packing: dict[str, Any], expected: int
) -> None:
    given = {
        "sequences": 16,
        "minibatches": 2,
        "max_prompt_tokens": 5,
        "response_tokens": 8,
        "plays": False,
        "pairing": None,
        "skip_silent": False,
    }
    stage = SimpleNamespace(packing=Packing(**{"row_tokens": 16} | packing), **given | changes)
    assert example.foreseen(stage) == expected


def test_seconds_of_compilation_are_those_that_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, gate = Compilations(), threading.Event()

    def late() -> list[Any]:
        gate.wait(10)
        return [jax.jit(lambda x: x * 3 + 1).lower(jax.ShapeDtypeStruct((7,), np.float32))]

    counted.spent(), counted.take()
    work = ahead.Background(late)
    threading.Timer(0.5, gate.set).start()
    assert work.wait() == 1 and not ahead.busy()
    assert counted.take() == 1
    assert 0.4 < counted.spent() < 5
    free = ahead.Background(lambda: [jax.jit(lambda x: x * 5 + 1).lower(jax.ShapeDtypeStruct((7,), np.float32))])
    while ahead.busy():
        time.sleep(0.01)
    assert free.wait() == 1 and counted.take() == 1 and counted.spent() == 0


def test_a_process_leaves_while_programs_are_compiled() -> None:
    program = """
import time
from jaxrl_llm import command_line
from jaxrl_llm.distributed import ahead
ahead.Background(lambda: time.sleep(60) or [])
print("said")
command_line.leave(75)
"""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tiny_run.ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        env=tiny_run.environment(),
    )
    assert (done.returncode, done.stdout) == (75, "said\n") and time.monotonic() - begin < 40
