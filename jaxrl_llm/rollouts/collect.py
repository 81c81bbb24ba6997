"""Generates rollouts for encoded prompts, with an environment's answers between turns, and scores and filters groups of them.

Token ids and log-probs are taken from the sampler, and never re-tokenised; text that an environment adds is encoded once, appended and
masked out. Groups are scored while others are still being sampled.
"""

import asyncio
import contextlib
import functools
import logging
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.data.pipeline import PromptStream
from jaxrl_llm.distributed.processes import Processes
from jaxrl_llm.experience import Completion, Group, Prompt, Role, Rollout, SamplingParams, Scores, seed_of
from jaxrl_llm.protocols import Filter, Marker, Reward, Sampler
from jaxrl_llm.rollouts import given_rewards
from jaxrl_llm.rollouts.schedule import Slots

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutGenerator:
    """Generates groups of rollouts with a sampler, or with a player by whom an environment or an agent acts.

    Attributes:
      sampler: the running sampler.
      tokenizer: decodes responses.
      player: plays the rollouts of an environment or an agent (player.Player); None for single turns.
      slots: bounds the rollouts of `player` that are in progress.
      marker: names ranges of a response's tokens; None names none.
      counters: numbers of rollouts by their finish, and of empty ones.
      processes: the processes that call the sampler together, where it runs on the devices of all; process 0 alone scores.
    """

    sampler: Sampler
    tokenizer: Any
    player: Any = None
    slots: Slots | None = None
    marker: Marker | None = None
    counters: Counter[str] = field(default_factory=Counter)
    processes: Processes = field(default_factory=Processes)

    @property
    def holds(self) -> Any:
        """The token service (agents.service) whose calls wait while the learner computes, since its sampler cannot draw then; or None."""
        waits = self.player is not None and not getattr(self.sampler, "overlaps", False)
        return self.player.service if waits else None

    async def groups(
        self, prompts: Sequence[Prompt], n: int, settings: SamplingParams, seeds: Sequence[int], role: Role = "sample"
    ) -> AsyncIterator[tuple[int, list[Rollout]]]:
        """Yields (index of the prompt, its n rollouts) as they finish; a prompt's draws depend on its own seed alone."""
        prefixes = [p.prefix for p in prompts]
        if self.player is None:
            async for index, completions in self.sampler.sample(prefixes, n, settings, seeds):
                yield self._finished(index, [self._first(prompts[index], c, role) for c in completions])
            return
        play = lambda i, k: self.player.play(prompts[i], k, settings, seed_of(seeds[i], k), role)  # noqa: E731
        slots = self.slots or Slots(concurrency=len(prompts) * n)
        async with contextlib.aclosing(slots.groups(len(prompts), n, play, plain=role == "greedy")) as groups:
            async for index, rollouts in groups:
                yield self._finished(index, rollouts)

    def _finished(self, index: int, rollouts: list[Rollout]) -> tuple[int, list[Rollout]]:
        texts = self.tokenizer.batch_decode([r.tokens for r in rollouts], skip_special_tokens=True)
        self.counters.update(f"finish/{r.finish}" for r in rollouts)
        self.counters["empty"] += sum(not t.strip() for t in texts)
        named = [replace(r, text=t) for r, t in zip(rollouts, texts, strict=True)]
        if self.marker is not None:
            named = [replace(r, spans=self._marked(r)) for r in named]
        return index, named

    def _marked(self, rollout: Rollout) -> Mapping[str, np.ndarray]:
        """The marker's spans of all branches, one after the other."""
        assert self.marker is not None
        if len(rollout.branches) < 2:
            return self.marker.mark(rollout, self.tokenizer)
        found = []
        for branch in rollout.branches:
            text = self.tokenizer.decode(branch.tokens, skip_special_tokens=True)
            alone = replace(rollout, tokens=branch.tokens, mask=branch.mask, text=text, branches=(branch,))
            found.append(self.marker.mark(alone, self.tokenizer))
        return {name: np.concatenate([spans[name] for spans in found]) for name in found[0]}

    def take_played(self) -> dict[str, float]:
        """Counters of the player, its slots and its sessions since the last call; {} without a player."""
        if self.player is None:
            return {}
        found = self.player.counters + (Counter() if self.slots is None else self.slots.counters)
        self.player.counters.clear()
        if self.slots is not None:
            self.slots.counters.clear()
        return {f"count/{name}": float(count) for name, count in found.items()} | self.player.service.take()

    def _first(self, prompt: Prompt, completion: Completion, role: Role) -> Rollout:
        return Rollout(
            prompt=prompt, tokens=completion.tokens, sampler_logprobs=completion.logprobs,
            mask=np.ones(len(completion.tokens), bool), versions=completion.versions, finish=completion.finish, role=role,
            routes=completion.routes,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Collector:
    """Draws prompts, samples and scores their groups, and filters them until a batch is full.

    Attributes:
      generator: generates the rollouts.
      reward: scores a group; a reward that needs token stats is computed later, by `rescore`. None where environments give rewards.
      settings: how tokens are drawn.
      group_size: rollouts of a prompt.
      greedy: adds one greedy rollout per prompt, which is scored but left out of statistics and loss.
      filter: which groups are learned from; None keeps all.
      least: fewest rollouts of a group that are worth learning from, where others failed.
      weights: {name: weight of the environment's reward of this name}; 1 for others.
      seed: seed of the run.
      counters: numbers of groups that were filtered out, surplus or missing, and of invalid rewards.
      seconds: seconds spent on sampling and on waiting for rewards.
      unfiltered: the rewards of all samples before `filter`; empty where there is none.
    """

    generator: RolloutGenerator
    reward: Reward | None
    settings: SamplingParams
    group_size: int
    greedy: bool = False
    filter: Filter | None = None
    least: int = 1
    weights: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: {"sample": 0.0, "reward": 0.0})
    unfiltered: list[float] = field(default_factory=list)

    async def batch(self, draw: Callable[[int], list[Prompt]], count: int, step: int) -> list[Group]:
        """Returns `count` groups in the order their prompts were drawn, or fewer where `filter.max_draws` draws did not suffice.

        Args:
          draw: returns the next prompts of the data stream.
          step: seeds the sampling, together with the seed of the run, the number of the draw and the place in it.
        """
        kept: list[Group] = []
        for attempt in range(self.filter.max_draws if self.filter else 1):
            groups = await self.score(draw(count), (self.seed, step, attempt))
            good = [g for g in groups if self.filter is None or self.filter.keep(g)]
            self._note(groups)
            self.counters["groups/filtered"] += len(groups) - len(good)
            kept += good
            if len(kept) >= count:
                break
        kept = self._enough(kept)
        self.counters["groups/surplus"] += max(len(kept) - count, 0)
        self.counters["groups/missing"] += max(count - len(kept), 0)
        return kept[:count]

    def _enough(self, groups: list[Group]) -> list[Group]:
        """The groups without those of which failed rollouts leave fewer than `least`; all of them where none is left."""
        sampled = lambda group: sum(r.valid for r in group.rollouts if r.role == "sample")  # noqa: E731
        whole = [g for g in groups if all(r.valid for r in g.rollouts) or sampled(g) >= self.least]
        if failed := len(groups) - len(whole):
            self.counters["groups/failed"] += failed
        return whole or groups

    def _note(self, groups: Sequence[Group]) -> None:
        """Records the rewards of the samples before the filter, which leaves out prompts that are too easy or too hard."""
        for group in groups if self.filter is not None else ():
            self.unfiltered.extend(_totals(group).tolist())

    async def score(self, prompts: Sequence[Prompt], seed: tuple[int, ...]) -> list[Group]:
        """Returns the scored group of every prompt, in the order of `prompts`."""
        seeds = [seed_of(*seed, i) for i in range(len(prompts))]
        begin = time.perf_counter()
        rollouts: list[list[Rollout]] = [[] for _ in prompts]
        scoring: dict[int, asyncio.Task[Scores]] = {}
        if self.greedy:
            async for i, greedy in self.generator.groups(prompts, 1, self.settings.greedy(), seeds, role="greedy"):
                rollouts[i] += greedy
        async with _ended(scoring):
            async for i, group in self.generator.groups(prompts, self.group_size, self.settings, seeds):
                rollouts[i] = group + rollouts[i]
                scoring[i] = asyncio.ensure_future(self._scores(rollouts[i]))
            sampled = time.perf_counter()
            scores = [await scoring[i] for i in range(len(prompts))]
        self.seconds["sample"] += sampled - begin
        self.seconds["reward"] += time.perf_counter() - sampled
        groups = [Group(rollouts=r, scores=s) for r, s in zip(rollouts, scores, strict=True)]
        self._count_invalid(groups)
        return groups if self.generator.processes.count == 1 else self._agreed(groups)

    def _agreed(self, groups: list[Group]) -> list[Group]:
        """The groups with the scores of process 0, which alone asks the reward; all processes have sampled the same rollouts.

        Where some have not, process 0 sends its own to the others, which is counted, and said the first time.
        """
        processes = self.generator.processes
        if len(set(processes.gathered(_checksum(groups)))) > 1:
            _say_different()
            self.counters["groups/resent"] += len(groups)
            return processes.broadcast(groups)
        scores = processes.broadcast([group.scores for group in groups])
        return [replace(group, scores=found) for group, found in zip(groups, scores, strict=True)]

    async def rescore(self, groups: Sequence[Group], stats: Sequence[dict[str, np.ndarray]]) -> list[Group]:
        """Returns the groups scored by a reward that needs token stats, given as {name: [G]} for each group."""
        asked = [
            given_rewards.scored(self.reward, g.rollouts, self.weights, s) for g, s in zip(groups, stats, strict=True)
        ]
        async with _ended(scoring := dict(enumerate(map(asyncio.ensure_future, asked)))):
            scores = [await task for task in scoring.values()]
        scored = [Group(rollouts=g.rollouts, scores=s) for g, s in zip(groups, scores, strict=True)]
        self._count_invalid(scored)
        return scored

    async def _scores(self, rollouts: Sequence[Rollout]) -> Scores:
        if (self.reward is not None and self.reward.needs_stats) or not self.generator.processes.main:
            return Scores(parts={}, valid={})
        if self.generator.player is None and self.reward is not None:
            return await self.reward.score(rollouts)
        return await given_rewards.scored(self.reward, rollouts, self.weights)

    def _count_invalid(self, groups: Sequence[Group]) -> None:
        for group in groups:
            for name, valid in group.scores.valid.items():
                self.counters[f"invalid/{name}"] += int(np.sum(~np.asarray(valid, bool)))

    def take(self) -> dict[str, float]:
        """Returns counters and times since the last call, and resets them."""
        playing = self.generator.take_played()
        counts = {f"count/{n}": float(c) for n, c in {**self.counters, **self.generator.counters}.items()} | playing
        counts |= {f"time/{n}_s": s for n, s in self.seconds.items()}
        if self.unfiltered:
            counts["reward/unfiltered"] = float(np.mean(self.unfiltered))
        self.unfiltered.clear()
        self.counters.clear()
        self.generator.counters.clear()
        self.seconds.update(dict.fromkeys(self.seconds, 0.0))
        return counts


