"""An untrained policy learns by GRPO from an agent that asks the chat route of the gateway and gives the reward itself."""

import json
import math

import pytest
import tiny_run

RUN = """
from __gin__ import dynamic_registration
from jaxrl_llm import train
from jaxrl_llm.data import rows
from jaxrl_llm.environments import coroutine
include 'gin/base.gin'
include 'gin/algorithms/grpo.gin'
include 'gin/samplers/embedded.gin'
include 'tests/tiny_playing.gin'
DATA = @rows.Rows()
EVAL_DATA = @rows.Rows()
rows.Rows.source = '{rows}'
REWARD = None
train.Stage.agent = @coroutine.Coroutine()
coroutine.Coroutine.function = 'environments.digits_agent:play'
STEPS = {steps}
PROMPTS_PER_STEP = {prompts}
GROUP_SIZE = 8
PROMPT_LIMIT = 40
RESPONSE_LIMIT = {tokens}
ROW_TOKENS = 128
ROWS = 8
LEARNING_RATE = 1e-2
SAVE_EVERY = 100
"""
STEPS, PROMPTS, TOKENS = 15, 8, 16
DIGITS, VOCABULARY = 10, 264  # of bytes and control tokens


@pytest.mark.slow
def test_the_reward_of_an_agent_rises_beyond_chance(tmp_path):
    """Chance is a policy that says every token alike; what it gets in a step is known to a few thousandths."""
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"Count {i}."}) for i in range(PROMPTS)))
    file = tmp_path / "run.gin"
    file.write_text(RUN.format(rows=data, steps=STEPS, prompts=PROMPTS, tokens=TOKENS))
    done = tiny_run.launch(tmp_path / "run", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = tiny_run.rows(tmp_path / "run")[1:]
    rewards = [row["reward/mean"] for row in rows]
    chance = DIGITS / VOCABULARY
    spread = math.sqrt(chance * (1 - chance) / (PROMPTS * 8 * (TOKENS / 2)))  # a mean of at least so many tokens
    assert abs(rewards[0] - chance) < 5 * spread < 0.05
    assert min(rewards[-3:]) > chance + 15 * spread, rewards
    assert all(row["trajectory/invalid"] == 0 and row["trajectory/branches"] == 1 for row in rows)
    assert max(row["gap/max"] for row in rows) < 1e-4
