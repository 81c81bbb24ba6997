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
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.data.pipeline import PromptStream
from jaxrl_llm.distributed.processes import Processes
from jaxrl_llm.experience import Completion, Group, Prompt, Role, Rollout, SamplingParams, Scores, seed_of
from jaxrl_llm.protocols import Filter, Marker, Reward, Sampler
from jaxrl_llm.rollouts import given_rewards
from jaxrl_llm.rollouts.curriculum import CurriculumStream
from jaxrl_llm.rollouts.schedule import Slots

LOOK_S = 1.0  # seconds between two checks of the tasks in progress for errors

Draw = Callable[[int], list[Prompt]]  # returns the next prompts of the data stream
Learn = Callable[[Sequence[Group]], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutGenerator:
    """Generates groups of rollouts with a sampler, or with a player that runs an environment or an agent.

    Attributes:
      sampler: the running sampler.
      tokenizer: decodes responses.
      player: plays the rollouts of an environment or an agent (player.Player); None for single turns.
      slots: bounds the rollouts of `player` that are in progress.
      marker: names ranges of a response's tokens; None names none.
      counters: numbers of rollouts by their finish, and of empty ones.
      processes: the processes that call the sampler together where it runs on all their devices; process 0 alone scores.
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
        """The token service (agents.service) whose calls wait while the learner computes, since its sampler cannot sample then; or None."""
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
        """Returns the marker's spans of all branches, concatenated."""
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
        """Returns counters of the player, its slots and its sessions since the last call; {} without a player."""
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


@dataclass(kw_only=True, eq=False)
class Collector:
    """Draws prompts, samples and scores their groups, and filters them until a batch is full.

    Attributes:
      generator: generates the rollouts.
      reward: scores a group; a reward that needs token stats is called later, by `rescore`. None where environments give rewards.
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
    _sampled: float = field(default=0.0, init=False)  # when the last rollout came

    async def batch(self, draw: Draw, count: int, step: int, learn: Learn | None = None) -> list[Group]:
        """Returns `count` groups in the order their prompts were drawn, or fewer where `filter.max_draws` x `count` prompts did not suffice.

        Each group that the filter leaves out is replaced by one more prompt as soon as its rewards are known, so that just as many
        are drawn as the batch needs. Which ones these are, and their seeds, does not depend on the order in which groups finish.

        Args:
          draw: returns the next prompts of the data stream.
          step: seeds the sampling, together with the seed of the run and the number of the prompt among those drawn for the step.
          learn: is told all groups, those that the filter leaves out too, in the order their prompts were drawn.
        """
        begin = self._sampled = time.perf_counter()
        alone = self.generator.processes.count == 1
        found = await (self._in_flight if alone else self._by_rounds)(draw, count, step)
        self.seconds["sample"] += self._sampled - begin
        self.seconds["reward"] += time.perf_counter() - self._sampled
        if learn is not None:
            learn(found)
        self._note(found)
        kept = [g for g in found if self._keeps(g)]
        self.counters["groups/filtered"] += len(found) - len(kept)
        kept = self._enough(kept)
        self.counters["groups/surplus"] += max(len(kept) - count, 0)  # always 0; the name stays for readers of runs
        self.counters["groups/missing"] += max(count - len(kept), 0)
        return kept

    async def _in_flight(self, draw: Draw, count: int, step: int) -> list[Group]:
        """Returns all groups drawn for a step, in the order drawn; a group that is left out is replaced while others are still sampled."""
        most = count * (self.filter.max_draws if self.filter else 1)
        asked: set[asyncio.Future[list[Group]]] = set()
        found: dict[int, Group] = {}
        drawn = 0

        def ask(n: int) -> None:
            nonlocal drawn
            first, drawn = drawn, drawn + n

            def scored(i: int, group: Group) -> None:
                found[first + i] = group
                if drawn < most and not self._keeps(group):
                    ask(1)

            asked.add(asyncio.ensure_future(self._scored(draw(n), self._seeds(count, step, first, n), scored)))

        async with _ended(asked):
            ask(count)
            while left := {task for task in asked if not task.done()}:
                await asyncio.wait(left, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in asked:
                    if task.done():
                        task.result()  # raises its error
        return [found[i] for i in sorted(found)]

    async def _by_rounds(self, draw: Draw, count: int, step: int) -> list[Group]:
        """Returns the groups of `_in_flight`; missing ones are sampled together in rounds, since all processes of a run must make the
        same calls."""
        most = count * (self.filter.max_draws if self.filter else 1)
        found: list[Group] = []
        missing = count
        while missing:
            seeds = self._seeds(count, step, len(found), missing)
            found += await self._scored(draw(missing), seeds)
            missing = min(count - sum(map(self._keeps, found)), most - len(found))
        return found

    def _seeds(self, count: int, step: int, first: int, n: int) -> list[int]:
        """Returns the seeds of the `n` prompts from number `first` on, of those that are drawn for a step of `count`."""
        return [seed_of(self.seed, step, *divmod(i, count)) for i in range(first, first + n)]

    def _keeps(self, group: Group) -> bool:
        return self.filter is None or self.filter.keep(group)

    def _enough(self, groups: list[Group]) -> list[Group]:
        """Leaves out the groups of which failed rollouts leave fewer than `least`; returns all of them where none would be left."""
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
        begin = self._sampled = time.perf_counter()
        groups = await self._scored(prompts, [seed_of(*seed, i) for i in range(len(prompts))])
        self.seconds["sample"] += self._sampled - begin
        self.seconds["reward"] += time.perf_counter() - self._sampled
        return groups

    async def _scored(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], tell: Callable[[int, Group], None] | None = None
    ) -> list[Group]:
        """Returns the scored group of every prompt, in their order; calls `tell` with (number of the prompt, its group) as rewards arrive."""
        rollouts: list[list[Rollout]] = [[] for _ in prompts]
        scoring: dict[int, asyncio.Task[Group]] = {}
        if self.greedy:
            async for i, greedy in self.generator.groups(prompts, 1, self.settings.greedy(), seeds, role="greedy"):
                rollouts[i] += greedy

        async def one(i: int) -> Group:
            group = Group(rollouts=rollouts[i], scores=await self._scores(rollouts[i]))
            if tell is not None:
                tell(i, group)
            return group

        async with _ended(scoring.values()):
            async for i, group in self.generator.groups(prompts, self.group_size, self.settings, seeds):
                rollouts[i] = group + rollouts[i]
                scoring[i] = asyncio.ensure_future(one(i))
            self._sampled = time.perf_counter()
            groups = [await scoring[i] for i in range(len(prompts))]
        self._count_invalid(groups)
        return groups if self.generator.processes.count == 1 else self._agreed(groups)

    def _agreed(self, groups: list[Group]) -> list[Group]:
        """Returns the groups with the scores of process 0, which alone asks the reward; all processes have sampled the same rollouts.

        Where some have not, process 0 sends its own to the others, which is counted, and logged the first time.
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
        async with _ended(scoring := list(map(asyncio.ensure_future, asked))):
            scores = [await task for task in scoring]
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
    """Warns once that the processes sampled different rollouts."""
    _log.warning(
        "the processes sampled different rollouts from one sampler: process 0 sends its own to the others (count/groups/resent)"
    )


def _checksum(groups: Sequence[Group]) -> int:
    """Returns a checksum of all that was sampled."""
    found = 0
    for rollout in (r for group in groups for r in group.rollouts):
        for array in (rollout.tokens, rollout.sampler_logprobs, rollout.mask, rollout.versions):
            found = zlib.crc32(np.ascontiguousarray(array).data, found)
        if rollout.routes is not None:
            found = zlib.crc32(np.ascontiguousarray(rollout.routes).data, found)
        found = zlib.crc32(f"{rollout.finish} {rollout.text}".encode(errors="surrogatepass"), found)
    return found


@contextlib.asynccontextmanager
async def _ended(tasks: Collection[asyncio.Future[Any]]) -> AsyncIterator[None]:
    """Cancels the tasks that are still running when the block ends, however it ends."""
    try:
        yield
    finally:
        left = list(tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): keeps groups whose rewards differ.

    Attributes:
      max_draws: most prompts drawn for one step, as a multiple of those that it learns from.
    """

    max_draws: int = 4

    def __post_init__(self) -> None:
        components.at_least(self, 1, "max_draws")

    def keep(self, group: Group) -> bool:
        totals = _totals(group)
        return len(totals) > 0 and bool(np.ptp(totals) > 0)


def _totals(group: Group) -> np.ndarray:
    """Returns the valid rewards of the group's samples, [at most G]; greedy rollouts are left out."""
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

    stream: PromptStream[Prompt] | CurriculumStream
    collector: Collector
    prompts: int

    async def next(self, step: int) -> list[Group]:
        return await self.collector.batch(self.stream.next_batch, self.prompts, step, self.stream.learn)

    def state(self) -> dict[str, Any]:
        return self.stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.stream.restore(state)

    def take(self) -> dict[str, float]:
        return {**self.collector.take(), **self.stream.take()}
