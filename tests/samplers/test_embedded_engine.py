"""The embedded sampler's engine: concurrent calls, publication, compilation, and what it refuses."""

import asyncio
import logging
from dataclasses import replace

import jax
import numpy as np
import pytest
from sampler_cases import VOCABULARY, Letters, sample

from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.samplers.embedded import slots, weights
from jaxrl_llm.samplers.embedded.engine import Engine
from jaxrl_llm.samplers.embedded.room import bucket
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler, served

SETTINGS = SamplingParams(max_tokens=11, stop_token_ids=(3, 17, 8))
GREEDY = replace(SETTINGS, temperature=0)


def serving(tiny, run, **fields):
    """Runs `await run(engine)` with a sampler that serves the policy as version 0."""

    async def main():
        engine = tiny.start(**fields)
        await engine.publish(tiny.params, 0)
        result = await run(engine)
        await engine.close()
        return result

    return asyncio.run(main())


def tokens(groups):
    return [[completion.tokens.tolist() for completion in group] for group in groups]


def test_concurrent_calls_with_other_settings_draw_what_they_draw_alone(tiny, prefixes, draw):
    calls = [(prefixes, 3, SETTINGS), (prefixes[:9], 1, GREEDY), (prefixes[5:], 2, replace(SETTINGS, temperature=0.5))]

    async def together(engine):
        return await asyncio.gather(*(sample(engine, *call) for call in calls))

    expected = [tokens(draw(tiny, *call)) for call in calls]
    assert [tokens(groups) for groups in serving(tiny, together)] == expected
    assert [tokens(groups) for groups in serving(tiny, together, slots=4, decode_chunk=4)] == expected


def test_a_call_that_the_running_batch_cannot_hold_waits_and_is_served(tiny, prefixes, draw):
    penalised = replace(SETTINGS, repetition_penalty=1.5)

    async def one_after_the_other(engine):
        first = asyncio.create_task(sample(engine, prefixes, 3, SETTINGS))
        while engine.metrics()["sampler/generated_tokens"] == 0:
            await asyncio.sleep(0)
        second = await sample(engine, prefixes, 3, penalised)
        assert first.done()
        return await first, second

    first, second = serving(tiny, one_after_the_other, decode_chunk=4)
    assert tokens(first) == tokens(draw(tiny, prefixes, 3, SETTINGS))
    assert tokens(second) == tokens(draw(tiny, prefixes, 3, penalised, decode_chunk=4))


def test_every_token_carries_the_version_that_drew_it(make, tiny, prefixes):
    settings = SamplingParams(max_tokens=11)

    async def publish_in_between(engine):
        plain = await sample(engine, prefixes, 3, settings)
        running = asyncio.create_task(sample(engine, prefixes, 3, settings))
        engine.metrics()
        while engine.metrics()["sampler/generated_tokens"] == 0:
            await asyncio.sleep(0)
        await engine.publish(make(seed=1).params, 5)
        assert engine.version == 5
        return plain, await running

    plain, mixed = serving(tiny, publish_in_between, decode_chunk=2)
    changed = 0
    for before, after in zip((c for g in plain for c in g), (c for g in mixed for c in g)):
        assert before.versions.tolist() == [0] * 11
        switch = int(np.sum(after.versions == 0))
        assert switch in (2, 4, 6, 8) and after.versions.tolist() == [0] * switch + [5] * (11 - switch)
        assert after.tokens[:switch].tolist() == before.tokens[:switch].tolist()
        changed += after.tokens.tolist() != before.tokens.tolist()
    assert changed > 20


def test_prompts_that_wait_are_prefilled_anew_for_new_weights(make, tiny, prefixes, draw):
    other = make(seed=1)

    async def publish_in_between(engine):
        running = asyncio.create_task(sample(engine, prefixes, 3, SETTINGS))
        while engine.metrics()["sampler/generated_tokens"] == 0:
            await asyncio.sleep(0)
        await engine.publish(other.params, 1)
        return await running

    groups = serving(tiny, publish_in_between, slots=4, decode_chunk=4)
    expected = draw(other, prefixes, 3, SETTINGS)
    late = [
        (completion, whole)
        for group, expected_group in zip(groups, expected)
        for completion, whole in zip(group, expected_group)
        if completion.versions[0] == 1
    ]
    assert len(late) > 10
    for completion, whole in late:
        assert completion.tokens.tolist() == whole.tokens.tolist()


