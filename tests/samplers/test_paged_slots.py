"""Slots that share a pool of pages draw what slots with room of their own draw, also where sequences have to give their pages up."""

import asyncio
from collections import Counter
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from sampler_cases import built, sample

from jaxrl_llm.agents.service import TokenService
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.decode_attention import cache as caches
from jaxrl_llm.protocols import Conversation
from jaxrl_llm.samplers.embedded import decode, room, smaller
from jaxrl_llm.samplers.embedded import engine as engine_module
from jaxrl_llm.samplers.embedded.pages import NOBODYS, Pages
from jaxrl_llm.samplers.embedded.parking import Parked, Parking
from jaxrl_llm.samplers.embedded.room import Capacity
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.samplers.embedded.slots import SlotBatch
from jaxrl_llm.samplers.requests import Request

SETTINGS = SamplingParams(max_tokens=15, stop_token_ids=(3,))
CAPACITY = Capacity(slots=32, length=32, stop_ids=4, penalised=False, page=8, pages=32 * 4 + 1)


@dataclass(frozen=True)
class Chip:
    platform: str
    device_kind: str


def run(tiny, prefixes, settings=SETTINGS, n=3, **fields):
    """All completions of two calls at once, and the counters."""

    async def main():
        engine = tiny.start(**{"slots": 32, "decode_chunk": 4, **fields})
        await engine.publish(tiny.params, 0)
        calls = (
            sample(engine, prefixes, n, settings),
            sample(engine, prefixes[:2], 1, replace(settings, max_tokens=3)),
        )
        found = [c for groups in await asyncio.gather(*calls) for group in groups for c in group]
        shapes = {program[1] for program in engine._programs if program[0] == "decode"}
        metrics = engine.metrics()
        await engine.close()
        return found, metrics, shapes

    return asyncio.run(asyncio.wait_for(main(), 100))


def short_of(monkeypatch, policy, pages, **changes):
    """Gives devices memory for 32 slots with so many pages on each shard."""
    shards = policy.partitioner.batch_shards
    free = room.taken_bytes(policy, replace(CAPACITY, pages=pages * shards, **changes)) / room.SHARE
    monkeypatch.setattr(engine_module, "free_bytes", lambda devices: int(free) + 1)


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a.tokens.tolist(), a.finish, a.versions.tolist()) == (b.tokens.tolist(), b.finish, b.versions.tolist())
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=3e-6)


