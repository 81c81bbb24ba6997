"""A batch of groups keeps its prompts' order, is filtered until it is full, and counts what it left out."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from builders import EchoSampler, Words, make_group, make_prompt, make_rollout

from jaxrl_llm.distributed import serialization
from jaxrl_llm.distributed.processes import Processes
from jaxrl_llm.experience import Group, Prompt, Rollout, SamplingParams, Scores, seed_of
from jaxrl_llm.protocols import Filter
from jaxrl_llm.rollouts.collect import Collector, DynamicSampling, RolloutGenerator


@dataclass
class Draws:
    """A reward that is the second token (the number of the draw), after a delay that differs by group.

    Attributes:
      needs_stats: waits for the learner.
      invalid: the number of the draw that it cannot judge.
      asked: sizes of the groups it saw, and with what statistics.
    """

    needs_stats: bool = False
    invalid: int = 0
    asked: list[Any] = field(default_factory=list)

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        self.asked.append((len(rollouts), stats))
        await asyncio.sleep(0.001 * (int(rollouts[0].tokens[0]) % 3))
        draws = np.array([float(r.tokens[1]) for r in rollouts])
        return Scores(parts={"draw": draws}, valid={"draw": draws != self.invalid})


@dataclass
class NoMultiple:
    """Keeps the groups of prompts whose number is no multiple of `divisor`."""

    divisor: int
    max_draws: int = 3

    def keep(self, group: Group) -> bool:
        return int(group.rollouts[0].prompt.id) % self.divisor != 0


class Numbers:
    """Prompts 0, 1, 2 ... in draws, with their number as their only token."""

    def __init__(self) -> None:
        self.position = 0

    def __call__(self, n: int) -> list[Prompt]:
        start, self.position = self.position, self.position + n
        return [make_prompt(str(i), [i]) for i in range(start, start + n)]


def collector(order: int = 0, reward: Draws | None = None, **fields: Any) -> Collector:
    generator = RolloutGenerator(sampler=EchoSampler(order), tokenizer=Words())
    settings = SamplingParams(max_tokens=8)
    return Collector(generator=generator, reward=reward or Draws(), settings=settings, **{"group_size": 2, **fields})


def names(groups: Sequence[Group]) -> list[int]:
    return [int(g.rollouts[0].prompt.id) for g in groups]


@pytest.mark.parametrize("order", range(4))
def test_groups_follow_their_prompts_in_whatever_order_they_finish(order):
    groups = asyncio.run(collector(order, seed=5).batch(Numbers(), 6, step=9))
    assert names(groups) == list(range(6))
    for i, group in enumerate(groups):
        assert [r.tokens.tolist() for r in group.rollouts] == [
            [i + 1, k + 1, seed_of(5, 9, 0, i) % 97 + 1] for k in (0, 1)
        ]
        assert group.total().tolist() == [1, 2] and group.valid().all()


def test_seeds_differ_by_run_step_draw_and_place():
    seen = []
    for seed, step in ((0, 0), (0, 1), (1, 0)):
        c = collector(seed=seed, filter=NoMultiple(1, 2))
        asyncio.run(c.batch(Numbers(), 3, step))
        seen += [s for _, _, _, seeds in c.generator.sampler.calls for s in seeds]
    assert len(seen) == len(set(seen)) == 3 * 2 * 3


def test_greedy_rollouts_come_last_in_their_group_and_are_scored_with_it():
    reward = Draws()
    c = collector(reward=reward, greedy=True)
    groups = asyncio.run(c.batch(Numbers(), 3, 0))
    for i, group in enumerate(groups):
        assert [r.role for r in group.rollouts] == ["sample", "sample", "greedy"]
        assert group.rollouts[2].tokens.tolist() == [i + 1, 1, 1] and group.total().tolist() == [1, 2, 1]
    assert [size for size, _ in reward.asked] == [3, 3, 3]
    (_, one, greedy, _), (_, two, sampled, _) = c.generator.sampler.calls
    assert (one, greedy.temperature, greedy.max_tokens) == (1, 0.0, 8) and (two, sampled.temperature) == (2, 1.0)


@pytest.mark.parametrize(
    ("divisor", "max_draws", "kept", "drawn"),
    [
        (3, 3, [1, 2, 4, 5, 7], 8),  # of 0 to 4 two are left out, then one of 5 and 6
        (3, 1, [1, 2, 4], 5),
        (2, 2, [1, 3, 5, 7, 9], 10),
        (1, 3, [], 15),
    ],
)
@pytest.mark.parametrize("order", range(4))
@pytest.mark.parametrize("processes", [1, 2])
def test_just_as_many_prompts_are_drawn_as_the_batch_needs(divisor, max_draws, kept, drawn, order, processes):
    """Whatever the order in which groups finish, and in rounds, where several processes ask together, as in flight."""
    c, numbers = collector(order, filter=NoMultiple(divisor, max_draws), seed=4), Numbers()
    if processes > 1:
        together = Together(count=2, names=["a", "b"])
        together.sent = []
        c = replace(c, generator=replace(c.generator, processes=together))
    told: list[Group] = []
    groups = asyncio.run(c.batch(numbers, 5, 2, told.extend))
    assert names(groups) == kept and numbers.position == drawn and names(told) == list(range(drawn))
    counts = {name: c.counters[f"groups/{name}"] for name in ("filtered", "missing")}
    assert counts == {"filtered": drawn - len(kept), "missing": 5 - len(kept)}
    for i, group in enumerate(told):
        assert group.rollouts[0].tokens.tolist() == [i + 1, 1, seed_of(4, 2, i // 5, i % 5) % 97 + 1]
    sizes = [len(prefixes) for prefixes, *_ in c.generator.sampler.calls]
    assert sizes[0] == 5 and (processes > 1 or set(sizes[1:]) <= {1})


def test_what_is_missing_is_asked_for_while_the_rest_of_the_batch_is_still_sampled():
    """The last of three groups is sampled only once the prompt that replaces the first has been."""
    replaced = asyncio.Event()

    class Waits(EchoSampler):
        async def sample(self, prefixes, n, settings, seeds):
            if len(prefixes) == 1:
                replaced.set()
            async for index, group in super().sample(prefixes, n, settings, seeds):
                if len(prefixes) > 1 and index == 2:
                    await asyncio.wait_for(replaced.wait(), 5)
                yield index, group

    async def run() -> list[Group]:
        c = collector(filter=NoMultiple(3, 2))
        order = next(o for o in range(20) if np.random.default_rng(o).permutation(3)[-1] == 2)
        c = replace(c, generator=replace(c.generator, sampler=Waits(order)))
        return await c.batch(Numbers(), 3, 0)

    assert names(asyncio.run(run())) == [1, 2, 4]


def test_an_error_in_what_was_asked_for_meanwhile_ends_the_batch():
    class Fails(EchoSampler):
        async def sample(self, prefixes, n, settings, seeds):
            if len(prefixes) == 1:
                raise ConnectionError("no sampler")
            async for index, group in super().sample(prefixes, n, settings, seeds):
                if index == 2:
                    await asyncio.sleep(60)
                yield index, group

    c = collector(filter=NoMultiple(3, 2))
    order = next(o for o in range(20) if np.random.default_rng(o).permutation(3)[-1] == 2)
    c = replace(c, generator=replace(c.generator, sampler=Fails(order)))
    with pytest.raises(ConnectionError):
        asyncio.run(asyncio.wait_for(c.batch(Numbers(), 3, 0), 5))


def test_rewards_before_the_filter_are_told_and_only_with_one():
    c = collector(reward=Draws(invalid=2), filter=NoMultiple(2, 1), group_size=3)  # rewards 1, 2 (invalid), 3
    for prompts in (5, 2):
        asyncio.run(c.batch(Numbers(), prompts, 0))
        assert c.take()["reward/unfiltered"] == 2.0
    assert "reward/unfiltered" not in c.take()
    plain = collector()
    asyncio.run(plain.batch(Numbers(), 5, 0))
    assert "reward/unfiltered" not in plain.take()


def test_counters_and_times_are_taken_once():
    c = collector(reward=Draws(invalid=2), group_size=3)
    groups = asyncio.run(c.batch(Numbers(), 4, 0))
    assert [g.valid().tolist() for g in groups] == [[True, False, True]] * 4
    found = c.take()
    assert found["count/invalid/draw"] == 4 and found["count/finish/stop"] == 12 and found["count/groups/filtered"] == 0
    assert found["time/sample_s"] > 0 and found["time/reward_s"] >= 0
    again = c.take()
    assert not any(again.values()) and not [name for name in again if name.startswith("count/")]


@pytest.mark.parametrize("later", [False, True])
def test_no_score_is_waited_for_after_one_that_stops_the_run(later):
    ended: list[str] = []

    class Stops(Draws):
        async def score(self, rollouts, stats=None):
            try:
                await asyncio.sleep(0.01 if rollouts[0].tokens[0] == 1 else 60)
                raise ConnectionError("no reward")
            finally:
                ended.append(rollouts[0].prompt.id)

    async def run() -> None:
        c = collector(reward=Stops(needs_stats=later))
        groups = await c.batch(Numbers(), 3, 0)
        await c.rescore(groups, [{}] * 3)

    with pytest.raises(ConnectionError):
        asyncio.run(run())
    assert len(ended) == 3


def test_a_reward_that_needs_statistics_is_asked_later():
    reward = Draws(needs_stats=True, invalid=1)
    c = collector(reward=reward)
    groups = asyncio.run(c.batch(Numbers(), 2, 0))
    assert reward.asked == [] and all(g.scores.parts == {} for g in groups)
    stats = [{"entropy": np.array([0.5, 1.5])}, {"entropy": np.array([2.5, 3.5])}]
    scored = asyncio.run(c.rescore(groups, stats))
    assert reward.asked == [(2, stats[0]), (2, stats[1])]
    assert [g.total().tolist() for g in scored] == [[0, 2], [0, 2]] and names(scored) == [0, 1]
    assert c.counters["invalid/draw"] == 2


class Together(Processes):
    """One of two processes that run one after the other: what process 0 sends is kept for process 1."""

    sent: list[Any]
    differs: bool = False

    def broadcast(self, value: Any = None) -> Any:
        if self.main:
            self.sent.append(serialization.packed(value))
            return value
        return serialization.unpacked(self.sent.pop(0))

    def gathered(self, value: Any) -> list[Any]:
        return [value, value + 1 if self.differs else value]


@pytest.mark.parametrize(("differs", "kind"), [(False, Scores), (True, Group)])
def test_where_all_processes_sample_scores_alone_travel(differs, kind):
    """Rollouts travel only where they differ: there process 1 has drawn others, and takes those of process 0."""
    sent: list[bytes] = []
    kinds, found = [], []
    for index in (0, 1):
        together = Together(index=index, count=2, names=["a", "b"])
        together.sent, together.differs = sent, differs
        one = collector()
        one = replace(one, generator=replace(one.generator, processes=together))
        found.append(asyncio.run(one.score(Numbers()(3), (index * differs, 1, 0))))
        kinds += [type(x) for message in sent for x in serialization.unpacked(message)]
        assert one.counters["groups/resent"] == 3 * differs
    assert kinds == [kind] * 3 and sent == []
    want = asyncio.run(collector().score(Numbers()(3), (0, 1, 0)))
    for groups in found:
        for got, expected in zip(groups, want, strict=True):
            assert got.scores.parts["draw"].tolist() == expected.scores.parts["draw"].tolist() == [1, 2]
            assert [r.tokens.tolist() for r in got.rollouts] == [r.tokens.tolist() for r in expected.rollouts]


def group(rewards: Sequence[float], valid: Sequence[bool], roles: Sequence[str]) -> Group:
    rollouts = [make_rollout(make_prompt(), [1], role=role) for role in roles]
    return make_group(rollouts, {"r": rewards}, {"r": valid})


@pytest.mark.parametrize(
    ("rewards", "valid", "roles", "kept"),
    [
        ([0, 1], [True, True], ["sample", "sample"], True),
        ([1, 1], [True, True], ["sample", "sample"], False),
        ([1, 1, 0], [True, True, True], ["sample", "sample", "greedy"], False),
        ([1, 1, 0], [True, True, False], ["sample", "sample", "sample"], False),
        ([1, 0], [False, False], ["sample", "sample"], False),
    ],
)
def test_varied_keeps_groups_whose_valid_samples_differ_in_reward(rewards, valid, roles, kept):
    assert isinstance(DynamicSampling(), Filter)
    assert DynamicSampling().keep(group(rewards, valid, roles)) is kept


def test_a_filter_that_never_draws_is_refused():
    with pytest.raises(ValueError, match=r"DynamicSampling.max_draws must be >= 1 \(got 0\)"):
        DynamicSampling(max_draws=0)
