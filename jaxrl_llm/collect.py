"""A batch of scored groups: prompts are sampled, scored while others are still being sampled, and filtered."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxrl_llm import bounds
from jaxrl_llm.experience import Prompt, Rollout, SamplingSettings, ScoredGroup, Scores
from jaxrl_llm.protocols import Filter, Reward
from jaxrl_llm.rollouts import Asking, seed_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Collector:
    """Draws prompts until a batch of groups is full.

    Attributes:
      asking: asks the sampler.
      reward: scores a group; a reward that needs the learner's statistics is asked later, by `rescore`.
      settings: how tokens are drawn.
      group_size: rollouts of a prompt.
      greedy: adds one greedy rollout a prompt, which is scored but leaves statistics and loss.
      filter: which groups are learned from; None keeps all.
      seed: seed of the run.
      counters: groups filtered out, surplus groups, invalid rewards.
      seconds: where the time went: sampling and waiting for rewards.
      unfiltered: the rewards of all samples, where `filter` keeps some groups only.
    """

    asking: Asking
    reward: Reward
    settings: SamplingSettings
    group_size: int
    greedy: bool = False
    filter: Filter | None = None
    seed: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: {"sample": 0.0, "reward": 0.0})
    unfiltered: list[float] = field(default_factory=list)

    async def batch(self, draw: Callable[[int], list[Prompt]], count: int, step: int) -> list[ScoredGroup]:
        """`count` groups in the order their prompts were drawn, or fewer where `filter.max_draws` draws did not give them.

        Args:
          draw: the next prompts of the data stream.
          step: the number that, with the seed of the run and the place in the batch, seeds the sampling.
        """
        kept: list[ScoredGroup] = []
        for attempt in range(self.filter.max_draws if self.filter else 1):
            groups = await self.score(draw(count), (self.seed, step, attempt))
            good = [g for g in groups if self.filter is None or self.filter.keep(g)]
            self._note(groups)
            self.counters["groups/filtered"] += len(groups) - len(good)
            kept += good
            if len(kept) >= count:
                break
        self.counters["groups/surplus"] += max(len(kept) - count, 0)
        self.counters["groups/missing"] += max(count - len(kept), 0)
        return kept[:count]

    def _note(self, groups: Sequence[ScoredGroup]) -> None:
        """What the samples were worth before the filter, which leaves out what is too easy or too hard."""
        for group in groups if self.filter is not None else ():
            self.unfiltered.extend(_totals(group).tolist())

    async def score(self, prompts: Sequence[Prompt], seed: tuple[int, ...]) -> list[ScoredGroup]:
        """The scored group of every prompt, in their order."""
        seeds = [seed_of(*seed, i) for i in range(len(prompts))]
        begin = time.perf_counter()
        rollouts: list[list[Rollout]] = [[] for _ in prompts]
        scoring: dict[int, asyncio.Task[Scores]] = {}
        if self.greedy:
            async for i, greedy in self.asking.groups(prompts, 1, self.settings.greedy(), seeds, role="greedy"):
                rollouts[i] += greedy
        async with _ended(scoring):
            async for i, group in self.asking.groups(prompts, self.group_size, self.settings, seeds):
                rollouts[i] = group + rollouts[i]
                scoring[i] = asyncio.ensure_future(self._scores(rollouts[i]))
            sampled = time.perf_counter()
            scores = [await scoring[i] for i in range(len(prompts))]
        self.seconds["sample"] += sampled - begin
        self.seconds["reward"] += time.perf_counter() - sampled
        groups = [ScoredGroup(rollouts=r, scores=s) for r, s in zip(rollouts, scores, strict=True)]
        self._count_invalid(groups)
        return self.asking.processes.broadcast(groups)

    async def rescore(self, groups: Sequence[ScoredGroup], stats: Sequence[dict[str, np.ndarray]]) -> list[ScoredGroup]:
        """The groups scored by a reward that needs the learner's statistics, {name: [G]} of each group."""
        asked = [self.reward.score(g.rollouts, s) for g, s in zip(groups, stats, strict=True)]
        async with _ended(scoring := dict(enumerate(map(asyncio.ensure_future, asked)))):
            scores = [await task for task in scoring.values()]
        scored = [ScoredGroup(rollouts=g.rollouts, scores=s) for g, s in zip(groups, scores, strict=True)]
        self._count_invalid(scored)
        return scored

    async def _scores(self, rollouts: Sequence[Rollout]) -> Scores:
        if self.reward.needs_stats or not self.asking.processes.main:
            return Scores(parts={}, valid={})
        return await self.reward.score(rollouts)

    def _count_invalid(self, groups: Sequence[ScoredGroup]) -> None:
        for group in groups:
            for name, valid in group.scores.valid.items():
                self.counters[f"invalid/{name}"] += int(np.sum(~np.asarray(valid, bool)))

    def take(self) -> dict[str, float]:
        """Counters since the last call, and starts them anew."""
        counts = {f"count/{n}": float(c) for n, c in {**self.counters, **self.asking.counters}.items()}
        counts |= {f"time/{n}_s": s for n, s in self.seconds.items()}
        if self.unfiltered:
            counts["reward/unfiltered"] = float(np.mean(self.unfiltered))
        self.unfiltered.clear()
        self.counters.clear()
        self.asking.counters.clear()
        self.seconds.update(dict.fromkeys(self.seconds, 0.0))
        return counts


@contextlib.asynccontextmanager
async def _ended(tasks: Mapping[int, asyncio.Task[Scores]]) -> AsyncIterator[None]:
    """Leaves no task behind, whatever ends the block."""
    try:
        yield
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


@dataclass(frozen=True, kw_only=True)
class Varied:
    """DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): keeps groups whose rewards differ.

    Attributes:
      max_draws: most batches of prompts drawn for one step.
    """

    max_draws: int = 4

    def __post_init__(self) -> None:
        bounds.at_least(self, 1, "max_draws")

    def keep(self, group: ScoredGroup) -> bool:
        totals = _totals(group)
        return len(totals) > 0 and bool(np.ptp(totals) > 0)


def _totals(group: ScoredGroup) -> np.ndarray:
    """Rewards of the group's samples that have one, [at most G]; greedy rollouts left out."""
    sampled = np.array([r.role == "sample" for r in group.rollouts])
    return group.total()[group.valid() & sampled]
