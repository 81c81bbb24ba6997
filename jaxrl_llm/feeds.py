"""What a step learns from: the policy's own samples, or demonstrations and pairs that a dataset gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxrl_llm.collect import Collector
from jaxrl_llm.data.pipeline import Encoder, PromptStream
from jaxrl_llm.experience import Prompt, Rollout, ScoredGroup
from jaxrl_llm.global_batch import unscored


@runtime_checkable
class Feed(Protocol):
    """Groups for each step, from a place in the data that a checkpoint can hold."""

    async def next(self, step: int) -> list[ScoredGroup]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def take(self) -> dict[str, float]:
        """Counters and times since the last call."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleFeed:
    """Rollouts of the present policy.

    Attributes:
      stream: encoded prompts.
      collector: samples and scores them.
      prompts: prompts of a step.
    """

    stream: PromptStream[Prompt]
    collector: Collector
    prompts: int

    async def next(self, step: int) -> list[ScoredGroup]:
        return await self.collector.batch(self.stream.next_batch, self.prompts, step)

    def state(self) -> dict[str, Any]:
        return self.stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.stream.restore(state)

    def take(self) -> dict[str, float]:
        return {**self.collector.take(), "data/epoch": self.stream.epoch}


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenFeed:
    """Responses that the dataset gives: one of a demonstration, two (preferred, rejected) of a pair.

    Attributes:
      stream: the rollouts of each row.
      rows: rows of a step.
    """

    stream: PromptStream[Sequence[Rollout]]
    rows: int

    async def next(self, step: int) -> list[ScoredGroup]:
        del step
        return [unscored(r, (1, -1) if len(r) == 2 else None) for r in self.stream.next_batch(self.rows)]

    def state(self) -> dict[str, Any]:
        return self.stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.stream.restore(state)

    def take(self) -> dict[str, float]:
        return {"data/epoch": self.stream.epoch}


def demonstrations(encoder: Encoder, rows: Sequence[Prompt]) -> list[Sequence[Rollout]]:
    """Each row's response as the only rollout of its group."""
    return [(rollout,) for rollout in encoder.demonstrations(rows)]


def pairs(encoder: Encoder, rows: Sequence[Prompt], *, ends: bool = False) -> list[Sequence[Rollout]]:
    """The preferred response (`Prompt.response`) and the rejected one (`Prompt.extra["rejected"]`) of each row.

    Args:
      ends: only the end of each response is learned from, by `ended`.

    Raises:
      ValueError: a row without a rejected response, or no pair left.
    """
    found: list[Sequence[Rollout]] = []
    for row in rows:
        if "rejected" not in row.extra:
            raise ValueError(
                f"row {row.id!r} has no rejected response: pairs need Prompt.response and Prompt.extra['rejected']"
            )
        chosen = encoder.demonstration(row)
        rejected = encoder.demonstration(replace(row, response=str(row.extra["rejected"])))
        if chosen is not None and rejected is not None:
            found.append((ended(chosen), ended(rejected)) if ends else (chosen, rejected))
    if not found:
        raise ValueError(
            f"none of {len(rows)} pairs is left after encoding ({encoder.counts()}): raise the token limits"
        )
    return found


def ended(rollout: Rollout) -> Rollout:
    """The rollout with one more token, the only one in its mask.

    A packed row holds all tokens of a sequence but the last, so what a model says after the last token of a response
    stands where this further token would be predicted; which token it is does not matter.
    """
    last = lambda x, value: np.append(x, x.dtype.type(value))  # noqa: E731
    return replace(
        rollout, tokens=last(rollout.tokens, rollout.tokens[-1]), sampler_logprobs=last(rollout.sampler_logprobs, 0),
        mask=last(np.zeros_like(rollout.mask), True), versions=last(rollout.versions, -1),
    )  # fmt: skip


def stats_of(groups: Sequence[ScoredGroup], streams: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Per-rollout means over policy tokens of the learner's streams [S, T], {name: [G]} by group."""
    out, start = [], 0
    for group in groups:
        rows = range(start, start + len(group.rollouts))
        start += len(group.rollouts)
        stats = {}
        for name, stream in streams.items():
            means = [
                stream[i, : len(r.mask)][r.mask].mean() if r.mask.any() else 0.0
                for i, r in zip(rows, group.rollouts, strict=True)
            ]
            stats[name] = np.asarray(means, np.float64)
        out.append(stats)
    return out
