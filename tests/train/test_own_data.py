"""Whole runs on a user's own rows and a user's own reward function."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from jaxrl_llm.distributed.preemption import STOPPED

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("whole_run")]
FILE = """from __gin__ import dynamic_registration
from jaxrl_llm import train
from jaxrl_llm.data import rows
include '{tiny}'
include 'gin/data/rows.gin'
include 'gin/rewards/function.gin'
include 'gin/algorithms/{algorithm}.gin'
rows.Rows.template = 'question_only'
train.Run.stages = [@rl/train.Stage()]
EVALUATE_EVERY = 100
MINIBATCHES = 1
"""
GOOD = """def score(prompt, text, goal):
    return sum(c in goal for c in text) / max(len(text), 1)
"""
FAILING = GOOD.replace("    return", "    raise RuntimeError(f'no {goal}')\n    return")


def written(folder: Path, rows: list[dict[str, Any]], reward: str, algorithm: str) -> dict[str, Any]:
    """Writes the files of a run of own rows with an own reward; returns its bindings."""
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(reward)
    (folder / "mine.gin").write_text(FILE.format(tiny=tiny_run.GIN_FILE, algorithm=algorithm))
    return {
        "DATA_SOURCE": repr(f"{folder}/mine.jsonl"),
        "REWARD_FUNCTION": repr(f"{folder}/mine.py:score"),
        "STEPS": 4,
    }


def start(folder: Path, rows: list[dict[str, Any]], reward: str, algorithm: str = "grpo") -> Any:
    """Runs own rows with an own reward to the end."""
    return tiny_run.launch(folder / "run", str(folder / "mine.gin"), **written(folder, rows, reward, algorithm))


def tasks(**more: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"s:{'abcdefgh'[i % 8]}{'abcdefghij'[i % 10]}=", "goal": "abcde", **more} for i in range(40)]


def test_a_run_learns_from_own_rows_and_own_reward_and_an_edited_reward_is_not_taken_up_silently(
    tmp_path: Path,
) -> None:
    done = start(tmp_path, tasks(), GOOD)
    assert done.returncode == 0, done.stderr
    assert "rows of mine: prompt from 'prompt'; further columns ['goal']" in done.stdout
    rewards = [row["reward/mean"] for row in tiny_run.rows(tmp_path / "run") if "reward/mean" in row]
    assert len(rewards) == 4 and all(0 < reward < 1 for reward in rewards)
    edited = written(tmp_path, tasks(), GOOD.replace("in goal", "not in goal"), "grpo") | {"STEPS": 5}
    assert "reward.content was" in tiny_run.refused(tmp_path / "run", str(tmp_path / "mine.gin"), **edited)


def test_a_function_that_fails_shows_its_traceback_and_ends_the_run_after_three_steps(tmp_path: Path) -> None:
    done = start(tmp_path, tasks(), FAILING)
    assert done.returncode == STOPPED, done.stderr
    assert "reward 'score' raised its first RuntimeError, on prompt 'mine/" in done.stderr
    assert f'{tmp_path}/mine.py", line 2, in score' in done.stderr and "RuntimeError: no abcde" in done.stderr
    assert "no reward could be had in 3 steps in a row of stage 'rl'" in done.stdout


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto"])
def test_own_rows_are_demonstrations_pairs_and_labelled_responses(tmp_path: Path, algorithm: str) -> None:
    given = {
        "sft": {"completion": "abc"},
        "dpo": {"chosen": "abc", "rejected": "cab"},
        "kto": {"completion": "abc", "label": True},
    }
    rows = tasks(**given[algorithm])
    rows = [{**row, "label": i % 2 == 0} if algorithm == "kto" else row for i, row in enumerate(rows)]
    done = start(tmp_path, rows, GOOD, algorithm)
    assert done.returncode == 0, done.stderr
    losses = [row["loss/total"] for row in tiny_run.rows(tmp_path / "run") if "loss/total" in row]
    assert len(losses) == 4 and losses[0] > 0
