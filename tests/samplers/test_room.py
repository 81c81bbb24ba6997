"""The embedded sampler takes as many slots as a device has room for, and draws with few what it draws with many."""

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from sampler_cases import MAX_LENGTH, VOCABULARY, sample

from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.samplers.embedded import decode
from jaxrl_llm.samplers.embedded.room import COPIES, SHARE, Capacity, fitting, free_bytes, taken_bytes

SETTINGS = SamplingParams(max_tokens=11, stop_token_ids=(3, 17, 8))
SLOTS = Capacity(slots=16, length=MAX_LENGTH, stop_ids=4, penalised=True)


def on_a_device(tree):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("mesh", [{}, {"devices": 4, "fsdp": 2, "tensor": 2}])
def test_what_a_batch_takes_is_what_its_arrays_take(make, mesh):
    policy = make(**mesh).policy
    arrays = decode.empty(policy=policy, slots=16, length=MAX_LENGTH, penalised=True)
    logits = COPIES * 4 * 16 * VOCABULARY // (4 if mesh else 1)
    assert taken_bytes(policy, SLOTS) == on_a_device(arrays) + logits
    cache = on_a_device(arrays[0])
    assert taken_bytes(policy, SLOTS, "bfloat16") == taken_bytes(policy, SLOTS) - cache // 2


def test_slots_are_the_most_that_fit(tiny):
    one = taken_bytes(tiny.policy, replace(SLOTS, slots=1))

    def slots(wanted, room_for):
        return fitting(tiny.policy, replace(SLOTS, slots=wanted), int(room_for * one / SHARE)).slots

    assert [slots(16, n + 0.1) for n in (1, 2, 3, 4, 7, 8, 15, 16, 99)] == [1, 2, 2, 4, 4, 8, 8, 16, 16]
    # A number between is had as it is or not at all, so that what fits for many is never less than what fits for few.
    assert [slots(12, n + 0.1) for n in (11, 12, 16)] == [8, 12, 12] and slots(8, 11.1) == 8
    assert fitting(tiny.policy, SLOTS, None) == SLOTS
    with pytest.raises(MemoryError, match=r"one sequence of 32 tokens takes .* GiB .*PROMPT_LIMIT, RESPONSE_LIMIT"):
        slots(16, 0.9)


def test_the_fullest_device_decides():
    def device(limit, used):
        return SimpleNamespace(
            memory_stats=lambda: {"bytes_limit": limit, "bytes_in_use": used, "peak_bytes_in_use": 1}
        )

    silent = SimpleNamespace(memory_stats=lambda: None)
    assert free_bytes([device(100, 30), device(100, 80), silent]) == 20
    assert free_bytes([device(100, 130)]) == 0
    assert free_bytes([silent]) is None
    assert free_bytes(jax.local_devices()) is None, "a CPU keeps no account"


def test_calls_of_all_lengths_are_served_by_the_slots_that_there_is_room_for(tiny, prefixes, draw, monkeypatch, caplog):
    expected = [[c.tokens.tolist() for c in group] for group in draw(tiny, prefixes, 3, SETTINGS)]
    four = taken_bytes(tiny.policy, replace(SLOTS, slots=4, penalised=False))
    monkeypatch.setattr("jaxrl_llm.samplers.embedded.engine.free_bytes", lambda devices: int(four / SHARE) + 1)
    longer = replace(SETTINGS, max_tokens=20)  # 2 + 20 tokens fill a cache of 32, where 1 + 11 fill one of 16

    async def together():
        engine = tiny.start(decode_chunk=4)
        await engine.publish(tiny.params, 0)
        for _ in range(2):
            calls = [(prefixes, 3, SETTINGS), ([prefixes[5]], 1, longer), ([prefixes[2]], 9, SETTINGS)]
            found = await asyncio.wait_for(asyncio.gather(*(sample(engine, *call) for call in calls)), 60)
            assert [[c.tokens.tolist() for c in group] for group in found[0]] == expected
            assert [len(group) for groups in found[1:] for group in groups] == [1, 9]
        await engine.close()
        return {program[1] for program in engine._programs if program[0] == "decode"}

    with caplog.at_level(logging.WARNING):
        shapes = asyncio.run(together())
    assert {(shape.slots, shape.length) for shape in shapes} == {(4, 32)}
    said = [record.getMessage() for record in caplog.records if "slots of" in record.getMessage()]
    assert len(said) == 1 and "64 slots of 32 tokens" in said[0] and "sampling with 4 slots" in said[0]
    assert "embedded.EmbeddedSampler.slots" in said[0]
    monkeypatch.setattr("jaxrl_llm.samplers.embedded.engine.free_bytes", lambda devices: 100)
    with pytest.raises(MemoryError, match="may be taken"):
        draw(tiny, prefixes, 1, SETTINGS)
