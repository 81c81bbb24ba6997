"""Classes in TRL's form: their methods are tools, reset speaks first, and get_reward scores however the episode ended."""

import asyncio

import pytest
from environments.players import MADE, asked, call, play, played

from jaxrl_llm.environments.methods import Methods
from jaxrl_llm.experience import Limits

CLASS = '''
import threading, time

class Till:
    def __init__(self):
        self.total, self.threads = 0, set()

    def reset(self, start, prompt, **row):
        self.total, self.row = start, row
        return f" The till holds {start}."

    def put(self, amount: int) -> str:
        """
        Puts money into the till.

        Args:
            amount: how much
        """
        self.threads.add(threading.get_ident())
        if amount < 0:
            raise ValueError("nothing is taken out")
        self.total += amount
        return f"{self.total}"

    async def look(self) -> int:
        """Says what the till holds."""
        return self.total

    def _hidden(self):
        pass

    def get_reward(self):
        assert threading.main_thread().ident not in self.threads
        return None if self.total == 13 else self.total / 100


class Bare:
    def reset(self, **row):
        pass

    def nothing(self, x):
        return x


class Slow(Till):
    def get_reward(self):
        time.sleep(5)

class NoReset:
    pass
'''


@pytest.fixture
def file(tmp_path):
    (tmp_path / "till.py").write_text(CLASS)
    return str(tmp_path / "till.py")


PROMPT = asked("Fill it.", extra={"start": 5}, reference="r")


def test_two_tools_and_a_reward(file):
    texts = [
        call("put", '{"amount": 30}') + call("put", '{"amount": -1}'),
        call("look", "{}") + call("take", "{}"),
        "Done.",
    ]
    found = played(PROMPT, texts, environment=Methods(factory=f"{file}:Till"))
    assert found.valid, found.error
    assert found.rewards == {"Till": 0.35} and found.info["failed_calls"] == 2
    begin = MADE.tokenizer.decode(found.paths[0].prefix)
    assert "<|im_start|>user\nFill it. The till holds 5.<|im_end|>" in begin
    assert '"description": "Puts money into the till."' in begin and '"amount": {"type": "integer"' in begin
    assert '"name": "look"' in begin and "_hidden" not in begin and "get_reward" not in begin
    answers = [part.partition("\n</tool_response>")[0] for part in found.text.split("<tool_response>\n")[1:]]
    assert answers[:3] == ["35", "error: ValueError: nothing is taken out", "35"]
    assert "there is no tool 'take'" in answers[3]


def test_a_limit_ends_an_episode_that_is_scored_all_the_same_and_none_is_unscored(file):
    found = played(
        PROMPT, [call("put", '{"amount": 1}')], environment=Methods(factory=f"{file}:Till"), limits=Limits(max_turns=2)
    )
    assert found.valid and found.rewards == {"Till": 0.07} and found.info["stop"] == "max_turns"
    found = played(PROMPT, [call("put", '{"amount": 8}'), "x"], environment=Methods(factory=f"{file}:Till"))
    assert found.valid and found.rewards == {"Till": None}


def test_each_rollout_has_an_object_of_its_own(file):
    found = asyncio.run(play(PROMPT, ["Done."], count=4, environment=Methods(factory=f"{file}:Till", workers=2)))
    assert [rollout.rewards for rollout in found] == [{"Till": 0.05}] * 4


def test_what_cannot_be_a_tool_or_a_score_is_said(file):
    bare = played(PROMPT, ["x"], environment=Methods(factory=f"{file}:Bare"))
    assert not bare.valid and "in tools" in bare.error and "nothing" in bare.error
    slow = played(PROMPT, ["x"], environment=Methods(factory=f"{file}:Slow"), limits=Limits(step_s=0.3))
    assert not slow.valid and "TimeoutError in score" in slow.error
    with pytest.raises(ValueError, match="NoReset has no method `reset`"):
        Methods(factory=f"{file}:NoReset")
    other = asked("x", extra={})
    missing = played(other, ["x"], environment=Methods(factory=f"{file}:Till"))
    assert not missing.valid and "TypeError in reset" in missing.error and "'start'" in missing.error
