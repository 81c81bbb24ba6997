"""grouped_matmul on TPUs: right in interpret mode, lowered for TPU, chosen on TPUs alone; not run on TPU hardware."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_matmul_float64 import grouped, wide
from jax.experimental.pallas import tpu as pltpu

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.grouped_matmul import api, tpu


def call_of(rows, experts, width, inner):
    call = api.call_of(jnp.zeros((1, width), jnp.bfloat16), rows, experts, inner, gated=False)
    return replace(call, platform="tpu")


@pytest.mark.parametrize(("width", "inner"), [(128, 384), (768, 256)])
@pytest.mark.parametrize("sizes", [[130, 0, 20], pytest.param([0, 60, 0], marks=pytest.mark.slow)])
def test_products_and_gradients_are_right_in_interpret_mode(sizes, width, inner):
    # 768 is no multiple of the largest tile: megablox leaves out or repeats a part of it unless a tile divides it.
    rng, rows, used = np.random.default_rng(0), 160, sum(sizes)
    x, dy = (jnp.asarray(rng.normal(size=(rows, n)), jnp.bfloat16).at[used:].set(jnp.nan) for n in (width, inner))
    w = jnp.asarray(rng.normal(size=(3, width, inner)), jnp.bfloat16)
    with pltpu.force_tpu_interpret_mode():
        function = lambda x, w: api._multiply(tpu, call_of(rows, 3, width, inner), x, w, jnp.array(sizes))  # noqa: E731
        y, back = jax.vjp(function, x, w)
        got = jax.block_until_ready((y, *back(dy)))
    for found, want in zip(got, grouped(x[:used], w, sizes, dy[:used])):
        rest = found[used:] if found.ndim == 2 else found[np.array(sizes) == 0]
        assert not np.asarray(rest).any()
        ulp = 2.0 ** (np.floor(np.log2(np.abs(want).max(axis=-1, keepdims=True).clip(1e-30))) - 7)
        assert (np.abs(wide(found[:used] if found.ndim == 2 else found) - want) <= ulp).all()


def test_both_passes_lower_for_tpu_at_the_shape_of_a_large_model():
    shapes = [(262144, 2048), (128, 2048, 1536)]
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)

    def total(x, w, sizes):
        return api._multiply(tpu, call_of(262144, 128, 2048, 1536), x, w, sizes).astype(jnp.float32).sum()

    both = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
    traced = both.trace(x, w, jax.ShapeDtypeStruct((128,), jnp.int32))
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 3


def test_tpus_take_bfloat16_of_whole_lanes_and_nothing_else():
    call = call_of(64, 8, 2048, 768)
    assert tpu.refusal(call) is None
    assert "it takes bfloat16 (got float32)" in tpu.refusal(replace(call, dtype="float32"))
    assert "multiples of 128 (got 2048 and 96)" in tpu.refusal(replace(call, inner=96))
    assert "it runs on TPUs (got gpu)" in dispatch.refusal("grouped_matmul", "tpu", replace(call, platform="gpu"))
