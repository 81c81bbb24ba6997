"""Scores texts as the responses to one prompt."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.experience import Prompt, Rollout, Scores
from jaxrl_llm.protocols import Reward

Score = Callable[..., Scores]


def rollout(prompt: Prompt, text: str) -> Rollout:
    return Rollout(
        prompt=prompt,
        tokens=np.zeros(0, np.int32),
        sampler_logprobs=np.zeros(0, np.float32),
        mask=np.zeros(0, bool),
        versions=np.zeros(0, np.int32),
        finish="stop",
        text=text,
    )


@pytest.fixture
def score() -> Score:
    """(reward, texts, reference) -> Scores of the texts as one group."""

    def run(
        reward: Reward, texts: Sequence[str], reference: str = "", extra: Mapping[str, Any] | None = None
    ) -> Scores:
        prompt = Prompt(id="p", text="?", reference=reference, extra=extra or {})
        return asyncio.run(reward.score([rollout(prompt, text) for text in texts]))

    return run
