"""Environments of a real OpenEnv server, which runs in an environment of its own (OPENENV_PYTHON)."""

import asyncio
import json
import random
import subprocess
import zlib
from dataclasses import replace

import pytest
from environments.players import asked, call, play
from third_party.serving_openenv import PYTHON, has_openenv, serving

from jaxrl_llm.environments.openenv import OpenEnv
from jaxrl_llm.environments.openenv_trace import export
from jaxrl_llm.experience import Task
from jaxrl_llm.rollouts.given_rewards import scored


@pytest.fixture(scope="module", autouse=True)
def installed():
    if not has_openenv():
        pytest.skip("openenv is not installed: see tests/third_party/openenv_requirements.txt and OPENENV_PYTHON")


def test_eight_games_at_once_and_failures(tmp_path):
    """A guess of 13 raises in the server, which is told as often as is allowed; the group of seven games and a failed one is used."""
    prompt = asked("Play.", extra={"highest": 5})
    secret = random.Random(zlib.crc32(b"p") >> 1).randint(1, 5)
    wrong = secret % 5 + 1

    async def main(url):
        config = OpenEnv(url=url, text="hint", columns=("highest",), tries=1)
        # Eight first turns, one of them no action, which is told; then all are right.
        texts = [f"I say {json.dumps({'number': wrong})}"] + [str(wrong)] * 7 + [str(secret)] * 8
        found = await play(prompt, texts, count=8, environment=config)
        return (
            found,
            await play(prompt, ["13"], environment=replace(config, tries=0)),
            await play(prompt, ["13", str(secret)], environment=config),
        )

    with serving("guess", tmp_path) as url:
        found, failing, told = asyncio.run(main(url))
    assert all(rollout.valid for rollout in found), [rollout.error for rollout in found]
    assert "error: the action is a JSON object with the fields" in "".join(rollout.text for rollout in found)
    for rollout in found:
        assert rollout.rewards["reward"] == pytest.approx(sum(r for r in rollout.info["rewards"] if r is not None))
        assert rollout.info["rewards"][-1] == 1.0 and rollout.info["rewards"][0] is None
    assert not failing[0].valid and "EXECUTION_ERROR: no such luck" in failing[0].error
    assert told[0].valid and told[0].rewards == {"reward": 1.0} and told[0].info["failed_steps"] == 1
    group = [*found[:7], failing[0]]
    scores = asyncio.run(scored(None, group, {}))
    assert scores.valid["env/reward"].tolist() == [True] * 7 + [False]
    check_traces(found)


def check_traces(rollouts) -> None:
    program = (
        "import json, sys; from openenv.core.harness.training import TrainingTrace as T\n"
        "for one in json.load(sys.stdin): T.model_validate(one); print(len(T.from_entries(one['turns']).turns))"
    )
    given = json.dumps([export(rollout) for rollout in rollouts])
    done = subprocess.run([PYTHON, "-c", program], input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [int(line) for line in done.stdout.split()] == [len(rollout.turns) for rollout in rollouts]


def test_sessions_beyond_the_servers_most_wait_for_room(tmp_path):
    prompt = asked("Play.", extra={"highest": 1})
    with serving("guess", tmp_path) as url:
        config = OpenEnv(url=url, text="hint", columns=("highest",))
        found = asyncio.run(play(prompt, ["1"], count=12, environment=config))

        async def state():
            environment = config.build(prompt, 0, 0)
            try:
                await environment.reset(Task(prompt=prompt))
                return await environment.state()
            finally:
                await environment.close()

        assert asyncio.run(state())["step_count"] == 0
    assert [rollout.rewards for rollout in found] == [{"reward": 1.0}] * 12, [rollout.error for rollout in found]


def test_tools_are_listed_and_called(tmp_path):
    prompt = asked("What is 47+85?")
    with serving("tools", tmp_path) as url:
        texts = [call("add", '{"a": 47, "b": 85}'), call("add", '{"a": 47}'), "It is 132."]
        (found,) = asyncio.run(play(prompt, texts, environment=OpenEnv(url=url, tools=True)))
    assert found.valid, found.error
    assert "Adds two numbers." in found_prompt(found)
    assert "<tool_response>\n132\n</tool_response>" in found.text and "error: " in found.text
    assert len(found.turns) == 3 and found.rewards == {}


def found_prompt(rollout) -> str:
    from environments.players import MADE

    return MADE.tokenizer.decode(rollout.paths[0].prefix)
