"""Weights of 8 bits in the embedded sampler: the products that they stand for, and samples whose log-probs are of the policy that they make."""

import asyncio
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import GRPO_CASE, PACKING
from sampler_cases import Tiny, sample

from jaxrl_llm.data.sorting import Sorting
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.models.linear import Quantized, linear
from jaxrl_llm.rewards.wrap import Wrap
from jaxrl_llm.samplers.embedded import narrow, weights
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.tools import memory
from jaxrl_llm.train.stage import Stage

FP8 = "float8_e4m3fn"


def rounded(w: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float64 [*in, *out]: w / scale on the grid of 3 bits after the first, to even as IEEE 754 rounds, times the scale."""
    x = (w / scale).astype(np.float64)
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-20))), -6) - 3)  # subnormal below 2^-6
    return np.round(x / step) * step * scale.astype(np.float64)


def test_the_product_with_8_bits_is_that_of_the_dequantized_weights() -> None:
    rng = np.random.default_rng(0)
    for inputs, shape in ((1, (40, 3, 8)), (2, (5, 8, 24))):
        w = (rng.normal(size=shape) * rng.lognormal(sigma=3, size=shape[inputs:])).astype(np.float32)
        w[..., 0] = 0.0  # a channel of zeros, whose scale means nothing
        one = jax.sharding.Mesh(np.array(jax.devices()[:1]), "d")
        sharding = jax.NamedSharding(one, jax.P(*(None,) * (w.ndim + 1)))
        found = narrow.quantized(jnp.asarray(w)[None], inputs, FP8, sharding)
        found = jax.tree.map(lambda leaf: leaf[0], found)
        assert found.values.dtype == FP8 and found.scale.shape == w.shape[inputs:]
        scale = np.asarray(found.scale)
        most = np.abs(w).max(axis=tuple(range(inputs)))
        np.testing.assert_allclose(scale, np.where(most > 0, most / 448, 1), rtol=2.0**-22)
        got = np.asarray(found.values, np.float64) * scale.astype(np.float64)
        np.testing.assert_array_equal(got, rounded(w, scale))
        # Half a step of 2^-3 of the power of two below, and of the smallest one below that.
        assert (np.abs(got - w) <= np.abs(w) * 2.0**-4 + scale * 2.0**-10).all()
        x = rng.normal(size=(2, 3, *shape[:inputs])).astype(np.float32)
        product = np.tensordot(x.astype(np.float64), got, inputs)
        # A float32 sum of n products is within n u sum |x w| of the true one, and the scale's product within another u.
        bound = (40 + 2) * 2.0**-24 * np.tensordot(np.abs(x).astype(np.float64), np.abs(got), inputs)
        assert (np.abs(np.asarray(linear(jnp.asarray(x), found, inputs)) - product) <= bound + 1e-30).all()


def dequantized(params: Any) -> Any:
    """A learner's tree in float32 with the weights that the sampler multiplies by."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, Quantized):
            return x
        inputs = x.values.ndim - x.scale.ndim
        return x.values.astype(jnp.float32) * jnp.expand_dims(x.scale, tuple(range(1, 1 + inputs)))

    return jax.tree.map(leaf, params, is_leaf=lambda x: isinstance(x, Quantized))


@pytest.mark.parametrize("mesh", [{}, {"devices": 6, "fsdp": 3, "tensor": 2}], ids=["one", "fsdp3 tensor2"])
def test_samples_are_of_the_policy_that_the_8_bits_make(make, mesh: dict[str, int]) -> None:
    """Of three devices, which do not divide the width of 16, the matrices rest filled up, and so do the values."""
    tiny = make()
    there = make(**mesh).policy
    params = jax.tree.map(
        lambda x, like: jax.device_put(
            np.pad(np.asarray(x), [(0, b - a) for a, b in zip(x.shape, like.shape)]), like.sharding
        ),
        tiny.params,
        there.abstract(),
    )
    held = weights.served(tiny.policy, tiny.params, share=True, gather=False, weights=FP8)
    assert sum(isinstance(x, Quantized) for x in jax.tree.leaves(held, is_leaf=narrow_leaf)) == 7
    prefixes, settings = [np.array([3, 1, 4], np.int32)], SamplingParams(max_tokens=6, temperature=1.0)

    async def run() -> Any:
        engine = EmbeddedSampler(weights=FP8, slots=8).start(there, None, max_length=16)
        await engine.publish(params, 0)
        found = await sample(engine, prefixes, 4, settings)
        await engine.close()
        return found

    exact = Tiny(policy=tiny.policy, params=dequantized(held))
    plain, apart = Tiny(policy=tiny.policy, params=tiny.params), 0.0
    for completion in asyncio.run(run())[0]:
        whole = np.concatenate([prefixes[0], completion.tokens])
        for one in (exact, plain):
            logits = one.logits([whole])[0, len(prefixes[0]) - 1 : len(whole) - 1]
            log = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            found = log[np.arange(len(completion.tokens)), completion.tokens]
            if one is exact:
                np.testing.assert_allclose(completion.logprobs, found, atol=2e-5)
            else:
                apart = max(apart, float(np.abs(completion.logprobs - found).max()))
    assert apart > 1e-3, "the gap to the learner's own weights is there to be measured"


def narrow_leaf(x: Any) -> bool:
    return isinstance(x, Quantized)


def test_memory_counts_the_bytes_that_are_held(make) -> None:
    policy = replace(make().policy, compute_dtype="bfloat16")
    fields = {"data": Sorting(size=8), "steps": 1, "packing": PACKING, "prompts_per_step": 4, "group_size": 4}
    stage = Stage(
        name="s", algorithm=GRPO_CASE, reward=Wrap(function=len), max_prompt_tokens=8, optimizer=Optimizer(),
        settings=SamplingParams(max_tokens=16), **fields,
    )  # fmt: skip
    held = weights.served(policy, make().params, share=True, gather=False, weights=FP8)
    whole = sum(x.nbytes for x in jax.tree.leaves(held))
    found = memory.copy(policy, EmbeddedSampler(slots=8, weights=FP8), stage)
    assert found == whole < memory.copy(policy, EmbeddedSampler(slots=8), stage)
    resting = replace(stage, optimizer=Optimizer(weights="stochastic"))
    quantized = [x for x in jax.tree.leaves(held, is_leaf=narrow_leaf) if narrow_leaf(x)]
    alone = sum(x.values.nbytes + x.scale.nbytes for x in quantized)
    assert memory.copy(policy, EmbeddedSampler(slots=8, weights=FP8), resting) == alone
    account = memory.of_sampling(policy, EmbeddedSampler(slots=8, weights=FP8), stage, 24)[1]
    assert account.arguments < memory.of_sampling(policy, EmbeddedSampler(slots=8), stage, 24)[1].arguments


def test_what_does_not_go_with_8_bits_is_refused(make) -> None:
    with pytest.raises(ValueError, match="weights"):
        EmbeddedSampler(weights="int8")
    with pytest.raises(ValueError, match=r"weights.*adapters"):
        EmbeddedSampler(weights=FP8, adapters=True)
    bitwise = replace(make().policy, bitwise=True)
    with pytest.raises(ValueError, match=r"EmbeddedSampler\.weights = 'float8_e4m3fn'"):
        EmbeddedSampler(weights=FP8).start(bitwise, None, max_length=16)
