"""Agents that go on while the learner updates: their calls wait for the next weights, and each token has the version that drew it."""

import asyncio
import dataclasses
import json
import time
from pathlib import Path

import aiohttp
import pytest

from jaxrl_llm import command_line
from jaxrl_llm.experience import Ending, Rollout
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.train.step import StageTrainer

STEPS, PROMPTS, GROUP = 4, 4, 2
GIN = """
from __gin__ import dynamic_registration
from jaxrl_llm import train
from jaxrl_llm.data import rows
from jaxrl_llm.data import tokenizer
from jaxrl_llm.environments import calculator
from jaxrl_llm.models import qwen3
include 'tests/tiny.gin'
train.Run.stages = [@rl/train.Stage()]
train.Stage.environment = @calculator.Calculator()  # an agent takes its place
TOKENIZER = @tokenizer.ByteTokenizer()
tokenizer.ByteTokenizer.chat_template = '''{% for m in messages %}{{ m.content ~ (eos_token if m.role == "assistant" else ":") }}{% endfor %}'''
DATA = @rows.Rows()
EVAL_DATA = @rows.Rows()
REWARD = None
MAX_STALENESS = 1
MINIBATCHES = 1
LEARNING_RATE = 0.03
WARMUP_STEPS = 1
PROMPT_LIMIT = 16
RESPONSE_LIMIT = 24
qwen3.Qwen3.vocabulary_size = 264
"""


class Twice:
    """Agents that call twice; those of a batch after the first begin their second call once the update before that batch is under way."""

    def __init__(self) -> None:
        self.built = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self._updates: dict[int, asyncio.Event] = {}

    def update(self, number: int) -> asyncio.Event:
        """Set once update `number`, from 1, has begun."""
        return self._updates.setdefault(number, asyncio.Event())

    def build(self, prompt, sample: int, seed: int) -> "Caller":
        del prompt, sample, seed
        self.built += 1
        return Caller(self, (self.built - 1) // (PROMPTS * GROUP))


class Caller:
    def __init__(self, factory: Twice, batch: int) -> None:
        self.factory, self.batch = factory, batch

    async def run(self, task, endpoint) -> Ending:
        self.factory.loop = asyncio.get_running_loop()
        messages, said = list(task.messages), ""
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.key}"}) as http:
            for turn in range(2):
                if turn and self.batch:
                    await self.factory.update(self.batch).wait()
                body = {"model": endpoint.model, "messages": messages, "max_tokens": 4}
                async with http.post(f"{endpoint.base_url}/chat/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    message = (await answer.json())["choices"][0]["message"]
                said += message["content"] or ""
                messages += [message, {"role": "user", "content": "b"}]
        return Ending(rewards={"length": float(len(said))})


def run_of(folder: Path, agent: Twice):
    """A run of STEPS steps in `folder`, whose rollouts `agent` plays, and which samples one step ahead with the embedded sampler."""
    prompts = [json.dumps({"prompt": [{"role": "user", "content": f"{i}"}]}) for i in range(16)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts))
    (folder / "run.gin").write_text(GIN)
    counts = {"STEPS": STEPS, "PROMPTS_PER_STEP": PROMPTS, "GROUP_SIZE": GROUP}
    given = {"RUN_DIR": repr(str(folder / "run")), "rows.Rows.source": repr(str(folder / "prompts.jsonl"))} | counts
    run, _ = command_line.build([str(folder / "run.gin")], [f"{name}={value}" for name, value in given.items()])
    (stage,) = run.stages
    return dataclasses.replace(run, stages=[dataclasses.replace(stage, environment=None, agent=agent, evaluations=())])


def drawn(rollout: Rollout) -> list[set[int]]:
    """The versions of the tokens of each call, in the order of the calls."""
    calls: dict[int, set[int]] = {}
    for branch in rollout.paths:
        for turn in branch.turns:
            calls.setdefault(turn.call, set()).update(branch.versions[turn.start : turn.end].tolist())
    return [calls[number] for number in sorted(calls)]


def test_calls_during_an_update_wait_and_are_answered_by_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Batch s + 1 begins under version s - 1, in step s; its second calls come in the update of that step, which makes version s."""
    agent, learned, waited = Twice(), list[list[Rollout]](), list[int]()
    services = []
    check, update = StageTrainer.check_rewards, Learner.update

    def noting(stage: StageTrainer, batch) -> None:
        learned.append(batch.rollouts)
        services.append(stage.collector.generator.player.service)
        check(stage, batch)

    def updating(learner: Learner, *arguments):
        """The update, once all second calls of the next batch have come; as many seconds later as they would need to be answered."""
        number, service = len(learned), services[-1]
        agent.loop.call_soon_threadsafe(agent.update(number).set)
        expected, until = (PROMPTS * GROUP if number < STEPS else 0), time.monotonic() + 60
        while service.waiting < expected and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.3)
        waited.append(service.waiting)
        return update(learner, *arguments)

    monkeypatch.setattr(StageTrainer, "check_rewards", noting)
    monkeypatch.setattr(Learner, "update", updating)
    assert run_of(tmp_path, agent).run() == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    assert waited == [PROMPTS * GROUP] * (STEPS - 1) + [0]
    assert [row.get("agents/held_calls", 0) for row in rows] == waited
    for step, rollouts in enumerate(learned, 1):
        assert len(rollouts) == PROMPTS * GROUP and all(rollout.valid for rollout in rollouts)
        expected = [{0}, {0}] if step == 1 else [{step - 2}, {step - 1}]
        assert all(drawn(rollout) == expected for rollout in rollouts), [drawn(r) for r in rollouts]
    for row in rows[1:]:  # the log-probs of each call are those of the version that it says
        assert row["gap/lag0"] < 1e-4 < 1e-3 < row["gap/lag1"], row
