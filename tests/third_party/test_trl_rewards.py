"""TRL's own reward functions, and one in TRL's async form, give the numbers that they give when they are called by themselves."""

import asyncio

import numpy as np
import pytest

from jaxrl_llm.experience import Prompt, Rollout
from jaxrl_llm.rewards.function import Function

rewards = pytest.importorskip("trl.rewards", reason="trl is not installed: see tests/third_party/requirements.txt")

TEXTS = ["<think>\na\n</think>\nb", "b b b b b b", "<think>x</think> y", ""]


def rollout(text: str, number: int) -> Rollout:
    tokens = np.arange(3 + 4 * number, dtype=np.int32) % 5
    asked = [{"role": "user", "content": "q"}]
    # "prompt" is what rows of messages keep of their row, in which form completions are given then.
    extra = {"level": 2 * number, "prompt": asked}
    prompt = Prompt(id=str(number), messages=asked, tokens=np.array([1], np.int32), extra=extra)
    shape = len(tokens)
    return Rollout(
        prompt=prompt, tokens=tokens, sampler_logprobs=np.full(shape, -1.0, np.float32), mask=np.ones(shape, bool),
        versions=np.zeros(shape, np.int32), finish="stop", text=text,
    )  # fmt: skip


ROLLOUTS = [rollout(text, number) for number, text in enumerate(TEXTS)]
COMPLETIONS = [[{"role": "assistant", "content": text}] for text in TEXTS]


def score(function):
    found = asyncio.run(Function(function=function, name="f").score(ROLLOUTS))
    return found.parts["f"].tolist(), found.valid["f"].tolist()


@pytest.mark.parametrize(
    "function",
    [
        rewards.think_format_reward,
        rewards.get_soft_overlong_punishment(max_completion_len=12, soft_punish_cache=8),
        rewards.get_repetition_penalty_reward(ngram_size=2),
    ],
    ids=["format", "overlong", "repetition"],
)
def test_functions_of_trl(function):
    ids = [r.tokens.tolist() for r in ROLLOUTS]
    expected = function(prompts=["q"] * 4, completions=COMPLETIONS, completion_ids=ids, level=[0, 2, 4, 6])
    assert len(set(expected)) > 1
    assert score(function) == (pytest.approx([float(x) for x in expected]), [True] * 4)


async def by_level(prompts, completions, completion_ids, level, log_extra, log_metric, trainer_state, **columns):
    await asyncio.sleep(0)
    log_extra("length", [len(ids) for ids in completion_ids])
    log_metric("mean", 0.5)
    assert trainer_state is None and [c[0]["content"] for c in completions] == TEXTS
    return [None if n == 4 else n / 2 for n in level]


def test_an_async_function_whose_none_is_invalid():
    parts, valid = score(by_level)
    assert valid == [True, True, False, True] and [p for p, ok in zip(parts, valid) if ok] == [0.0, 1.0, 3.0]


def test_a_list_of_another_length_is_an_error_that_names_the_function(caplog):
    def short_of_one(completions, **columns):
        return [1.0] * 3

    found = asyncio.run(Function(function=short_of_one).score(ROLLOUTS))
    assert not found.valid["short_of_one"].any()
    assert "'short_of_one' returned list of 3 for 4 completions" in caplog.text
