"""Recorded dialogues are read and replayed: a recorded call gets its result, any other an error, and the reward compares the calls."""

import asyncio
import json
import os
from pathlib import Path

import pytest
from environments.players import asked, call, played

from jaxrl_llm import command_line
from jaxrl_llm.data.tool_dialogues import ToolDialogues
from jaxrl_llm.environments.replayed_tools import ReplayedTools
from jaxrl_llm.experience import Action, Prompt, ToolCall

WEATHER = {"name": "weather", "description": "The weather.", "parameters": {"type": "object", "properties": {"town": {"type": "string"}, "day": {"type": "integer"}}}}  # fmt: skip


def turn(role, value):
    return {"from": role, "value": value if isinstance(value, str) else json.dumps(value)}


RAIN = {
    "conversations": [
        turn("human", "Hello."), turn("gpt", "Hello, how can I help?"), turn("human", "Will it rain in Ely?"),
        turn("function_call", {"name": "weather", "arguments": {"town": "Ely", "day": 1}}), turn("observation", {"rain": True}),
        turn("gpt", "It will."), turn("human", "And on the second day?"),
        turn("function_call", {"name": "weather", "arguments": {"town": "Ely", "day": 2}}), turn("observation", {"rain": False}),
        turn("gpt", "It will not."), turn("human", "Thanks."), turn("gpt", "You are welcome."),
    ],
    "tools": json.dumps([WEATHER]),
}  # fmt: skip
TALK = {"conversations": [turn("human", "Hello."), turn("gpt", "Hello.")], "tools": "[]"}


@pytest.fixture
def row(tmp_path) -> Prompt:
    (row,) = ToolDialogues(path=written(tmp_path, TALK, RAIN)).rows()
    return row


def written(folder, *rows) -> str:
    file = folder / "dialogues.json"
    file.write_text(json.dumps(rows))
    return str(file)


def test_a_prompt_is_what_was_said_before_the_first_call(row):
    assert row.id == "tool_dialogues/train/1"  # the first dialogue has no call
    assert [(m["role"], m["content"]) for m in row.messages] == [
        ("user", "Hello."), ("assistant", "Hello, how can I help?"), ("user", "Will it rain in Ely?"),
    ]  # fmt: skip
    assert row.extra["tools"] == [{"type": "function", "function": WEATHER}]
    assert row.extra["recorded"] == [
        {"name": "weather", "arguments": {"town": "Ely", "day": 1}, "result": '{"rain": true}'},
        {"user": "And on the second day?"},
        {"name": "weather", "arguments": {"town": "Ely", "day": 2}, "result": '{"rain": false}'},
    ]


@pytest.mark.parametrize(
    ("conversations", "tools", "said"),
    [
        ([turn("human", "x"), turn("function_call", "no")], "[]", "no JSON"),
        ([turn("function_call", {"name": "f", "arguments": [1]}), turn("observation", "1")], "[]", "no JSON object"),
        ([turn("function_call", {"name": "f", "arguments": {}})], "[]", "no 'observation'"),
        ([turn("observation", "1")], "[]", "without a call"),
        ([turn("robot", "1")], "[]", "robot"),
        (RAIN["conversations"], '{"name": "f"}', "a list of functions"),
        (RAIN["conversations"], "[", "no JSON"),
    ],
)
def test_a_malformed_row_is_named(conversations, tools, said, tmp_path):
    path = written(tmp_path, RAIN, {"conversations": conversations, "tools": tools})
    with pytest.raises(ValueError, match=f"row 1:.*{said}"):
        ToolDialogues(path=path).rows()


def test_dialogues_with_too_few_calls_are_left_out(tmp_path):
    path = written(tmp_path, TALK, RAIN)
    assert [row.id for row in ToolDialogues(path=path, calls_at_least=2).rows()] == ["tool_dialogues/train/1"]
    with pytest.raises(ValueError, match="calls_at_least"):
        ToolDialogues(path=path, calls_at_least=3).rows()


def replay(row, *turns):
    """The observations of these turns, each a list of (name, arguments), and the rewards."""

    async def play():
        environment = ReplayedTools().build(row, 0, 0)
        found = []
        for calls in turns:
            made = tuple(ToolCall(id=f"c{i}", name=name, arguments=given) for i, (name, given) in enumerate(calls))
            found.append(await environment.step(Action(text="so", calls=made)))
        return found, await environment.score()

    return asyncio.run(play())


