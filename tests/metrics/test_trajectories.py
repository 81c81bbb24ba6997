"""What metrics and readable rows say of rollouts with branches, written out by hand."""

import numpy as np
import pytest
from builders import Words, make_group, make_prompt, make_rollout

from jaxrl_llm.experience import Branch, Rollout, Turn
from jaxrl_llm.learner.trajectory import Bounded
from jaxrl_llm.metrics import trajectories
from jaxrl_llm.metrics.rollout_rows import held_out

# A call of two tokens, a tool's two tokens and a call of one; then the history is edited after the first call, and one more is sampled.
FIRST = Branch(
    prefix=np.array([1, 2], np.int32), tokens=np.array([11, 12, 50, 51, 13], np.int32),
    sampler_logprobs=np.array([-1, -2, 0, 0, -3], np.float32), mask=np.array([1, 1, 0, 0, 1], bool),
    versions=np.zeros(5, np.int32), finish="stop", turns=(Turn(start=0, end=2, call=0), Turn(start=4, end=5, call=1)),
)  # fmt: skip
SECOND = Branch(
    prefix=np.array([1, 2], np.int32), tokens=np.array([11, 12, 60, 14], np.int32),
    sampler_logprobs=np.array([-1, -2, 0, -4], np.float32), mask=np.array([0, 0, 0, 1], bool),
    versions=np.zeros(4, np.int32), finish="length", turns=(Turn(start=0, end=2, call=0), Turn(start=3, end=4, call=2)),
)  # fmt: skip
COUNTS = {"calls": 3.0, "branches": 2.0, "branch_tokens": 13.0, "duplicated_tokens": 4.0, "fork/history": 1.0}


def forked() -> Rollout:
    info = {"session": COUNTS, "calls": {"ok": 2, "bad_json": 1}, "environment_s": 0.5, "stop": "done"}
    arrays = {
        name: getattr(SECOND, name) for name in ("tokens", "sampler_logprobs", "mask", "versions", "finish", "turns")
    }
    return Rollout(prompt=make_prompt("p", [1, 2]), branches=(FIRST, SECOND), info=info, rewards={"won": 1.0}, **arrays)


def failed() -> Rollout:
    session = {"calls": 1.0, "branches": 1.0, "branch_tokens": 5.0, "duplicated_tokens": 0.0}
    info = {"session": session, "environment_s": 1.5, "stop": "failed"}
    return make_rollout(make_prompt("p", [1, 2]), [21, 22, 23], valid=False, error="OSError in step: x", info=info)


def test_metrics_of_played_rollouts_written_out():
    group = make_group([forked(), failed()], {"r": [1.0, 0.0]})
    found = trajectories.of_groups([group], Bounded(groups=[group], branches=1, tokens=3))
    assert found == pytest.approx({
        "trajectory/branches": 1.5, "trajectory/branches_max": 2, "trajectory/turns": 2, "trajectory/duplicated": 4 / 18,
        "trajectory/told_tokens": (2 + 0) / 2, "trajectory/environment_s": 1.0, "trajectory/invalid": 0.5,
        "trajectory/fork/history": 0.5, "trajectory/calls/ok": 1.0, "trajectory/calls/bad_json": 0.5, "trajectory/stop/done": 0.5,
        "trajectory/stop/failed": 0.5, "trajectory/dropped_branches": 1, "trajectory/dropped_tokens": 3,
    })  # fmt: skip


def test_rollouts_of_single_turns_have_no_such_metrics():
    plain = make_rollout(make_prompt(), [1, 2])
    assert trajectories.of_groups([make_group([plain], {"r": [1.0]})]) == {}
    (row,) = held_out("test", ["sampled"], [make_group([plain], {"r": [1.0]})], tokenizer=Words(), rollouts=1, tokens=0)
    assert not {"valid", "error", "info", "branches", "rewards"} & row.keys()


def test_a_row_tells_who_wrote_each_piece_of_each_branch():
    found = trajectories.record(forked(), Words())
    assert found["valid"] is True and found["rewards"] == {"won": 1.0} and found["info"]["stop"] == "done"
    first, second = found["branches"]
    assert first == {
        "prefix": "1 2", "finish": "stop", "turns": [[0, 2, 0], [4, 5, 1]],
        "pieces": [{"by": "policy", "text": "11 12"}, {"by": "told", "text": "50 51"}, {"by": "policy", "text": "13"}],
    }  # fmt: skip
    assert second["pieces"] == [
        {"by": "copied", "text": "11 12"},
        {"by": "told", "text": "60"},
        {"by": "policy", "text": "14"},
    ]
