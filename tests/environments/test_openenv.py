"""The client of OpenEnv's servers, against a stand-in that speaks their messages."""

import asyncio
import json
from contextlib import asynccontextmanager

import numpy as np
import pytest
from aiohttp import web
from environments.players import asked, call, play

from jaxrl_llm.environments.openenv import OpenEnv, action_of, result_of
from jaxrl_llm.environments.openenv_trace import export
from jaxrl_llm.experience import Action, Branch, Rollout, Task, Turn

SCHEMA = {"properties": {"word": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["word"]}
TOOL = {
    "name": "twice",
    "description": "Doubles.",
    "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}},
}
PROMPT = asked("Say it.")


def error(code: str) -> dict:
    return {"type": "error", "data": {"message": "no", "code": code}}


def observed(reward=None, done=False, **seen) -> dict:
    return {"type": "observation", "data": {"observation": {**seen, "metadata": {}}, "reward": reward, "done": done}}


class Server:
    """Answers by a rule of (kind, data) -> message; notes what it was asked. A message "drop" ends the session."""

    def __init__(self, rule, heartbeat=None) -> None:
        self.rule, self.heartbeat = rule, heartbeat
        self.asked: list[tuple[str, dict]] = []
        self.open = self.schemas = 0

    async def socket(self, request: web.Request) -> web.WebSocketResponse:
        found = web.WebSocketResponse(heartbeat=self.heartbeat)
        await found.prepare(request)
        self.open += 1
        async for message in found:
            given = json.loads(message.data)
            assert ("data" in given) == (given["type"] in ("reset", "step")), (
                "the released server takes no other messages"
            )
            data = given.get("data", {})
            self.asked.append((given["type"], data))
            if given["type"] == "close" or (answer := self.rule(given["type"], data)) == "drop":
                break
            await found.send_json(answer)
        self.open -= 1
        return found

    async def schema(self, request: web.Request) -> web.Response:
        self.schemas += 1
        return web.json_response({"action": SCHEMA, "observation": {}, "state": {}})

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_get("/ws", self.socket)
        app.router.add_get("/schema", self.schema)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
            assert self.open == 0, "sessions were left open"
        finally:
            await runner.cleanup()


def rollouts(rule, texts, count=1, **settings):
    server = Server(rule)

    async def main():
        async with server.serving() as url:
            return await play(PROMPT, texts, count=count, environment=OpenEnv(url=url, **settings))

    return server, asyncio.run(main())


def test_rewards_of_steps_are_summed_and_kept_one_by_one():
    def rule(kind, data):
        if kind == "reset":
            return observed(said="begin")
        return observed(reward=0.25 if data["word"] == "one" else None, said="on", done=data["word"] == "three")

    server, (found,) = rollouts(rule, ["one", "two", '```json\n{"word": "three"}\n```'], text="said")
    assert found.valid, found.error
    assert found.rewards == {"reward": 0.25} and found.info["rewards"] == [None, 0.25, None, None]
    assert [data for kind, data in server.asked if kind == "step"] == [{"word": w} for w in ("one", "two", "three")]
    assert server.schemas == 1 and server.asked[-1][0] == "close"


def test_members_of_a_group_play_the_same_game():
    server, _ = rollouts(lambda kind, data: observed(done=kind == "step", said=""), ["x"], count=3)
    seeds = [data["seed"] for kind, data in server.asked if kind == "reset"]
    assert len(seeds) == 3 and len(set(seeds)) == 1


def test_an_episode_without_rewards_is_unscored():
    _, (found,) = rollouts(lambda kind, data: observed(done=kind == "step", said="x"), ["x"])
    assert found.valid and found.rewards == {}


@pytest.mark.parametrize(("tries", "valid"), [(2, True), (1, False)])
def test_failed_steps_are_told_as_often_as_is_allowed(tries, valid):
    def rule(kind, data):
        if kind == "reset":
            return observed(said="begin")
        return error("EXECUTION_ERROR") if data["word"] == "bad" else observed(reward=1.0, done=True)

    _, (found,) = rollouts(rule, ["bad", "bad", "good"], tries=tries)
    assert found.valid == valid
    assert found.rewards == ({"reward": 1.0} if valid else {})
    assert found.text.count("error: EXECUTION_ERROR: no") == tries if valid else "EXECUTION_ERROR" in found.error


def test_what_does_not_fit_is_told_and_another_error_is_invalid():
    def rule(kind, data):
        if kind == "reset":
            return observed(said="begin")
        return error("VALIDATION_ERROR" if data == {"wrod": 1} else "SESSION_ERROR")

    _, (found,) = rollouts(rule, ['{"wrod": 1}'] * 3 + ["x"], tries=0)
    assert (not found.valid and "SESSION_ERROR" in found.error and found.info == {}) or len(found.turns) == 4


def test_a_session_that_ends_is_invalid():
    _, (found,) = rollouts(lambda kind, data: observed(said="b") if kind == "reset" else "drop", ["x"])
    assert not found.valid and "ended the session" in found.error


def test_a_full_server_is_asked_again_until_the_wait_is_over():
    answers = [error("CAPACITY_REACHED"), error("CAPACITY_REACHED")]

    def rule(kind, data):
        return answers.pop() if answers else observed(done=kind == "step", reward=1.0)

    _, (found,) = rollouts(rule, ["x"])
    assert found.valid and not answers
    _, (full,) = rollouts(lambda kind, data: error("CAPACITY_REACHED"), ["x"], wait_s=0.6)
    assert not full.valid and "CAPACITY_REACHED" in full.error


def test_pings_are_answered_while_the_policy_thinks():
    server = Server(lambda kind, data: observed(done=kind == "step", reward=1.0), heartbeat=0.4)

    async def main():
        async with server.serving() as url:
            environment = OpenEnv(url=url).build(PROMPT, 0, 0)
            await environment.reset(Task(prompt=PROMPT))
            await asyncio.sleep(2.0)  # a server ends a session whose pings nobody answers
            seen = await environment.step(Action(text="x"))
            await environment.close()
            return seen

    assert asyncio.run(main()).reward == 1.0


def test_tools_of_the_environment_are_listed_and_called():
    def rule(kind, data):
        if data.get("type") == "list_tools":
            return observed(tools=[TOOL])
        if kind == "reset":
            return observed()
        n = data["arguments"]["n"]
        return observed(
            reward=0.5, tool_name="twice", result={"content": [{"type": "text", "text": str(2 * n)}]}, done=n == 9
        )

    texts = [call("twice", '{"n": 4}') + call("twice", '{"n": 5}'), call("twice", '{"n": 9}')]
    server, (found,) = rollouts(rule, texts, tools=True)
    assert found.valid, found.error
    assert [d["arguments"]["n"] for _, d in server.asked if d.get("type") == "call_tool"] == [4, 5, 9]
    assert "<tool_response>\n8\n</tool_response>" in found.text and "<tool_response>\n10\n" in found.text
    assert found.rewards == {"reward": 1.5}
    _, (none,) = rollouts(lambda kind, data: observed(tools=[], done=True), ["x"], tools=True)
    assert not none.valid and "has no tools" in none.error and "in tools" in none.error


TWO = {"properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a", "b"]}
NUMBER = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ('{"a": 1}', TWO, {"a": 1}),
        ('I go\n```json\n{"a": 1}\n```\nno:\n```\n{"a": 2}\n```', TWO, {"a": 2}),
        (" crane ", SCHEMA, {"word": "crane"}),
        ("7", NUMBER, {"a": 7}),
    ],
)
def test_actions_by_schema(text, schema, expected):
    assert action_of(text, schema) == expected


