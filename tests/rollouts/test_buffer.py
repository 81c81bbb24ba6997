"""Batches sampled ahead: in the order of the data, within the bound on staleness, whole after a checkpoint."""

import asyncio
import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import EchoSampler, Words, make_group, make_prompt, make_rollout

from jaxrl_llm.data.pipeline import PromptStream
from jaxrl_llm.distributed import serialization
from jaxrl_llm.experience import Branch, Completion, Group, Prompt, Rollout, SamplingParams, Scores, Turn
from jaxrl_llm.rollouts import buffer
from jaxrl_llm.rollouts.buffer import RolloutBuffer, restored, stored
from jaxrl_llm.rollouts.collect import Collector, RolloutGenerator

PROMPTS = [make_prompt(f"p{i}", [i + 1], source="s") for i in range(10)]


class Sum:
    """The reward of a response: the sum of its tokens."""

    needs_stats = False

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        total = np.array([float(r.tokens.sum()) for r in rollouts])
        return Scores(parts={"sum": total}, valid={"sum": np.ones(len(total), bool)})


class Held(EchoSampler):
    """A sampler that answers once it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.lags: dict[int, int] = {}  # number of a draw -> versions that its first token is behind

    async def sample(self, prefixes, n, settings, seeds):
        version = self.version
        async for index, group in super().sample(prefixes, n, settings, seeds):
            await self.gate.wait()
            yield index, [self._lagging(i, c, version) for i, c in enumerate(group)]

    def _lagging(self, i: int, completion: Completion, version: int) -> Completion:
        versions = np.full(len(completion.tokens), version, np.int32)
        versions[0] -= self.lags.get(i, 0)
        return replace(completion, versions=versions)


def feed(sampler: EchoSampler, k: int, *, batches: int = 100, least: int = 1, shuffle: bool = False) -> RolloutBuffer:
    stream: PromptStream[Prompt] = PromptStream(PROMPTS, seed=3)
    if not shuffle:
        stream._order = lambda g: g % len(PROMPTS)
    generator = RolloutGenerator(sampler=sampler, tokenizer=Words())
    collector = Collector(generator=generator, reward=Sum(), settings=SamplingParams(), group_size=2)
    return RolloutBuffer(stream=stream, collector=collector, prompts=3, max_staleness=k, last=batches, least=least)


def names(groups: Sequence[Group]) -> list[str]:
    return [g.rollouts[0].prompt.id for g in groups]


async def steps(ahead: RolloutBuffer, sampler: EchoSampler, numbers: Sequence[int]) -> list[list[Group]]:
    """What each step learns from; the sampler serves version s - 1 at step s, and gets time while the learner updates."""
    found = []
    for step in numbers:
        sampler.version = step - 1
        found.append(await ahead.next(step))
        await asyncio.sleep(0.005)
    return found


@pytest.mark.parametrize("k", [1, 2, 3])
def test_batches_come_in_the_order_of_the_data_and_no_token_is_older_than_the_bound(k):
    async def run() -> None:
        sampler = Held()
        found = await steps(feed(sampler, k, batches=6), sampler, range(1, 7))
        assert [n for groups in found for n in names(groups)] == [f"p{i % 10}" for i in range(18)]
        for step, groups in enumerate(found, start=1):
            versions = {int(v) for g in groups for r in g.rollouts for v in r.versions}
            assert versions == {max(step - 1 - k, 0)}, "sampled as early as the bound allows"
        assert len(sampler.calls) == 6, "nothing is sampled beyond the last step"

    asyncio.run(run())


def test_the_next_batch_is_sampled_while_the_learner_updates():
    async def run() -> None:
        sampler = Held()
        ahead = feed(sampler, 1)
        await ahead.next(1)
        await asyncio.sleep(0.005)
        assert len(sampler.calls) == 2 and ahead.take()["buffer/whole"] == 1

    asyncio.run(run())


def test_stale_samples_are_dropped_and_counted():
    async def run() -> None:
        sampler = Held()
        ahead = feed(sampler, 1, least=1)
        await steps(ahead, sampler, [1])
        ahead.take()
        sampler.lags = {1: 2}  # the second draw of each group begins under a version that is two older
        second, third = await steps(ahead, sampler, [2, 3])
        assert [len(g.rollouts) for g in second] == [2, 2, 2]
        assert [len(g.rollouts) for g in third] == [1, 1, 1]
        assert [g.total().tolist() for g in third] == [[float(g.rollouts[0].tokens.sum())] for g in third]
        assert ahead.take()["count/stale"] == 3

    asyncio.run(run())


def test_groups_too_small_to_learn_from_go_with_their_stale_samples():
    async def run() -> None:
        sampler = Held()
        ahead = feed(sampler, 1, least=2)
        sampler.lags = {0: 3}
        with pytest.raises(RuntimeError, match=r"older than version .*Stage\.max_staleness"):
            await steps(ahead, sampler, [5])
        assert ahead.take()["count/stale_rest"] == 3

    asyncio.run(run())


def same(one: Group, other: Group) -> None:
    assert names([one]) == names([other]) and one.scores.weights == other.scores.weights
    for part in one.scores.parts:
        np.testing.assert_array_equal(one.scores.parts[part], other.scores.parts[part])
        np.testing.assert_array_equal(one.scores.valid[part], other.scores.valid[part])
    for a, b in zip(one.rollouts, other.rollouts, strict=True):
        for name in ("tokens", "sampler_logprobs", "mask", "versions"):
            x, y = getattr(a, name), getattr(b, name)
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)
        assert (a.finish, a.text, a.role, list(a.spans)) == (b.finish, b.text, b.role, list(b.spans))


def written(value: Any) -> Any:
    """What a checkpoint gives back for a state."""
    return serialization.whole(*serialization.split(value))


def test_a_group_comes_back_from_its_bytes_as_it_was():
    rollouts = [
        make_rollout(PROMPTS[2], [5, 6, 7], mask=[1, 0, 1], logprobs=[-0.1, 0.0, -1e-7], spans={"cot": np.array([1, 1, 0], bool)}, text="a"),
        make_rollout(PROMPTS[2], [8], finish="length", role="greedy"),
    ]  # fmt: skip
    group = make_group(rollouts, {"x": [1 / 3, float("nan")], "log/y": [2, 3]}, {"x": [True, False]}, {"x": 0.5})
    rows = {(p.source, p.id): p for p in PROMPTS}
    again = restored(serialization.unpacked(serialization.packed(stored(group))), rows)
    same(again, group)
    np.testing.assert_array_equal(again.rollouts[0].spans["cot"], [True, True, False])
    with pytest.raises(ValueError, match="prompt 'p2' of 's', which the data lacks"):
        restored(stored(group), {})


@pytest.mark.parametrize("whole", [True, False], ids=["after the next batch is whole", "while it is sampled"])
def test_no_prompt_is_lost_or_repeated_by_a_resume(whole):
    """A checkpoint after step 2 with two batches ahead, against the run that was never stopped."""

    async def run() -> None:
        sampler = Held()
        want = [names(groups) for groups in await steps(feed(sampler, 2, shuffle=True), sampler, range(1, 7))]
        sampler = Held()
        ahead = feed(sampler, 2, shuffle=True)
        first = await steps(ahead, sampler, [1])
        if not whole:
            sampler.gate.clear()
        asked = asyncio.ensure_future(steps(ahead, sampler, [2]))
        await asyncio.sleep(0.01)
        sampler.gate.set() if not whole else None
        first += await asked
        if not whole:
            sampler.gate.clear()
        while whole and ahead.take()["buffer/whole"] < 2:
            await asyncio.sleep(0.001)
        state: dict[str, Any] = written(ahead.state())
        kept = [coming["groups"] for coming in state["coming"]]
        other = Held()
        again = feed(other, 2, shuffle=True)
        again.restore(state)
        rest = await steps(again, other, range(3, 7))
        assert [names(groups) for groups in first + rest] == want
        if whole:
            assert all(kept)
            for groups, content in zip(rest, kept):
                for group, one in zip(groups, content, strict=True):
                    same(group, restored(one, {(p.source, p.id): p for p in PROMPTS}))
        sampler.gate.set()

    asyncio.run(run())


def test_a_state_is_encoded_where_it_is_written_and_holds_what_was_whole_when_it_was_taken(monkeypatch):
    """A run that is given up later writes the state that it had after the step before."""

    async def run() -> None:
        encoded = []
        monkeypatch.setattr(buffer, "stored", lambda group: encoded.append(1) or stored(group))
        sampler = Held()
        ahead = feed(sampler, 1)
        await steps(ahead, sampler, [1])
        while ahead.take()["buffer/whole"] < 1:
            await asyncio.sleep(0.001)
        state = ahead.state()
        want = await ahead.next(2)  # the batch leaves the buffer, and another one is sampled
        assert encoded == [], "a step encodes nothing"
        again = feed(Held(), 1)
        again.restore(written(state))
        assert len(encoded) == 3
        for one, other in zip(await again.next(2), want, strict=True):
            same(one, other)

    asyncio.run(run())


def test_a_run_on_policy_goes_on_ahead_and_one_ahead_is_not_taken_up_on_policy():
    async def run() -> None:
        ahead = feed(Held(), 1, batches=4)
        await steps(ahead, Held(), [1])
        state = ahead.state()
        with pytest.raises(ValueError, match="holds batches that were sampled ahead: set MAX_STALENESS as it was"):
            ahead.stream.restore(state)
        later, sampler = feed(Held(), 1, batches=4), Held()
        later.restore({"position": 6, "rows": 10, "seed": 3})
        found = await steps(later, sampler, [3, 4])
        assert [group.rollouts[0].prompt.id for groups in found for group in groups] == [
            f"p{i % 10}" for i in range(6, 12)
        ]
        assert later.state()["coming"] == [], "no batch is sampled for a step after the last one"

    asyncio.run(run())


def test_a_state_with_arrays_as_text_is_still_taken_up_and_an_unknown_format_is_refused_with_its_number():
    def text(values: Sequence[float], kind: str) -> str:
        return base64.b64encode(np.array(values, kind).tobytes()).decode()

    rollout = {
        "tokens": text([5, 6, 7], "<i4"), "sampler_logprobs": text([-0.5, 0, -1e-7], "<f4"), "mask": text([1, 0, 1], "?"),
        "versions": text([4, 4, 5], "<i4"), "spans": {"cot": text([1, 1, 0], "?")}, "finish": "length", "text": "ü", "role": "sample",
    }  # fmt: skip
    group = {
        "prompt": ["s", "p1"],
        "rollouts": [rollout],
        "parts": {"sum": [18.0]},
        "valid": {"sum": [True]},
        "weights": {"sum": 0.5},
    }
    stream = {"position": 9, "rows": 10, "seed": 3}
    coming = [{"step": 3, "draws": [3], "groups": [group]}, {"step": 4, "draws": [6], "groups": None}]
    old = {"stream": stream, "started": 4, "coming": coming}

    async def run() -> None:
        sampler = Held()
        sampler.version = 5
        ahead = feed(sampler, 1)
        ahead.restore(old)
        (first,), second = await ahead.next(3), await ahead.next(4)
        expected = make_rollout(
            PROMPTS[1], [5, 6, 7], mask=[1, 0, 1], logprobs=[-0.5, 0, -1e-7], spans={"cot": np.array([1, 1, 0], bool)},
            finish="length", text="ü", versions=np.array([4, 4, 5], np.int32),
        )  # fmt: skip
        same(first, make_group([expected], {"sum": [18.0]}, weights={"sum": 0.5}))
        assert names(second) == ["p6", "p7", "p8"], "those of the batch that was incomplete"
        with pytest.raises(ValueError, match="in format 5, and this version reads the formats 1 to 4"):
            feed(sampler, 1).restore({**old, "format": 5})

    asyncio.run(run())


def test_a_step_that_the_filter_left_nothing_of_is_not_called_stale():
    class Nothing:
        max_draws = 1

        def keep(self, group: Group) -> bool:
            return False

    async def run() -> None:
        sampler = Held()
        ahead = feed(sampler, 1)
        ahead.collector = replace(ahead.collector, filter=Nothing())
        assert await steps(ahead, sampler, [1]) == [[]]
        assert ahead.take()["count/groups/missing"] >= 3

    asyncio.run(run())


def forked(prompt: Prompt, versions: Sequence[int]) -> Rollout:
    """A rollout of two branches whose learned tokens are of these versions."""
    branches = tuple(
        Branch(
            prefix=np.array([1, call], np.int32), tokens=np.array([5, 6, call], np.int32), finish="stop",
            sampler_logprobs=np.array([0, -1, -2], np.float32), mask=np.array([0, 1, 1], bool),
            versions=np.array([0, version, version], np.int32), turns=(Turn(start=1, end=3, call=call),),
        )
        for call, version in enumerate(versions)
    )  # fmt: skip
    last = branches[-1]
    return make_rollout(
        prompt, last.tokens, mask=last.mask, logprobs=last.sampler_logprobs, versions=last.versions, branches=branches, turns=last.turns,
        rewards={"won": 1.0, "style": None}, info={"stop": "done", "session": {"calls": 2.0}},
    )  # fmt: skip


def test_branches_and_failures_survive_a_checkpoint():
    failed = make_rollout(PROMPTS[1], [4], valid=False, error="OSError in step: x")
    group = make_group([forked(PROMPTS[1], (3, 4)), failed], {"env/won": [1.0, 0.0]}, {"env/won": [True, False]})
    rows = {(prompt.source, prompt.id): prompt for prompt in PROMPTS}
    (content,) = serialization.unpacked(serialization.packed([stored(group)]))
    again = restored(content, rows)
    same(again, group)
    for one, other in zip(again.rollouts, group.rollouts, strict=True):
        assert (one.valid, one.error, one.rewards, one.info, one.turns) == (
            other.valid, other.error, other.rewards, other.info, other.turns,
        )  # fmt: skip
        assert len(one.branches) == len(other.branches)
        for a, b in zip(one.branches, other.branches, strict=True):
            assert (a.finish, a.turns) == (b.finish, b.turns)
            for name in ("prefix", "tokens", "sampler_logprobs", "mask", "versions"):
                assert getattr(a, name).dtype == getattr(b, name).dtype
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def test_a_stale_token_in_any_branch_makes_a_rollout_stale():
    group = make_group([forked(PROMPTS[1], (1, 5)), forked(PROMPTS[1], (4, 5))], {"r": [1.0, 2.0]})
    ahead = feed(Held(), 1)
    (kept,) = ahead._fresh([group], 3)
    assert [r.branches for r in kept.rollouts] == [group.rollouts[1].branches] and kept.total().tolist() == [2.0]
