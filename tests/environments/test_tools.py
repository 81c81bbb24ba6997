"""Tools in an environment: calls are answered in their order, mistakes of the policy are told, and what a rollout held is closed."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from jaxrl_llm.environments import tools
from jaxrl_llm.environments.python_tool import Python
from jaxrl_llm.environments.search import Search
from jaxrl_llm.environments.tools import Mistake, Tools
from jaxrl_llm.experience import Action, Observation, Prompt, Task, ToolCall

PROMPT = Prompt(id="p", text="?")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="programs are shut in on Linux alone")


def calls(*named: tuple[str, Any]) -> Action:
    found = [ToolCall(id=f"c{i}", name=name, arguments=given) for i, (name, given) in enumerate(named)]
    return Action(text="", calls=tuple(found))


def played(factory: Tools, actions: Sequence[Action]) -> list[Observation]:
    """The observations of one rollout that takes these turns."""

    async def play() -> list[Observation]:
        environment = factory.build(PROMPT, 0, 1)
        try:
            assert await environment.reset(Task(prompt=PROMPT)) == Observation()
            return [await environment.step(action) for action in actions]
        finally:
            await environment.close()

    return asyncio.run(play())


def contents(observation: Observation) -> list[str]:
    return [message["content"] for message in observation.messages]


class Doubler:
    """Doubles a number, and notes what is done with it."""

    schema = tools.function("double", "Doubles a number.", number="the number")

    def __init__(self) -> None:
        self.noted: list[str] = []

    def use(self, prompt: Prompt, seed: int) -> "Doubler":
        self.noted.append(f"use {prompt.id} {seed}")
        return self

    async def call(self, arguments: Mapping[str, Any]) -> str:
        text = tools.text_argument(arguments, "number")
        if not text.isdigit():
            raise Mistake(f"error: {text!r} is no number")
        return str(2 * int(text))

    async def close(self) -> None:
        self.noted.append("close")


def test_calls_are_answered_in_their_order_and_a_turn_without_one_is_the_last() -> None:
    doubler = Doubler()
    turn = calls(("double", {"number": "4"}), ("double", {"number": "x"}), ("double", {}), ("half", {"number": "4"}))
    first, last = played(Tools(tools=[doubler]), [turn, Action(text="8")])
    assert contents(first) == [
        "8",
        "error: 'x' is no number",
        "error: the argument 'number' is needed, a text (got [])",
        "error: there is no tool 'half'; there are double",
    ]
    assert [m["tool_call_id"] for m in first.messages] == ["c0", "c1", "c2", "c3"] and not first.done
    assert first.info == {"calls/ok": 1, "calls/mistake": 2, "calls/unknown_tool": 1}
    assert last.done and not last.messages
    assert doubler.noted == ["use p 1", "close"]


def test_calls_that_cannot_be_read_are_told_and_not_made() -> None:
    doubler = Doubler()
    bad = Action(
        text="",
        calls=(
            ToolCall(id="a", name="", arguments=None, raw="{", status="bad_json"),
            ToolCall(id="b", name="", arguments=None, raw="{", status="unclosed"),
        ),
    )
    (found,) = played(Tools(tools=[doubler]), [bad])
    assert ["no JSON object" in contents(found)[0], "not closed" in contents(found)[1]] == [True, True]
    assert not found.done and doubler.noted == []


def test_more_calls_than_a_turn_may_have_are_told_so() -> None:
    (found,) = played(Tools(tools=[Doubler()], max_calls=1), [calls(*[("double", {"number": "1"})] * 2)])
    assert contents(found) == ["2", "error: at most 1 calls of one turn are answered"]


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="double"):
        Tools(tools=[Doubler(), Doubler()])


@LINUX
@pytest.mark.xdist_group("sandbox")
def test_a_sum_is_computed_in_two_calls_of_the_interpreter() -> None:
    tool = Python(cell_s=20.0)
    turns = [calls(("python", {"code": "xs = [47, 85]"})), calls(("python", {"code": "print('sum:')\nsum(xs)"}))]
    first, second = played(Tools(tools=[tool]), turns)
    assert contents(first) == ["(no output)"]
    assert contents(second) == ["sum:\n132"]


@LINUX
@pytest.mark.xdist_group("sandbox")
def test_errors_and_lost_sessions_of_the_interpreter_are_told() -> None:
    tool = Python(cell_s=1.0, most_text=200)
    turns = [
        {"code": "1/0"},
        {"code": "print('z' * 1000)"},
        {"code": "x = 1\nwhile True: pass"},
        {"code": "x"},
        {"kode": ""},
    ]
    found = played(Tools(tools=[tool]), [calls(("python", t)) for t in turns])
    error, long, lost, anew, wrong = (contents(o)[0] for o in found)
    assert error.endswith("ZeroDivisionError: division by zero")
    assert long.startswith("z" * 100) and "800 characters left out" in long
    assert lost.startswith("timeout") and "session lost" in lost
    assert "NameError" in anew
    assert "'code' is needed" in wrong
    assert found[-1].info == {"calls/failed": 3, "calls/ok": 1, "calls/mistake": 1}


@LINUX
@pytest.mark.xdist_group("sandbox")
def test_more_rollouts_than_interpreters_wait_for_one() -> None:
    factory = Tools(tools=[Python(cell_s=20.0, sessions=2)])

    async def rollout(number: int) -> str:
        environment = factory.build(PROMPT, number, number)
        try:
            (answer,) = contents(await environment.step(calls(("python", {"code": f"{number} * 2"}))))
            return answer
        finally:
            await environment.close()

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(rollout(n) for n in range(8)))

    assert asyncio.run(all_of_them()) == [str(2 * n) for n in range(8)]


def test_a_search_finds_the_passages_that_share_words(tmp_path: Any) -> None:
    pytest.importorskip("bm25s", reason="bm25s is not installed: pip install 'jaxrl-llm[search]'")
    rows = ["The heron waits in shallow water.", "A lathe turns wood.", "Herons and egrets eat fish."]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    tool = Search(corpus=str(corpus), passages=2)
    found = played(Tools(tools=[tool]), [calls(("search", {"query": "lathe"})), calls(("search", {"query": "zebra"}))])
    assert [contents(o)[0] for o in found] == ["[1] A lathe turns wood.", "nothing found"]
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"txt": "b"}')
    with pytest.raises(ValueError, match=r"row 2.*'text'"):
        played(Tools(tools=[Search(corpus=str(bad))]), [calls(("search", {"query": "a"}))])
    with pytest.raises(ValueError, match="no file"):
        played(Tools(tools=[Search(corpus=str(tmp_path / "none"))]), [calls(("search", {"query": "a"}))])
