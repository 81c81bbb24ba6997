"""Rollouts stream: no group, batch or turn waits for another, slots are refilled at once, and groups are scored as they become whole."""

import asyncio
import time

import numpy as np
import pytest
from playing import SETTINGS, Games, make_generator, make_prompt, watched

from jaxrl_llm.experience import Limits, Rollout, Scores
from jaxrl_llm.rollouts.collect import Collector
from jaxrl_llm.rollouts.schedule import Slots

SLOW = ("p2", 1)


class Timed:
    """A reward that notes when it was asked about which prompt."""

    needs_stats = False

    def __init__(self) -> None:
        self.begin, self.asked = time.perf_counter(), {}

    async def score(self, rollouts, stats=None) -> Scores:
        self.asked[rollouts[0].prompt.id] = time.perf_counter() - self.begin, len(rollouts)
        return Scores(parts={"r": np.arange(len(rollouts), dtype=float)}, valid={"r": np.ones(len(rollouts), bool)})


def slow_one(seconds: float):
    return lambda prompt, sample: seconds if (prompt, sample) == SLOW else 0.05


@pytest.mark.parametrize("concurrency", [4, 64])
def test_one_slow_rollout_holds_up_its_own_group_alone(concurrency: int):
    games, reward = Games(seconds=slow_one(20.0)), Timed()
    generator = make_generator(games, slots=Slots(concurrency=concurrency), limits=Limits(step_s=60.0))
    collector = Collector(generator=generator, reward=reward, settings=SETTINGS, group_size=4)

    async def run() -> None:
        task = asyncio.create_task(collector.score([make_prompt(f"p{i}") for i in range(8)], (0, 1, 0)))
        while len(reward.asked) < 7 and not task.done():
            await asyncio.sleep(0.01)
        assert not task.done() and len(games.built) == 32
        task.cancel()
        await asyncio.wait({task})
        await generator.player.close()

    _, lag = watched(run())
    assert set(reward.asked) == {f"p{i}" for i in range(8)} - {"p2"}
    assert max(when for when, _ in reward.asked.values()) < 5.0 and lag < 0.1
    assert sorted(games.closed) == sorted((f"p{i}", k) for i in range(8) for k in range(4))


def test_the_limit_of_an_episode_ends_the_slow_one():
    games, reward = Games(seconds=slow_one(20.0)), Timed()
    limits = Limits(step_s=60.0, episode_s=2.0)
    generator = make_generator(games, slots=Slots(concurrency=8), limits=limits, late="aborted")
    collector = Collector(generator=generator, reward=reward, settings=SETTINGS, group_size=4)

    async def run():
        groups = await collector.score([make_prompt(f"p{i}") for i in range(8)], (0, 1, 0))
        await generator.player.close()
        return groups

    begin = time.perf_counter()
    groups, _ = watched(run())
    assert 2.0 <= time.perf_counter() - begin < 10.0
    assert [g.rollouts[0].prompt.id for g in groups] == [f"p{i}" for i in range(8)]
    assert groups[2].valid().tolist() == [True, False, True, True]
    assert reward.asked["p2"][1] == 3, "the reward is asked about the valid ones alone"
    assert groups[2].scores.parts["r"].tolist() == [0, 0, 1, 2]
    assert all(groups[i].valid().all() for i in range(8) if i != 2)


def test_slots_are_refilled_at_once_and_the_oldest_prompt_comes_first():
    running, most, began = 0, 0, []

    async def one(i: int, k: int) -> Rollout:
        nonlocal running, most
        began.append((i, k))
        running += 1
        most = max(most, running)
        await asyncio.sleep(2.0 if (i, k) == (0, 0) else 0.02)
        running -= 1
        return rollout(valid=True)

    async def run() -> list[int]:
        return [i async for i, _ in Slots(concurrency=3).groups(6, 2, one)]

    found, _ = watched(run())
    assert began == [(i, k) for i in range(6) for k in range(2)] and most == 3
    # Two slots play the 11 short ones beside the long one; with a barrier their groups would wait for it.
    assert found[-1] == 0 and sorted(found) == list(range(6))


def rollout(*, valid: bool) -> Rollout:
    none = np.zeros(1, np.int32)
    return Rollout(
        prompt=make_prompt("p"), tokens=none, sampler_logprobs=none.astype(np.float32), mask=none > -1, versions=none, finish="stop",
        valid=valid,
    )  # fmt: skip


def test_extra_members_are_left_out_when_enough_valid_ones_ended():
    async def one(i: int, k: int) -> Rollout:
        await asyncio.sleep([0.0, 4.0, 0.05, 0.1][k])
        return rollout(valid=k != 0)

    slots = Slots(concurrency=8, extra=2)

    async def run() -> list[Rollout]:
        ((_, group),) = [found async for found in slots.groups(1, 2, one)]
        return group

    begin = time.perf_counter()
    group, _ = watched(run())
    assert [r.valid for r in group] == [True, True] and time.perf_counter() - begin < 3.0
    assert slots.counters["extra/unused"] == 2

    async def greedy() -> int:
        return len([k async for _, found in slots.groups(1, 1, one, plain=True) for k in found])

    assert watched(greedy())[0] == 1 and slots.counters["extra/unused"] == 2, "no extra member was started"


def test_groups_that_failures_left_too_small_are_dropped_and_counted():
    wrong = {("p0", 0), ("p0", 1), ("p0", 2), ("p1", 0)}
    games = Games(wrong=lambda prompt, sample: "step" if (prompt, sample) in wrong else "")
    generator = make_generator(games)
    collector = Collector(
        generator=generator, reward=None, settings=SETTINGS, group_size=4, least=2, weights={"reward": 0.5}
    )

    async def run():
        groups = await collector.batch(lambda n: [make_prompt(f"p{i}") for i in range(n)], 3, 1)
        await generator.player.close()
        return groups

    groups, _ = watched(run())
    assert [g.rollouts[0].prompt.id for g in groups] == ["p1", "p2"]
    assert groups[0].valid().tolist() == [False, True, True, True] and groups[0].total().tolist() == [0, 1.5, 1.5, 1.5]
    taken = collector.take()
    assert taken["count/groups/failed"] == 1 and taken["count/invalid/environment/step/OSError"] == 4
    assert taken["count/groups/missing"] == 1 and taken["agents/sessions"] == 12


def test_a_batch_of_failures_alone_is_kept_so_that_the_run_can_end():
    collector = Collector(
        generator=make_generator(Games(wrong=lambda prompt, sample: "reset")),
        reward=None,
        settings=SETTINGS,
        group_size=2,
        least=2,
    )

    async def run():
        groups = await collector.batch(lambda n: [make_prompt(f"p{i}") for i in range(n)], 2, 1)
        await collector.generator.player.close()
        return groups

    groups, _ = watched(run())
    assert len(groups) == 2 and not any(g.valid().any() for g in groups)


def test_turns_of_one_prompt_do_not_wait_for_those_of_another():
    games = Games(seconds=lambda prompt, sample: 2.0 if prompt == "p0" else 0.0)
    begin = time.perf_counter()

    async def run() -> dict[int, float]:
        generator = make_generator(games)
        prompts = [make_prompt("p0"), make_prompt("p1")]
        ended = {i: time.perf_counter() - begin async for i, _ in generator.groups(prompts, 2, SETTINGS, [0, 1])}
        await generator.player.close()
        return ended

    ended, _ = watched(run())
    assert ended[1] < 2.0 and ended[0] >= 4.0
