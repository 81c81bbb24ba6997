"""The last sequences of a batch move to fewer slots, and draw there what they draw in all of them."""

import asyncio
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest
from sampler_cases import built, sample

from jaxrl_llm.distributed import ahead
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.metrics.profiling import EVENT
from jaxrl_llm.protocols import Conversation
from jaxrl_llm.samplers.embedded import engine as engine_module
from jaxrl_llm.samplers.embedded import room, smaller
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler


@pytest.fixture(autouse=True)
def to_one_slot(monkeypatch):
    monkeypatch.setattr(smaller, "FEWEST", 1)


SHORT, LONG = SamplingParams(max_tokens=2), SamplingParams(max_tokens=11)


def serving(tiny, run, **fields):
    """Runs `await run(engine)` with a sampler of 32 slots that looks after every second step."""

    async def main():
        engine = tiny.start(**{"slots": 32, "decode_chunk": 2} | fields)
        await engine.publish(tiny.params, 0)
        result = await run(engine)
        await engine.close()
        return result

    return asyncio.run(main())


def mixed(prefixes, **changes):
    """30 sequences of two tokens and two of eleven, which the batch holds together."""

    async def run(engine):
        long, short = replace(LONG, **changes), replace(SHORT, **changes)
        found = await asyncio.gather(sample(engine, prefixes[:2], 1, long), sample(engine, prefixes, 3, short))
        return [c for groups in found for group in groups for c in group], engine.metrics()

    return run


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0}, {"repetition_penalty": 1.5}], ids=["sampled", "greedy", "penalised"]
)
def test_what_is_drawn_is_that_of_all_slots_for_a_quarter_of_the_slot_steps(tiny, prefixes, changes):
    whole, spent = serving(tiny, mixed(prefixes, **changes))
    fewer, saved = serving(tiny, mixed(prefixes, **changes), shrink=4)
    for a, b in zip(fewer, whole, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.finish == b.finish and len(a.versions) == len(a.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=2e-6)
    steps = lambda metrics: metrics["sampler/generated_tokens"] / metrics["sampler/occupancy"]  # noqa: E731
    assert steps(spent) == pytest.approx(11 * 32)
    assert steps(saved) == pytest.approx(2 * 32 + 9 * 2), "after the first chunk two slots are left: 32, 8, 2"


def test_a_call_that_comes_later_gets_the_slots_back(tiny, prefixes):
    async def run(engine):
        long = asyncio.create_task(sample(engine, prefixes[:2], 1, LONG))
        await sample(engine, prefixes, 3, SHORT)
        while engine._batch.capacity.slots == 32:
            await asyncio.sleep(0)
        assert engine._batch.capacity.slots == 2
        late = await sample(engine, prefixes, 2, SHORT)
        assert not long.done(), "it waited for the end of the batch"
        return await long, late

    for found, settings, n in zip(serving(tiny, run, shrink=4), (LONG, SHORT), (1, 2), strict=True):
        alone = serving(tiny, lambda engine, s=settings, n=n: sample(engine, prefixes[: 2 if n == 1 else 10], n, s))
        assert [[c.tokens.tolist() for c in g] for g in found] == [[c.tokens.tolist() for c in g] for g in alone]


def test_a_batch_whose_copy_has_no_room_keeps_its_slots(tiny, prefixes, monkeypatch):
    """Of 32 slots 8 are left, whose cache is a quarter of the batch's; the batch leaves a tenth of the memory free."""
    batch = room.taken_bytes(tiny.policy, room.Capacity(slots=32, length=32, stop_ids=4, penalised=False))

    async def run(engine):
        await asyncio.gather(sample(engine, prefixes[:8], 1, LONG), sample(engine, prefixes[:8], 3, SHORT))
        metrics = engine.metrics()
        return metrics["sampler/generated_tokens"] / metrics["sampler/occupancy"]

    monkeypatch.setattr(engine_module, "free_bytes", lambda devices: int(batch / room.SHARE) + 64)
    assert serving(tiny, run, shrink=4) == pytest.approx(11 * 32)
    monkeypatch.setattr(engine_module, "free_bytes", lambda devices: int(batch * 1.3))
    assert serving(tiny, run, shrink=4) == pytest.approx(2 * 32 + 9 * 8)


def test_a_factor_of_one_shrinks_nothing_and_is_refused():
    with pytest.raises(ValueError, match=r"embedded.EmbeddedSampler.shrink must be >= 2 \(got 1\)"):
        EmbeddedSampler(shrink=1)


compiled = []  # whether a decode step was compiled in the main thread
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **more: (
        compiled.append(threading.current_thread() is threading.main_thread())
        if event == EVENT and "decode" in str(more.get("fun_name"))
        else None
    )
)


@pytest.mark.parametrize("changes", [{}, {"repetition_penalty": 1.5, "top_k": 3}], ids=["plain", "penalised and cut"])
@pytest.mark.parametrize(
    ("devices", "page"), [(1, 0), (2, 0), (1, 8)], ids=["whole slots", "whole slots on two devices", "pages"]
)
def test_steps_of_fewer_slots_are_compiled_beside_those_of_all(prefixes, monkeypatch, devices, page, changes):
    small = built(devices, fsdp=devices)
    whole, _ = serving(small, mixed(prefixes, **changes), shrink=4, page=page)
    monkeypatch.setattr(ahead, "cores", lambda: 8)
    jax.clear_caches()
    compiled.clear()
    found, _ = serving(small, mixed(prefixes, **changes), shrink=4, page=page)
    assert sorted(compiled) == [False, False, True], "8 and 2 slots, and 32"
    for a, b in zip(found, whole, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.logprobs.tolist() == b.logprobs.tolist()


def test_a_batch_waits_for_its_own_smaller_batches_and_conversations_have_none(tiny, prefixes, monkeypatch):
    begun = []

    class Stub:
        def __init__(self, programs):
            begun.append(self)
            self.waited = 0

        def wait(self):
            self.waited += 1

    monkeypatch.setattr(smaller, "worthwhile", lambda: True)
    monkeypatch.setattr(smaller, "Background", Stub)

    async def run(engine):
        talk = Conversation(id="a", length=32, at_once=32)
        assert [len(group) async for _, group in engine.sample(prefixes[:1], 1, SHORT, [0], conversation=talk)] == [1]
        engine.forget("a")
        assert not begun
        await sample(engine, prefixes[:2], 8, LONG)  # never shrinks: all end together
        await sample(engine, prefixes, 3, replace(LONG, temperature=0.5))
        return None

    serving(tiny, run, shrink=4)
    assert begun and all(work.waited == 0 for work in begun)
    begun.clear()
    serving(tiny, mixed(prefixes), shrink=4)
    assert [work.waited for work in begun] == [1]