@functools.cache
def _say_different() -> None:
    """Warns, once."""
    _log.warning(
        "the processes sampled different rollouts from one sampler: process 0 sends its own to the others (count/groups/resent)"
    )


def _checksum(groups: Sequence[Group]) -> int:
    """A checksum of all that was sampled."""
    found = 0
    for rollout in (r for group in groups for r in group.rollouts):
        for array in (rollout.tokens, rollout.sampler_logprobs, rollout.mask, rollout.versions):
            found = zlib.crc32(np.ascontiguousarray(array).data, found)
        if rollout.routes is not None:
            found = zlib.crc32(np.ascontiguousarray(rollout.routes).data, found)
        found = zlib.crc32(f"{rollout.finish} {rollout.text}".encode(errors="surrogatepass"), found)
    return found


@contextlib.asynccontextmanager
async def _ended(tasks: Mapping[int, asyncio.Task[Scores]]) -> AsyncIterator[None]:
    """Cancels the tasks that are left when the block ends, however it ends."""
    try:
        yield
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): keeps groups whose rewards differ.

    Attributes:
      max_draws: most batches of prompts drawn for one step.
    """

    max_draws: int = 4

    def __post_init__(self) -> None:
        components.at_least(self, 1, "max_draws")

    def keep(self, group: Group) -> bool:
        totals = _totals(group)
        return len(totals) > 0 and bool(np.ptp(totals) > 0)


def _totals(group: Group) -> np.ndarray:
    """The valid rewards of the group's samples, [at most G]; greedy rollouts are left out."""
    sampled = np.array([r.role == "sample" for r in group.rollouts])
    return group.total()[group.valid() & sampled]


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledGroups:
    """A group loader of rollouts by the current policy.

    Attributes:
      stream: encoded prompts.
      collector: samples and scores the groups.
      prompts: number of prompts of a step.
    """

    stream: PromptStream[Prompt]
    collector: Collector
    prompts: int

    async def next(self, step: int) -> list[Group]:
        return await self.collector.batch(self.stream.next_batch, self.prompts, step)

    def state(self) -> dict[str, Any]:
        return self.stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.stream.restore(state)

    def take(self) -> dict[str, float]:
        return {**self.collector.take(), "data/epoch": self.stream.epoch}