def test_a_second_call_and_other_values_compile_nothing(tiny, prefixes, caplog):
    """Counted by JAX's own log; the chunk of 7 steps is this test's alone, so the first call does compile."""

    def compiled():
        names = [record.getMessage() for record in caplog.records if "Finished XLA compilation" in record.getMessage()]
        caplog.clear()
        return names

    async def calls(engine):
        await sample(engine, prefixes, 3, SETTINGS)
        assert any("decode" in name for name in compiled())
        programs = engine.compilations
        others = [
            SETTINGS,
            GREEDY,
            SamplingParams(max_tokens=9, temperature=0.3, min_tokens=2),
            replace(SETTINGS, stop_token_ids=(1,)),
        ]
        for settings in others:
            await sample(engine, prefixes, 3, settings)
            await sample(engine, prefixes[::-1], 3, settings)
        assert (compiled(), engine.compilations) == ([], programs)
        await sample(engine, prefixes, 3, replace(SETTINGS, top_p=0.9))
        assert any("decode" in name for name in compiled())
        assert engine.compilations == programs + 1  # the program with the sort
        for settings in (replace(SETTINGS, top_p=0.5, temperature=0.8), replace(SETTINGS, top_k=3, min_p=0.1)):
            await sample(engine, prefixes, 3, settings)
        assert (compiled(), engine.compilations) == ([], programs + 1)

    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        serving(tiny, calls, decode_chunk=7)


def test_a_listener_that_leaves_frees_its_slots(tiny, prefixes, draw):
    async def leave(engine):
        stream = engine.sample(prefixes, 3, SamplingParams(max_tokens=11), list(range(10)))
        async for _ in stream:
            break
        await stream.aclose()
        engine.metrics()
        groups = await sample(engine, prefixes, 3, SETTINGS)
        return groups, engine.metrics()

    groups, metrics = serving(tiny, leave, slots=4, decode_chunk=4)
    assert tokens(groups) == tokens(draw(tiny, prefixes, 3, SETTINGS))
    kept = sum(len(completion.tokens) for group in groups for completion in group)
    assert kept <= metrics["sampler/generated_tokens"] <= kept + 4 * 11  # at most what ran when the listener left


def test_closing_ends_what_is_running_with_an_error(tiny, prefixes):
    async def close(engine):
        running = asyncio.create_task(sample(engine, prefixes, 3, SETTINGS))
        while engine.metrics()["sampler/generated_tokens"] == 0:
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await running
        with pytest.raises(RuntimeError, match="closed"):
            engine.sample(prefixes, 1, SETTINGS, list(range(10)))

    serving(tiny, close, slots=4, decode_chunk=4)


def test_shared_weights_are_the_learners_own_arrays_and_others_are_copies(tiny):
    embedding, scale = tiny.params["embedding"], tiny.params["norm"]["scale"]
    shared = served(tiny.policy, tiny.params, share=True, gather=False)
    assert shared["embedding"] is embedding and shared["norm"]["scale"] is scale
    copied = served(tiny.policy, tiny.params, share=False, gather=False)
    assert copied["embedding"].unsafe_buffer_pointer() != embedding.unsafe_buffer_pointer()
    assert np.array_equal(copied["embedding"], embedding)


def test_weights_are_cast_to_the_compute_dtype_but_for_norm_scales(make):
    half = make(compute_dtype="bfloat16")
    cast = served(half.policy, half.params, share=True, gather=False)
    assert cast["embedding"].dtype == "bfloat16" and cast["norm"]["scale"].dtype == "float32"
    assert np.array_equal(cast["embedding"], np.asarray(half.params["embedding"]).astype("bfloat16"))


