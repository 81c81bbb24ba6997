"""Several sets of adapters in one batch of the embedded sampler: each row draws what it draws alone with base and adapters added."""

import asyncio
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from adapter_cases import LOW, PLAIN, adapted, gaps, start
from sampler_cases import MAX_LENGTH, VOCABULARY, Letters, Tiny, sample

from jaxrl_llm.experience import Completion, SamplingParams
from jaxrl_llm.models.lora import AdaptedPolicy
from jaxrl_llm.protocols import Conversation
from jaxrl_llm.samplers.embedded import decode, weights
from jaxrl_llm.samplers.embedded.engine import Engine
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.samplers.requests import Request, check

NAMES = ("", "left", "right")


def summed(tiny: Tiny, adapters: Any) -> Any:
    """The base with adapters added to it in float64, by NumPy."""
    params = jax.tree.map(lambda x: x, tiny.params)
    for part in (("attention", "query", "kernel"), ("attention", "key", "kernel"), ("attention", "value", "kernel"), ("attention", "output"),
                 ("mlp", "gate"), ("mlp", "up"), ("mlp", "down")):  # fmt: skip
        place, low = params["layers"], adapters["layers"]
        for key in part[:-1]:
            place, low = place[key], low[key]
        kernel, pair = place[part[-1]], {name: np.asarray(x, np.float64) for name, x in low[part[-1]].items()}
        products = np.stack([np.tensordot(a, b, 1) for a, b in zip(pair["a"], pair["b"])])
        total = np.asarray(kernel, np.float64) + LOW.scale * products
        place[part[-1]] = jax.device_put(total.astype(np.float32), kernel.sharding)
    return params


def sets(tiny: Tiny) -> tuple[AdaptedPolicy, list[Any]]:
    """The policy, and three sets of its adapters: the published, "left" and "right"."""
    policies, found = zip(*(adapted(tiny, seed=seed) for seed in (3, 4, 5)))
    return policies[0], list(found)


async def mixed(engine: Engine, prefixes: list[np.ndarray], settings: SamplingParams) -> list[list[list[Completion]]]:
    """The groups that three calls at once draw, each with adapters of its own."""
    calls = (sample(engine, prefixes, 2, replace(settings, adapter=name)) for name in NAMES)
    return list(await asyncio.gather(*calls))


def alone(policy: AdaptedPolicy, params: Any, prefixes: list[np.ndarray], settings: SamplingParams) -> Any:
    """The groups that a sampler of these parameters, base and adapters in one, draws."""

    async def once() -> list[list[Completion]]:
        engine = EmbeddedSampler().start(policy.plain, Letters(), max_length=MAX_LENGTH)
        await engine.publish(params, 0)
        groups = await sample(engine, prefixes, 2, settings)
        await engine.close()
        return groups

    return asyncio.run(once())