@pytest.mark.parametrize(("text", "schema"), [("x", TWO), ("7.5", NUMBER), ("true", NUMBER), ("[1]", NUMBER)])
def test_what_is_no_action_is_told(text, schema):
    found = action_of(text, schema)
    assert isinstance(found, str) and '"a": "integer"' in found


def test_results_of_tools():
    assert result_of({"error": {"error_type": "timeout", "message": "late"}}) == "error: late"
    assert result_of({"result": {"data": 3}}) == '{"data": 3}' and result_of({"result": "x"}) == "x"


def test_a_trace_has_each_call_once_with_the_mask_of_the_branch_that_learns_from_it():
    def branch(tokens, mask, turns):
        n = len(tokens)
        return Branch(
            prefix=np.array([1, 2], np.int32), tokens=np.array(tokens, np.int32), sampler_logprobs=-np.arange(n, dtype=np.float32),
            mask=np.array(mask, bool), versions=np.full(n, 4, np.int32), finish="stop", turns=turns,
        )  # fmt: skip

    first = branch([5, 6, 7, 8], [1, 1, 0, 1], (Turn(start=0, end=2, call=0), Turn(start=3, end=4, call=1)))
    second = branch([5, 6, 9], [0, 0, 1], (Turn(start=0, end=2, call=0), Turn(start=2, end=3, call=2)))
    rollout = Rollout(
        prompt=PROMPT, tokens=second.tokens, sampler_logprobs=second.sampler_logprobs, mask=second.mask, versions=second.versions,
        finish="stop", branches=(first, second), turns=second.turns,
    )  # fmt: skip
    found = json.loads(json.dumps(export(rollout)))
    assert found["schema_version"] == 1
    assert [(t["prompt_token_ids"], t["completion_token_ids"], t["loss_mask"]) for t in found["turns"]] == [
        ([1, 2], [5, 6], [0, 0, 1, 1]),
        ([1, 2, 5, 6, 7], [8], [0, 0, 0, 0, 0, 1]),
        ([1, 2, 5, 6], [9], [0, 0, 0, 0, 1]),
    ]
    assert found["turns"][1]["per_token_logps"] == [-3.0]
    assert found["turns"][1]["metadata"] == {"node_id": "call-1", "versions": [4]}