@pytest.mark.parametrize(
    "fields",
    [{"compute_dtype": "bfloat16"}, {"share_weights": False}],
    ids=["cast", "copied"],
)
def test_a_publication_never_holds_two_served_copies(make, fields, monkeypatch):
    policy = {"compute_dtype": fields["compute_dtype"]} if "compute_dtype" in fields else {}
    first, second = (make(seed=seed, **policy) for seed in (3, 4))
    held = lambda: sum(x.nbytes for x in jax.live_arrays())  # noqa: E731
    most = []

    async def main():
        engine = first.start(**({} if policy else fields))
        before = held()
        await engine.publish(first.params, 0)
        copy = held() - before
        array = type(first.params["embedding"])
        for name in ("astype", "copy"):  # what makes a leaf: memory is most after one of them
            monkeypatch.setattr(array, name, counted(getattr(array, name)))
        await engine.publish(second.params, 1)
        assert held() - before == copy
        return before, copy

    def counted(function):
        def run(*given, **options):
            made = function(*given, **options)
            most.append(held())
            return made

        return run

    before, copy = asyncio.run(main())
    numbers = sum(x.size for x in jax.tree.leaves(first.params))
    # Nearly two bytes a parameter where it is cast (the norms' scales are the learner's own), and four where it is copied.
    assert (1.8 if policy else 4.0) * numbers <= copy <= (2.0 if policy else 4.0) * numbers
    assert len(most) > 5 and max(most) - before <= copy


def test_a_chunk_that_runs_when_its_weights_are_replaced_ends_with_them(make, prefixes):
    """The old weights are deleted under a running chunk; its tokens are those that they draw."""
    old, new = make(seed=1, compute_dtype="bfloat16"), make(seed=2, compute_dtype="bfloat16")

    async def replaced(engine):
        alone = await sample(engine, prefixes, 3, SETTINGS)
        running = asyncio.create_task(sample(engine, prefixes, 3, SETTINGS))
        while engine.metrics()["sampler/generated_tokens"] == 0:
            await asyncio.sleep(0)
        await engine.publish(new.params, 1)
        return alone, await running

    alone, mixed = serving(old, replaced, decode_chunk=4)
    for before, after in zip((c for g in alone for c in g), (c for g in mixed for c in g)):
        drawn = int(np.sum(after.versions == 0))
        assert after.tokens[:drawn].tolist() == before.tokens[:drawn].tolist()
    assert any((c.versions == 1).any() for g in mixed for c in g)


@pytest.mark.parametrize("share", [True, False])
def test_weights_that_the_learner_donated_are_refused_unless_copied(make, prefixes, share):
    own = make(seed=2)

    async def donate(engine):
        jax.tree.map(lambda x: x.delete(), own.params)
        return await sample(engine, prefixes, 3, SETTINGS)

    if share:
        with pytest.raises(RuntimeError, match=r"embedded\.EmbeddedSampler\.share_weights"):
            serving(own, donate)
    else:
        assert len(serving(own, donate, share_weights=False)) == 10


def test_publishing_another_models_parameters_is_refused(tiny):
    other = {**tiny.params, "embedding": tiny.params["embedding"][:5]}

    async def publish(engine):
        with pytest.raises(ValueError, match=r"embedding.*\(5, 16\).*\(24, 16\)"):
            await engine.publish(other, 1)
        assert engine.version == 0

    serving(tiny, publish)


@pytest.mark.parametrize(
    "prefix, n, seeds, fields, message",
    [
        (np.zeros(32, np.int32), 1, [0], {}, r"prefix 0 must be 1 to 31 token ids.*\(32,\).*max_length"),
        (np.zeros(0, np.int32), 1, [0], {}, r"prefix 0 must be 1 to 31 token ids.*\(0,\)"),
        (np.array([1.5]), 1, [0], {}, "float64"),
        (np.array([0, VOCABULARY]), 1, [0], {}, r"0\.\.24, the policy knows 0\.\.23"),
        (np.array([-1, 2]), 1, [0], {}, r"-1\.\.2"),
        (np.array([1]), 0, [0], {}, r"n must be >= 1.*got 0"),
        (np.array([1]), 1, [0, 1], {}, "one seed.*2 for 1"),
        (np.array([1]), 1, [-1], {}, "one seed"),
        (np.array([1]), 1, [0], {"stop_strings": ("",)}, "stop_strings"),
    ],
)
def test_bad_requests_are_refused_at_once(tiny, prefix, n, seeds, fields, message):
    async def ask(engine):
        with pytest.raises(ValueError, match=message):
            engine.sample([prefix], n, SamplingParams(max_tokens=2, **fields), seeds)

    serving(tiny, ask)


