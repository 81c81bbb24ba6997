"""A run that a signal, a service or a disk ends loses the step in progress at most, and the same command goes on bit for bit."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import tiny_run

from jaxrl_llm.distributed.preemption import STOPPED

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("whole_run")]
# The answers of evaluations are graded by the reward that can be slow; a step is evaluated after every second.
EVALUATED = {**tiny_run.RL_ALONE, "evaluate.Evaluation.reward": "@wrap.Wrap()", "train.Watchdog.every_s": 0.02}


@pytest.fixture(scope="module", autouse=True)
def compiled_as_users_compile() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The metrics of a run that nothing disturbs."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    done = tiny_run.launch(run_dir, **EVALUATED)
    assert done.returncode == 0, done.stderr
    return tiny_run.rows(run_dir)


def place(run_dir: Path) -> tuple[str, int]:
    """What the run does, and its step."""
    try:
        health = json.loads((run_dir / "health.json").read_text())
    except (OSError, ValueError):
        return "", 0
    return health["doing"], health["step"]


def stopped(run_dir: Path, moment: tuple[str, int], **more: Any) -> None:
    """Sends SIGTERM to a run with slow answers once it is at this place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REWARD_S", "0.1")
        done = tiny_run.interrupted(
            run_dir, lambda _: place(run_dir) == moment, sent=signal.SIGTERM, **{**EVALUATED, **more}
        )
    assert done.returncode == STOPPED, done.stdout + done.stderr


def test_a_signal_in_an_evaluation_saves_what_was_learned_and_leaves_the_evaluation_to_the_next_start(whole, tmp_path):
    run_dir = tmp_path / "run"
    stopped(run_dir, ("evaluating", 4), SAVE_EVERY=100)
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["4"], "step 4 was learned and is saved"
    assert [row["step"] for row in tiny_run.rows(run_dir)] == [0, 1, 2, 3], "and is written when it is evaluated"
    done = tiny_run.launch(run_dir, **EVALUATED, SAVE_EVERY=100)
    assert done.returncode == 0 and "resuming from step 4" in done.stdout, done.stderr
    assert tiny_run.rows(run_dir) == whole


def test_an_evaluation_that_was_left_at_the_end_of_a_run_is_made_once(whole, tmp_path):
    run_dir = tmp_path / "run"
    stopped(run_dir, ("evaluating", 5))
    second, third = (tiny_run.launch(run_dir, **EVALUATED) for _ in range(2))
    assert second.returncode == 0 and "resuming from step 5" in second.stdout, second.stderr
    assert third.returncode == 0 and "holds a finished run" in third.stderr and "resuming" not in third.stdout
    assert tiny_run.rows(run_dir) == whole


def test_a_reward_that_always_fails_ends_the_run_resumably_with_its_own_message(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    monkeypatch.setenv("REWARD_S", "no number")
    done = tiny_run.launch(run_dir, **tiny_run.RL_ALONE)
    monkeypatch.delenv("REWARD_S")
    assert done.returncode == STOPPED, done.stderr
    assert "no reward could be had in 3 steps in a row of stage 'rl'" in done.stdout
    assert "could not convert string to float: 'no number'" in done.stderr
    assert [row["step"] for row in tiny_run.rows(run_dir)] == [0, 1, 2]
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["2"]
    again = tiny_run.launch(run_dir, **tiny_run.RL_ALONE)
    assert again.returncode == 0 and "resuming from step 2" in again.stdout, again.stderr


def test_two_launches_in_one_folder_are_one_run(whole, tmp_path):
    run_dir = tmp_path / "run"
    hold = tmp_path / "hold"  # the first run waits for its rewards until the second was refused
    hold.touch()
    environment = tiny_run.environment() | {"REWARD_HOLD": str(hold)}
    first = subprocess.Popen(
        tiny_run.command(run_dir, **EVALUATED), cwd=tiny_run.ROOT, env=environment, stdout=subprocess.DEVNULL
    )
    while not (run_dir / "owner.json").exists() and first.poll() is None:
        time.sleep(0.01)
    second = tiny_run.refused(run_dir, **EVALUATED)
    assert f"process {first.pid} on" in second and "RUN_DIR" in second
    hold.unlink()
    assert first.wait(timeout=300) == 0
    assert tiny_run.rows(run_dir) == whole


def test_a_resume_with_other_settings_is_refused_and_leaves_the_folder_alone(tmp_path):
    run_dir = tmp_path / "run"
    limit = {"train.Run.stop_after_s": 0.0}
    assert tiny_run.launch(run_dir, **tiny_run.RL_ALONE, **limit).returncode == 0
    before = (run_dir / "config.gin").read_text()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n')
    written = (run_dir / "metrics.jsonl").read_text()
    other = {"grpo.GRPO.kl_coef": 0.9}
    refused = tiny_run.refused(run_dir, **tiny_run.RL_ALONE, **limit, **other)
    assert "stages[rl].algorithm.kl_coef was 0.01, is 0.9" in refused and "--resume_as_new" in refused
    assert (run_dir / "config.gin").read_text() == before
    data = {"heldout/sorting.Sorting.size": 8, "sorting.Sorting.seed": 5}
    refused = tiny_run.refused(run_dir, **tiny_run.RL_ALONE, **limit, **data)
    assert "the data of stage 'rl' is another one" in refused
    assert (run_dir / "config.gin").read_text() == before and not (run_dir / "changes.jsonl").exists()
    assert (run_dir / "metrics.jsonl").read_text() == written, "rows after the checkpoint too"
    given = [*tiny_run.arguments(run_dir, **tiny_run.RL_ALONE, **other), "--resume_as_new"]
    done = forked.launch(given, tiny_run.environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    assert "changed after step 1: stages[rl].algorithm.kl_coef was 0.01, is 0.9" in done.stdout
    assert "kl_coef = 0.9" in (run_dir / "config.gin").read_text() and (run_dir / "config.0.gin").read_text() == before
    assert tiny_run.rows(run_dir)[-1]["kl/coef"] == pytest.approx(0.9), "what is trained is what the configuration says"
