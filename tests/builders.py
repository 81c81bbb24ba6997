"""Rollouts and scored groups from plain numbers, for the tests of what flows between sampler and learner."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.experience import Prompt, Rollout, ScoredGroup, Scores


def make_prompt(name: str = "p", tokens: Sequence[int] = (1, 2), **fields: Any) -> Prompt:
    return Prompt(id=name, text=name, tokens=np.array(tokens, np.int32), **fields)


def make_rollout(
    prompt: Prompt,
    tokens: Sequence[int],
    *,
    mask: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = None,
    **fields: Any,
) -> Rollout:
    """A rollout of `prompt`; by default the policy chose every token, with log-prob -0.5."""
    n = len(tokens)
    return Rollout(
        prompt=prompt,
        tokens=np.array(tokens, np.int32),
        sampler_logprobs=np.array([-0.5] * n if logprobs is None else logprobs, np.float32),
        mask=np.array([1] * n if mask is None else mask, bool),
        versions=np.zeros(n, np.int32),
        **{"finish": "stop", **fields},
    )


def make_group(
    rollouts: Sequence[Rollout],
    parts: Mapping[str, Sequence[float]],
    valid: Mapping[str, Sequence[bool]] | None = None,
    weights: Mapping[str, float] | None = None,
) -> ScoredGroup:
    """The rollouts with their rewards by part; a part is valid everywhere where `valid` does not name it."""
    given = valid or {}
    scores = Scores(
        parts={name: np.array(values, float) for name, values in parts.items()},
        valid={name: np.array(given.get(name, [True] * len(rollouts)), bool) for name in parts},
        weights=weights or {},
    )
    return ScoredGroup(rollouts=rollouts, scores=scores)
