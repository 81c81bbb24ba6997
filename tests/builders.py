"""Rollouts and scored groups from plain numbers, and a sampler that needs no model."""

import asyncio
from collections.abc import AsyncIterator, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.experience import Completion, Group, Prompt, Rollout, SamplingParams, Scores


def slow_but(quick: Container[Any], every: Iterable[Any]) -> list[Any]:
    """Parameters of tests, or tuples of them: `every` one, those besides `quick` with the mark of slow tests."""
    values = lambda x: x if isinstance(x, tuple) else (x,)  # noqa: E731
    return [pytest.param(*values(x), marks=[] if x in quick else pytest.mark.slow) for x in every]


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
        **{"finish": "stop", "versions": np.zeros(n, np.int32), **fields},
    )


def make_group(
    rollouts: Sequence[Rollout],
    parts: Mapping[str, Sequence[float]],
    valid: Mapping[str, Sequence[bool]] | None = None,
    weights: Mapping[str, float] | None = None,
) -> Group:
    """The rollouts with their rewards by part; a part is valid everywhere where `valid` does not name it."""
    given = valid or {}
    scores = Scores(
        parts={name: np.array(values, float) for name, values in parts.items()},
        valid={name: np.array(given.get(name, [True] * len(rollouts)), bool) for name in parts},
        weights=weights or {},
    )
    return Group(rollouts=rollouts, scores=scores)


class Words:
    """A tokenizer of one word a token: token 7 is the word "7", and 0 is special."""

    def decode(self, tokens: np.ndarray, skip_special_tokens: bool = True) -> str:
        return " ".join(str(t) for t in tokens if t or not skip_special_tokens)

    def batch_decode(self, rows: Sequence[np.ndarray], skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(row, skip_special_tokens) for row in rows]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [int(word) for word in text.split()]


def answer_of(prefix: np.ndarray, i: int, seed: int) -> list[int]:
    """What `EchoSampler` says: sums over the prefix, the number of the draw, and the seed's remainder."""
    return [int(prefix.sum()) + 1, i + 1, seed % 97 + 1]


@dataclass(eq=False)
class EchoSampler:
    """A sampler whose draws are a function of prefix, number and seed, and whose groups finish in a shuffled order.

    Attributes:
      order: seeds the order in which groups finish.
      calls: what was asked of it: (prefixes, n, settings, seeds).
      version: the policy version it serves.
    """

    order: int = 0
    calls: list[tuple[list[np.ndarray], int, SamplingParams, list[int]]] = field(default_factory=list)
    version: int = 3

    async def sample(
        self, prefixes: Sequence[np.ndarray], n: int, settings: SamplingParams, seeds: Sequence[int]
    ) -> AsyncIterator[tuple[int, list[Completion]]]:
        self.calls.append((list(prefixes), n, settings, list(seeds)))
        for index in np.random.default_rng(self.order).permutation(len(prefixes)):
            await asyncio.sleep(0)
            yield int(index), [self._completion(prefixes[index], i, settings, seeds[index]) for i in range(n)]

    def _completion(self, prefix: np.ndarray, i: int, settings: SamplingParams, seed: int) -> Completion:
        tokens = answer_of(prefix, i, 0 if settings.temperature == 0 else seed)
        kept = np.array(tokens[: settings.max_tokens], np.int32)
        return Completion(
            tokens=kept,
            logprobs=-np.arange(1, len(kept) + 1, dtype=np.float32),
            versions=np.full(len(kept), self.version, np.int32),
            finish="stop" if len(tokens) <= settings.max_tokens else "length",
        )

    async def publish(self, params: Mapping[str, Any], version: int) -> None:
        self.version = version

    async def close(self) -> None:
        pass

    def metrics(self) -> Mapping[str, float]:
        return {}