@pytest.mark.parametrize("fields", [{"page": 8}, {"page": 4, "shrink": 2}, {"page": 32}], ids=str)
@pytest.mark.parametrize("changes", [{}, {"repetition_penalty": 1.5}, {"temperature": 0}], ids=str)
def test_pages_hold_the_bits_of_whole_slots(tiny, prefixes, changes, fields, monkeypatch):
    monkeypatch.setattr(smaller, "FEWEST", 1)
    settings, own = replace(SETTINGS, **changes), {"shrink": fields.get("shrink", 0)}
    (found, _, shapes), (expected, _, _) = (run(tiny, prefixes, settings, **f) for f in (fields, own))
    assert {shape.page for shape in shapes} == {fields["page"]}
    for a, b in zip(found, expected, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.finish == b.finish
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


@pytest.mark.parametrize("mesh", [{"fsdp": 4}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_each_shard_of_a_mesh_has_pages_of_its_own(prefixes, mesh, monkeypatch):
    expected, _, _ = run(built(), prefixes)
    whole = built(4, **mesh)
    same(run(whole, prefixes, page=8, shrink=2)[0], expected)
    short_of(monkeypatch, whole.policy, 12)
    found, counted, _ = run(whole, prefixes, page=8)
    same(found, expected)
    assert counted["sampler/prefill_again_tokens"] > 0


@pytest.mark.parametrize("pages", [33, 20])
@pytest.mark.parametrize("changes", [{}, {"repetition_penalty": 1.5}], ids=str)
def test_sequences_that_give_their_pages_up_go_on_as_before(tiny, prefixes, changes, pages, monkeypatch, caplog):
    settings = replace(SETTINGS, stop_token_ids=(), **changes)
    expected, whole, _ = run(tiny, prefixes, settings)
    short_of(monkeypatch, tiny.policy, pages, penalised=bool(changes))
    found, counted, shapes = run(tiny, prefixes, settings, page=8)
    same(found, expected)
    assert counted["sampler/prefill_again_tokens"] > 0 and whole["sampler/prefill_again_tokens"] == 0
    # 33 are what 32 slots fill to a quarter, and nobody's; with room for fewer there are fewer slots, whose logits leave room for some.
    ((slots, given),) = {(shape.slots, shape.pages) for shape in shapes}
    assert (slots, given) == (32, 33) if pages == 33 else slots == 16 and 20 < given < 33
    assert f"sampling with {slots} slots and {given} of 129 pages" in caplog.text


def test_the_longest_sequence_has_room_or_nothing_is_sampled(tiny, prefixes, monkeypatch):
    """Four pages and nobody's hold one sequence of 32 tokens: all are drawn, one after the other where they are long."""
    expected, _, _ = run(tiny, prefixes, replace(SETTINGS, max_tokens=20))
    least = replace(CAPACITY, slots=2, pages=5)
    enough = int(room.taken_bytes(tiny.policy, least) / room.SHARE) + 1
    monkeypatch.setattr(engine_module, "free_bytes", lambda devices: enough)
    found, _, shapes = run(tiny, prefixes, replace(SETTINGS, max_tokens=20), page=8)
    same(found, expected)
    assert all((shape.slots, shape.pages) <= (2, 5) for shape in shapes)
    fewest = int(room.taken_bytes(tiny.policy, replace(CAPACITY, slots=1, pages=5)) / room.SHARE)
    monkeypatch.setattr(engine_module, "free_bytes", lambda devices: fewest - 64)
    with pytest.raises(MemoryError, match=r"one sequence of 32 tokens takes .*RESPONSE_LIMIT"):
        run(tiny, prefixes, replace(SETTINGS, max_tokens=20), page=8)


@pytest.mark.parametrize("pages", [None, 40, 33])
def test_turns_are_the_same_in_pages_that_are_kept_given_up_or_prefilled_anew(tiny, prefixes, pages, monkeypatch):
    def talk(**fields):
        async def one(service, session, prompt):
            said = []
            for number in range(4):
                done = await service.continue_(session, prompt)
                said.append(done.tokens.tolist())
                prompt = np.concatenate([prompt, done.tokens, [number]]).astype(np.int32)
            return said

        async def main():
            engine = tiny.start(slots=32, decode_chunk=2, **fields)
            await engine.publish(tiny.params, 4)
            service = TokenService(engine, SamplingParams(max_tokens=3), at_once=32)
            found = await asyncio.gather(*(one(service, service.open(seed=i), prefixes[i % 10]) for i in range(15)))
            metrics = engine.metrics()
            await engine.close()
            return found, metrics

        return asyncio.run(asyncio.wait_for(main(), 100))

    expected, _ = talk(keep_turns=False)
    if pages is not None:
        short_of(monkeypatch, tiny.policy, pages)
    found, counted = talk(page=8)
    assert found == expected
    assert counted["sampler/kept_tokens"] > 0 and (counted["sampler/evicted_tokens"] > 0) == (pages is not None)


def test_a_number_of_slots_is_never_more_than_wanted(tiny):
    """24 slots whose pages do not fit have fewer pages, or are 16 and so on; a batch that moves needs room for what is not in pages."""
    wanted = replace(CAPACITY, slots=24, pages=97)
    for free in range(13_000, 200_000, 9_000):
        given = room.fitting(tiny.policy, wanted, free)
        assert given.slots in (24, 16, 8, 4, 2, 1) and room.taken_bytes(tiny.policy, given) <= room.SHARE * free
    whole, beside = (room.taken_bytes(tiny.policy, replace(CAPACITY, slots=n, pages=p)) for n, p in ((32, 129), (8, 1)))
    assert room.fits_beside(tiny.policy, CAPACITY, 8, whole + beside)
    assert not room.fits_beside(tiny.policy, CAPACITY, 8, whole + beside - 1)


def batch(tiny, capacity, lengths, **fields):
    """A batch with a block of prompts of these lengths, each of which may draw until it has 32 tokens, and the engine whose weights it takes."""
    engine = tiny.start(page=capacity.page)
    asyncio.run(engine.publish(tiny.params, 0))
    slots, rng = SlotBatch(tiny.policy, capacity, set(), **fields), np.random.default_rng(0)
    asked = [
        Request(
            prefixes=[rng.integers(0, 24, n).astype(np.int32)], n=1, settings=SamplingParams(max_tokens=32 - n), seeds=[i],
            max_length=32, conversation=Conversation(id=str(i), length=32, known=0, at_once=4),
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip
    return slots, asked, engine._weights


def stepped(slots, weights, steps):
    """Runs a batch to its end; yields the live sequences' seeds of each chunk, by shard, and how many wait again."""
    while slots.busy:
        while not slots.place(weights.params, 0) and slots.room and slots.preempted:
            slots.prefill_again(weights.params, 0, 512)
        slots.secure(steps)
        yield [[d.request.seeds[0] for d in part if d] for part in np.array_split(slots._drafts, slots.pages._shards)]
        slots.collect(slots.step(weights.served, steps), 0, str)


def test_sequences_are_spread_over_the_shards(make):
    """Eight sequences of four pages fill two shards of sixteen exactly."""
    slots, asked, weights = batch(make(2, fsdp=2), replace(CAPACITY, slots=16, pages=2 * 17), [5] * 8)
    slots.prefill([(request, 0) for request in asked], weights.params, 0)
    chunks = list(stepped(slots, weights, 4))
    assert [len(part) for part in chunks[0]] == [4, 4] and {len(part) for chunk in chunks[:7] for part in chunk} == {4}
    assert len(chunks) == 7, "27 tokens, four at a time: nobody waited"


def test_the_oldest_sequence_goes_on_while_prompts_that_wait_hold_pages(tiny):
    """Eight pages of four entries, of which the first sequence needs all in the end, and the waiting prompts hold one each."""
    slots, asked, weights = batch(tiny, replace(CAPACITY, slots=4, page=4, pages=9), [5] * 4)
    slots.prefill([(request, 0) for request in asked], weights.params, 0)
    chunks = [chunk[0] for chunk in stepped(slots, weights, 4)]
    assert all(chunks) and all(0 in chunk for chunk in chunks[:7]), "the first one is never without its pages"
    assert {seed for chunk in chunks for seed in chunk} == {0, 1, 2, 3}


def test_turns_that_find_no_page_give_theirs_to_the_next(tiny):
    """Four parked turns of seven tokens hold all pages, and each needs another for its prompt of twelve."""
    slots, asked, weights = batch(tiny, replace(CAPACITY, slots=4, pages=5), [12] * 4, keep=True)
    slots.parking = Parking()
    for slot, request in enumerate(asked):
        assert slots.pages.grow([slot], [7])
        held = Parked(conversation=str(slot), tokens=request.prefixes[0][:7], version=0)
        slots.parking.park(slot, held)
    kept, prefilled = slots.resume(dict(enumerate(asked)), weights.params, 4)
    # The first and the third give theirs to the second and the fourth.
    assert (kept, prefilled) == (7 * 2, 5 * 2) and [d.request.seeds for d in slots._again] == [[0], [2]]
    assert slots.pages.free(0) == 0


def test_a_prompts_recorded_experts_are_those_of_its_last_prefill_before_a_token_is_drawn(tiny):
    slots, asked, weights = batch(tiny, CAPACITY, [5, 5])
    drafts = [request.drafts(0)[0] for request in asked]
    drafts[1].extend(np.array([3, 4]), np.zeros(2, np.float32), 0, str)
    for draft in drafts:
        draft.recorded = "of older weights", 0
    slots._again.extend(drafts)
    assert slots.prefill_again(weights.params, 0, 512) == 5 + 7
    slots._block.routes = "of these"
    slots.place(weights.params, 0)
    assert [draft.recorded for draft in drafts] == [("of these", 0), ("of older weights", 0)]


# -- who has which page -----------------------------------------------------------------------------------------------


def test_samples_of_a_prompt_share_its_pages_before_its_last_token():
    """A prompt of 12 tokens in pages of 4: its last token, which is fed once more, is in the third."""
    pages, shared = Pages(8, 32, 4, 65), {}
    written = [pages.seat(slot, 5, 12, shared) for slot in range(8)]
    assert [[part for _, part in one] for one in written] == [[0, 1, 2]] + [[2]] * 7
    assert len({tuple(pages.table[slot, :2]) for slot in range(8)}) == 1
    assert len({int(pages.table[slot, 2]) for slot in range(8)}) == 8 and pages.free(0) == 64 - 2 - 8
    assert [number for one in written for number, _ in one] == [*pages.table[0, :3], *pages.table[1:, 2]]
    for slot in range(8):
        pages.release(slot)
    assert pages.free(0) == 62 and (pages.table == NOBODYS).all(), "the block holds two for samples to come"
    pages.unshare(shared)
    assert pages.free(0) == 64 and shared == {}


@pytest.mark.parametrize("shards", [1, 2])
def test_no_page_has_two_owners_and_none_is_lost(shards):
    """1,000 random steps, after each of which every page is counted from the tables."""
    rng, slots, each, size = np.random.default_rng(shards), 8, 20, 4
    pages, held, shared, block = Pages(slots, 32, size, each * shards, shards), {}, {}, 0
    for _ in range(1000):
        slot = int(rng.integers(slots))
        shard = pages.shard(slot)
        if slot not in held:
            length, live = int(rng.integers(1, 20)), np.isin(np.arange(slots), list(held))
            row = block * 100 + length
            if pages.fits(slot, row, length, shared, live):
                pages.seat(slot, row, length, shared)
                held[slot] = length, (row, shard)
        elif rng.random() < 0.6:
            more, free = held[slot][0] + int(rng.integers(6)), pages.free(shard)
            wanted = min(-(-more // size), 8) - min(-(-held[slot][0] // size), 8)
            assert pages.grow([slot], [more]) == (wanted <= free)
            if wanted <= free:
                held[slot] = min(more, 32), held[slot][1]
        else:
            pages.release(slot)
            del held[slot]
        if rng.random() < 0.05:
            pages.unshare(shared)
            block += 1
        for own in range(shards):
            mine = [s for s in range(slots) if pages.shard(s) == own]
            users = Counter(int(n) for s in mine for n in pages.table[s] if n != NOBODYS)
            kept = {n for (_, at), numbers in shared.items() if at == own for n in numbers}
            assert pages.free(own) == each - 1 - len(set(users) | kept)
            for s in mine:
                count = -(-held[s][0] // size) if s in held else 0
                assert (pages.table[s, :count] != NOBODYS).all() and (pages.table[s, count:] == NOBODYS).all()
            for number, count in users.items():
                rows = {held[s][1] for s in mine if number in pages.table[s]}
                assert count == 1 or len(rows) == 1, "only samples of one prompt share a page"


@pytest.mark.parametrize("platform", ["gpu", "tpu", "cpu"])
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 8}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_only_the_named_pages_are_written(mesh, platform):
    policy, rng, size = built(8 if mesh else 1, **mesh).policy, np.random.default_rng(0), 4
    at, parts = np.array([3, 15, 9, 24, 24], np.int32), np.array([7, 0, 5, 0, 0], np.int32)  # the last are none
    with dispatch.target(Chip(platform, platform)):
        shapes = policy.cache_shapes(16, size, None, 24), policy.cache_shapes(8, 8, None)
        old, new = ({n: rng.normal(size=x.shape).astype(np.float32) for n, x in one.items()} for one in shapes)
        cache, block = (
            {n: jax.device_put(x, one[n].sharding) for n, x in arrays.items()}
            for arrays, one in zip((old, new), shapes)
        )
        none = np.full(2, 16, np.int32)
        found, _ = decode.place(
            cache, np.zeros((16, 0), bool), block, np.zeros((8, 8), np.int32), none, np.zeros(2, np.int32),
            np.stack([at, parts]), policy=policy,
        )  # fmt: skip
        axis = caches.entry_axis()
    for name, entries in old.items():
        for page, part in list(zip(at, parts))[:3]:
            row, begin = part // 2, part % 2 * size
            entries[:, page] = new[name][:, row].take(range(begin, begin + size), axis=axis - 1)
        np.testing.assert_array_equal(np.asarray(found[name]), entries)


def test_pages_that_no_kernel_reads_are_refused(tiny):
    with pytest.raises(ValueError, match=r"EmbeddedSampler.page must be a power of two, or 0 \(got 24\)"):
        EmbeddedSampler(page=24)
    for platform, page, allowed in (("tpu", 64, "0 on TPUs"), ("gpu", 32, "a multiple of 64 on GPUs")):
        with dispatch.target(Chip(platform, platform)), pytest.raises(ValueError, match=allowed):
            tiny.start(page=page)
    ordered = replace(tiny, policy=replace(tiny.policy, bitwise=True))
    with pytest.raises(ValueError, match="0 in the bitwise mode"):
        ordered.start(page=64)