def test_sampling_before_the_first_publication_is_refused(tiny, prefixes):
    engine = tiny.start()
    assert engine.version == -1
    with pytest.raises(RuntimeError, match=r"publish\(\) first"):
        engine.sample(prefixes, 1, SETTINGS, list(range(10)))


def test_bad_fields_name_their_binding(tiny):
    for name in ("slots", "decode_chunk", "prefill_tokens"):
        with pytest.raises(ValueError, match=rf"embedded\.EmbeddedSampler\.{name}.*got 0"):
            EmbeddedSampler(**{name: 0})
    for length in (1, 40000):
        with pytest.raises(ValueError, match=rf"max_length must be 2\.\.32768.*got {length}"):
            EmbeddedSampler().start(tiny.policy, Letters(), max_length=length)


def test_buckets_are_the_smallest_that_hold():
    assert [bucket(size) for size in (1, 2, 3, 4, 5, 512, 513)] == [1, 2, 4, 4, 8, 512, 1024]
    assert [bucket(size, 6) for size in (1, 6, 7, 13)] == [6, 6, 12, 24]


def test_a_chunk_is_started_before_the_host_has_seen_the_one_before(tiny, prefixes, monkeypatch, draw):
    """Where nothing waits and the host ends no sequence itself; what is drawn stays the same."""
    begun, seen, most = [], [], []
    step, collect = slots.SlotBatch.step, slots.SlotBatch.collect

    def started(batch, served, steps, after=None):
        begun.append(after is not None)
        most.append(len(begun) - len(seen))
        return step(batch, served, steps, after)

    def collected(*arguments):
        seen.append(1)
        return collect(*arguments)

    monkeypatch.setattr(slots.SlotBatch, "step", started)
    monkeypatch.setattr(slots.SlotBatch, "collect", collected)
    settings = replace(SETTINGS, max_tokens=11)
    ahead = serving(tiny, lambda engine: sample(engine, prefixes, 3, settings), decode_chunk=2, slots=32)
    assert begun == [False, *[True] * 5] and max(most) == 2 and len(seen) == 6
    begun.clear(), seen.clear(), most.clear()
    few = serving(tiny, lambda engine: sample(engine, prefixes, 3, settings), decode_chunk=2, slots=16)
    assert begun.count(False) > 6, "a refill waits for what the host has seen"
    monkeypatch.setattr(Engine, "_settled", lambda *_: False)
    begun.clear(), seen.clear(), most.clear()
    waited = serving(tiny, lambda engine: sample(engine, prefixes, 3, settings), decode_chunk=2, slots=32)
    assert not any(begun) and max(most) == 1
    assert tokens(ahead) == tokens(waited) == tokens(few)


def test_layers_served_apart_draw_what_stacked_ones_do(make, prefixes, monkeypatch):
    """Over two publications, whose arrays are the sampler's own and go with it; the learner's stay."""
    tiny, other = make(seed=2), make(seed=3)

    async def twice(engine):
        first = await sample(engine, prefixes, 3, SETTINGS)
        held = jax.tree.leaves(engine._weights.apart)
        await engine.publish(other.params, 1)
        second = await sample(engine, prefixes, 3, SETTINGS)
        assert all(x.is_deleted() for x in held)
        return tokens(first), tokens(second)

    stacked = serving(tiny, twice)
    monkeypatch.setattr(weights, "room_apart", lambda *_: True)
    assert serving(tiny, twice) == stacked
    assert not any(x.is_deleted() for x in jax.tree.leaves((tiny.params, other.params)))