def equal(found: Any, want: Any) -> None:
    for group, expected in zip(found, want, strict=True):
        for one, other in zip(group, expected, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "apart"), [(1.0, False), (0.0, False), (1.0, True)], ids=["drawn", "greedy", "layers apart"]
)
def test_each_row_of_a_batch_draws_what_its_own_adapters_alone_draw(
    tiny: Tiny, prefixes: list[np.ndarray], temperature: float, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts of the three calls are the same, so that a row prefilled with others' adapters would show; the third set is loaded
    before there are weights, and stays beside the second publication."""
    policy, (first, left, right) = sets(tiny)
    settings = replace(PLAIN, temperature=temperature)
    monkeypatch.setattr(weights, "room_apart", lambda *_: apart)

    async def main() -> Any:
        engine = start(policy, loaded=3, slots=32)  # fewer than the 60 sequences
        engine.load("right", jax.tree.map(np.asarray, right))
        await engine.publish(policy.joined(left, tiny.params), 0)
        await engine.publish(policy.joined(first, tiny.params), 1)
        engine.load("left", left)
        found = await mixed(engine, prefixes, settings)
        await engine.close()
        return found

    for adapters, found in zip((first, left, right), asyncio.run(main()), strict=True):
        merged = summed(tiny, adapters)
        equal(found, alone(policy, merged, prefixes, settings))
        if temperature:
            assert np.abs(gaps(tiny, merged, prefixes, found)).max() < 1e-5
            assert all(set(one.versions.tolist()) == {1} for group in found for one in group)


def test_a_mesh_draws_each_rows_tokens_of_one_device(make: Any, tiny: Tiny, prefixes: list[np.ndarray]) -> None:
    model = make(4, fsdp=2, tensor=2)
    policy, adapters = sets(model)

    async def main() -> Any:
        engine = start(policy, loaded=2, share_weights=False)
        await engine.publish(policy.joined(adapters[0], model.params), 0)
        for name, low in zip(NAMES[1:], adapters[1:]):
            engine.load(name, low)
        query = engine._weights.params["layers"]["attention"]["query"]["kernel"]
        assert query.a.addressable_shards[0].data.shape == (2, 8, 9)  # [layers, width over fsdp, sets x rank]
        found = await mixed(engine, prefixes, PLAIN)
        await engine.close()
        return found

    for low, found in zip(adapters, asyncio.run(main()), strict=True):
        merged = summed(tiny, low)
        assert np.abs(gaps(tiny, merged, prefixes, found)).max() < 1e-4


def test_loading_and_unloading_compile_nothing_and_a_place_is_used_again(
    tiny: Tiny, prefixes: list[np.ndarray]
) -> None:
    policy, (first, left, right) = sets(tiny)

    async def main() -> Any:
        engine = start(policy, loaded=2)
        await engine.publish(policy.joined(first, tiny.params), 0)
        engine.load("left", left)
        before = await sample(engine, prefixes, 2, replace(PLAIN, adapter="left"))
        counts = [program._cache_size() for program in (decode.prefill, decode.decode, decode.place)]
        engine.unload("left")
        with pytest.raises(
            ValueError, match=r"no adapters are loaded as 'left' \(SamplingParams.adapter; loaded: none\)"
        ):
            engine.sample(prefixes, 2, replace(PLAIN, adapter="left"), list(range(len(prefixes))))
        engine.load("right", right)
        engine.load("again", left)
        after = await sample(engine, prefixes, 2, replace(PLAIN, adapter="again"))
        other = await sample(engine, prefixes, 2, replace(PLAIN, adapter="right"))
        assert counts == [program._cache_size() for program in (decode.prefill, decode.decode, decode.place)]
        await engine.close()
        return before, after, other

    before, after, other = asyncio.run(main())
    equal(after, before)
    assert np.abs(gaps(tiny, summed(tiny, right), prefixes, other)).max() < 1e-5


def test_adapters_in_use_stay_and_a_kept_slot_is_of_its_own_adapters(tiny: Tiny) -> None:
    """A conversation's second turn continues in its slot with the same adapters, is prefilled anew with others, and with those that
    took the place of the first."""
    policy, (first, left, right) = sets(tiny)
    prompt, talk = np.arange(6, dtype=np.int32), Conversation(id="one", length=MAX_LENGTH, at_once=4)

    async def turn(engine: Engine, told: np.ndarray, adapter: str) -> Completion:
        async for _, group in engine.sample([told], 1, replace(PLAIN, adapter=adapter), [0], talk):
            with pytest.raises(ValueError, match=rf"1 requests for the adapters {adapter!r} are in flight"):
                engine.unload(adapter)
            done = group[0]
        return done

    async def main() -> Any:
        engine, found = start(policy, loaded=1, decode_chunk=2), []
        await engine.publish(policy.joined(first, tiny.params), 0)
        engine.load("left", left)
        done = await turn(engine, prompt, "left")
        told = np.concatenate([prompt, done.tokens, [7]]).astype(np.int32)
        plain = [group async for _, group in engine.sample([told], 1, PLAIN, [0], talk)]
        assert engine.metrics()["sampler/kept_tokens"] == 0, "the slot is of other adapters"
        found.append((first, told, plain[0][0]))
        found.append((left, told, await turn(engine, told, "left")))
        assert engine.metrics()["sampler/kept_tokens"] > 0
        engine.unload("left")
        engine.load("left", right)
        found.append((right, told, await turn(engine, told, "left")))
        assert engine.metrics()["sampler/kept_tokens"] == 0, "the slot is of the adapters before"
        await engine.close()
        return found

    for adapters, told, one in asyncio.run(main()):
        assert np.abs(gaps(tiny, summed(tiny, adapters), [told], [[one]])).max() < 1e-5


def test_what_cannot_be_loaded_is_refused_and_says_why(tiny: Tiny) -> None:
    policy, (_, left, right) = sets(tiny)
    engine = start(policy, loaded=1)
    with pytest.raises(ValueError, match=r"need a name that none has \(got ''"):
        engine.load("", left)
    bad = jax.tree.map(np.array, left)
    bad["layers"]["mlp"]["up"]["b"][0, 0, 0] = np.inf
    with pytest.raises(ValueError, match="'bad' hold values that are not finite"):
        engine.load("bad", bad)
    wide = AdaptedPolicy(
        policy.architecture, policy.partitioner, policy.compute_dtype, policy.remat, replace(LOW, rank=4)
    )
    with pytest.raises(
        ValueError, match=r"of 'wide' is \(2, .*, 4\), the policy's is \(2, .*, 3\): .* the same lora.LoRA.rank \(3\)"
    ):
        engine.load("wide", wide.init(jax.random.key(0)))
    with pytest.raises(
        ValueError, match=r"'few' are not those of the policy's linear maps q_proj, .* the same lora.LoRA.targets"
    ):
        engine.load("few", {"layers": {"mlp": left["layers"]["mlp"]}})
    engine.load("left", left)
    with pytest.raises(ValueError, match=r"need a name that none has \(got 'left'; loaded: left\)"):
        engine.load("left", right)
    with pytest.raises(ValueError, match="all 1 places are taken by left: unload"):
        engine.load("right", right)
    with pytest.raises(ValueError, match=r"no adapters are loaded as 'right' .*loaded: left"):
        engine.unload("right")
    for none in (start(policy), EmbeddedSampler().start(policy.plain, Letters(), max_length=MAX_LENGTH)):
        with pytest.raises(ValueError, match=r"no room for further adapters: set embedded.EmbeddedSampler.loaded"):
            none.load("left", left)
    with pytest.raises(ValueError, match=r"loaded must be 0 without embedded.EmbeddedSampler.adapters"):
        EmbeddedSampler(loaded=1)


def test_a_sampler_without_loaded_adapters_refuses_a_name_and_training_does_too() -> None:
    settings = replace(PLAIN, adapter="left")
    request = Request(prefixes=[np.arange(3)], n=1, settings=settings, seeds=[0], max_length=MAX_LENGTH)
    with pytest.raises(
        ValueError, match=r"embedded.EmbeddedSampler.loaded has room for, .* \(got 'left'\): set it to ''"
    ):
        check(request, VOCABULARY, None)
    assert PLAIN.plain and not settings.plain and settings.greedy().adapter == "left"
