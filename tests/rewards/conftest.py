"""Scores texts as the responses to one prompt."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.experience import Prompt, Rollout, ScoredGroup, Scores
from jaxrl_llm.protocols import Reward

Score = Callable[..., Scores]
Group = Callable[..., ScoredGroup]


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


def scored(
    reward: Reward, texts: Sequence[str], reference: str = "", extra: Mapping[str, Any] | None = None
) -> ScoredGroup:
    prompt = Prompt(id="p", text="?", reference=reference, extra=extra or {})
    rollouts = [rollout(prompt, text) for text in texts]
    return ScoredGroup(rollouts=rollouts, scores=asyncio.run(reward.score(rollouts)))


@pytest.fixture
def group() -> Group:
    """(reward, texts, reference, extra) -> the texts as one group with its scores."""
    return scored


@pytest.fixture
def score() -> Score:
    """(reward, texts, reference, extra) -> Scores of the texts as one group."""

    def run(*arguments: Any, **options: Any) -> Scores:
        return scored(*arguments, **options).scores

    return run
