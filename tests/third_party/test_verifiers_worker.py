"""Tasksets of verifiers by name: a worker plays them by the gateway, and the rollout's tokens are those of its own session."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
from environments.players import MADE, call, play
from third_party.test_verifiers import WORDS, words  # noqa: F401 - a fixture

from jaxrl_llm.data.pipeline import Encoder
from jaxrl_llm.environments.verifiers import COLUMN, Taskset, Verifiers
from jaxrl_llm.experience import Limits

pytest.importorskip("verifiers", reason="verifiers is not installed: see tests/third_party/requirements.txt")

HERE = str(Path(__file__).parent)
HARNESS = {"harness": {"id": "addition_taskset"}, "runtime": {"type": "subprocess"}}
TALK = {"harness": {"id": "talk_harness"}, "runtime": {"type": "subprocess"}}  # without tools


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    made = tmp_path_factory.mktemp("tokenizer")
    MADE.tokenizer.save_pretrained(made)
    return str(made)


def encoded(taskset: Taskset):
    return Encoder(tokenizer=MADE.tokenizer, max_prompt_tokens=4000).prompts(taskset.rows())


def test_additions_with_a_tool_and_what_fails(folder):
    config = {"taskset": {"id": "addition_taskset"}, "agent": HARNESS}
    taskset = Taskset(
        python=sys.executable, environment=config, tokenizer=folder, renderer={"name": "qwen3"}, path=(HERE,), count=9
    )
    rows = encoded(taskset)
    assert [row.question for row in rows] == ["What is 47+85?", "What is 3+4?"]
    assert [row.extra[COLUMN] for row in rows] == [0, 1]
    texts = [call("add", '{"a": 47, "b": 85}'), "It is 132.", "I do not know."]
    agent = Verifiers(taskset=taskset, sampling={"max_tokens": 90})

    async def main():
        right = await play(rows[0], texts[:2], agent=agent)
        wrong = await play(rows[0], texts[2:], agent=agent)
        # Arguments that the harness cannot add: the error of its own that verifiers records.
        failing = await play(rows[0], [call("add", '{"a": 47}')], agent=agent)
        late = await play(rows[0], [call("add", '{"a": 1, "b": 2}')] * 3, agent=agent, limits=Limits(max_calls=1))
        return *right, *wrong, *failing, *late

    right, wrong, failing, late = asyncio.run(main())
    assert right.valid and right.rewards == {"right": 1.0}, right.error
    assert len(right.turns) == 2 and set(right.versions[right.mask]) == {3} and "132" in right.text
    assert wrong.valid and wrong.rewards == {"right": 0.0}
    assert not failing.valid and not failing.rewards and "KeyError" in failing.error
    assert not late.valid and len(late.turns) == 1


@pytest.mark.parametrize(("retention", "branches"), [("all", 1), (None, 6)])
def test_six_turns_of_wordle(folder, words, retention, branches):  # noqa: F811 - the fixture
    pytest.importorskip("textarena", reason="textarena is not installed: see tests/third_party/requirements.txt")
    kept = {} if retention is None else {"thinking_retention": retention}
    config = {"taskset": {"id": "textarena", "game": "Wordle-v0"}, "player": TALK}
    taskset = Taskset(
        python=sys.executable, environment=config, tokenizer=folder, renderer={"name": "qwen3", **kept}, path=(HERE,), count=2, workers=2
    )  # fmt: skip
    row = encoded(taskset)[0]  # a game whose word is none of the guesses, by its seed
    assert row.id == "textarena/0" and [m["role"] for m in row.messages] == ["system", "user"]
    assert "Wordle" in row.question
    texts = [f"<think>\nGuess {i}.\n</think>\n\n[{word}]" for i, word in enumerate(WORDS[:6])]
    (found,) = asyncio.run(play(row, texts, agent=Verifiers(taskset=taskset, sampling={"max_tokens": 60})))
    assert found.valid, found.error
    assert set(found.rewards) == {"game_reward"} and found.info["session"]["calls"] == 6
    assert found.info["branches"] == branches
    assert len(found.paths) == branches
    sampled = sum(int(path.mask.sum()) for path in found.paths)
    assert sampled == found.info["session"]["sampled_tokens"] > 0
    assert np.isfinite(found.rewards["game_reward"])


def test_a_worker_that_cannot_start_is_said(folder):
    taskset = Taskset(python=sys.executable, environment={"taskset": {"id": "no_such_taskset"}}, tokenizer=folder)
    with pytest.raises(ValueError, match="no_such_taskset"):
        taskset.rows()
    with pytest.raises(ValueError, match="cannot be started by 'no-such-python'"):
        Taskset(python="no-such-python", environment={}, tokenizer=folder).rows()