FIRST, SECOND = ("weather", {"day": 1, "town": "Ely"}), ("weather", {"town": "Ely", "day": 2})


def test_the_recorded_calls_get_their_results_and_the_whole_reward(row):
    (one, reply, two, end), rewards = replay(row, [FIRST], [], [SECOND], [])
    assert one.messages[0] == {"role": "tool", "tool_call_id": "c0", "name": "weather", "content": '{"rain": true}'}
    assert reply.messages == [{"role": "user", "content": "And on the second day?"}] and not reply.done
    assert two.messages[0]["content"] == '{"rain": false}'
    assert end.done and not end.messages and end.info == {"calls/ok": 2} and rewards == {"calls": 1.0}


@pytest.mark.parametrize(
    ("turns", "counts", "reward"),  # the recorded calls that were made, of those that were recorded or made
    [
        ([[], []], {}, 0.0),
        ([[FIRST], [], []], {"ok": 1}, 1 / 2),
        ([[("weather", {"town": "Ely"})], [FIRST], [], [SECOND], []], {"unrecorded": 1, "ok": 2}, 2 / 3),
        ([[FIRST], [FIRST], [], [SECOND], []], {"ok": 2, "repeated": 1}, 2 / 3),
        ([[("forecast", {"town": "Ely", "day": 1})]], {"unrecorded": 1}, 0.0),
        ([[FIRST] * 9], {"ok": 1, "repeated": 7, "mistake": 1}, 1 / 10),
    ],
)
def test_other_calls_are_counted_and_lower_the_reward(row, turns, counts, reward):
    found, rewards = replay(row, *turns)
    assert found[-1].info == {f"calls/{name}": n for name, n in counts.items()}
    assert rewards == {"calls": pytest.approx(reward)}
    for observation in found:
        for message in observation.messages:
            assert message["role"] == "user" or message["content"].startswith(("{", "error: "))


def test_a_policy_that_calls_as_recorded_plays_the_dialogue_to_its_end(row):
    prompt = asked(row.messages[-1]["content"], extra=row.extra)
    texts = [call(name, json.dumps(given)) if name else "So." for name, given in (FIRST, ("", {}), SECOND, ("", {}))]
    found = played(prompt, texts, environment=ReplayedTools())
    assert found.valid, found.error
    assert found.rewards == {"calls": 1.0} and len(found.turns) == 4 and found.info["calls/ok"] == 2
    assert "And on the second day?" in found.text and '{"rain": false}' in found.text


def test_a_row_without_a_recording_is_refused():
    with pytest.raises(ValueError, match="ToolDialogues"):
        ReplayedTools().build(Prompt(id="p", text="?"), 0, 0)


def test_the_recipe_holds_out_the_first_dialogues(tmp_path):
    path = written(tmp_path, RAIN, TALK, RAIN, RAIN)
    run, _ = command_line.build(
        ["gin/agents/tool_replay.gin"], [f"PRETRAINED={str(tmp_path)!r}", f"DIALOGUES={path!r}", "HELDOUT=2"]
    )
    (stage,) = run.stages
    held = stage.evaluations[0].data
    assert [[row.id[-1] for row in data.rows()] for data in (stage.data, held)] == [["2", "3"], ["0"]]
    assert isinstance(stage.environment, ReplayedTools) and stage.max_turns == 8


@pytest.mark.skipif("JAXRL_LLM_DATA" not in os.environ, reason="JAXRL_LLM_DATA names no folder of data sets")
def test_real_dialogues_are_whole_when_they_are_replayed_as_recorded():
    """A policy that makes the recorded calls hears every recorded result, and nothing else of tools."""
    path = Path(os.environ["JAXRL_LLM_DATA"]) / "tool_multi_turn" / "glaive_toolcall_en_demo.json"
    written = [r for r in json.loads(path.read_text()) if any(t["from"] == "function_call" for t in r["conversations"])]
    rows = ToolDialogues(path=str(path)).rows()
    assert len(rows) == len(written) == 153
    for row, raw in zip(rows, written, strict=True):
        turns = list[list[tuple[str, dict]]]()
        for step in row.extra["recorded"]:
            turns.append([] if "user" in step else [(step["name"], step["arguments"])])
        found, rewards = replay(row, *turns, [])
        assert rewards == {"calls": 1.0} and found[-1].done and not any(o.done for o in found[:-1])
        heard = [m["content"] for o in found for m in o.messages if m["role"] == "tool"]
        assert heard == [t["value"] for t in raw["conversations"] if t["from"] == "observation"]
