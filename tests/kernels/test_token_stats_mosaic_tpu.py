"""The TPU kernels of token_stats: right in interpret mode, lowered for TPU, chosen on TPUs alone; not run on TPU hardware."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from token_stats_float64 import statistics

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.token_stats import fused, mosaic_tpu
from jaxrl_llm.kernels.token_stats.api import BACKENDS, call_of, token_stats
from jaxrl_llm.kernels.token_stats.fused import OUTPUTS
from jaxrl_llm.kernels.token_stats.mosaic_tpu import Kernels, Tiles

WORDS = jnp.zeros(2, jnp.uint32)


@pytest.mark.parametrize("padded", [False, True])
def test_values_and_gradients_are_right_in_interpret_mode(padded, monkeypatch):
    # Blocks of tokens and of the vocabulary that do not divide, buffers of two blocks (each of two chunks) and a rest of one;
    # with the padding also shares of 104 tokens, of which the second begins at 96.
    if padded:
        monkeypatch.setattr(fused, "SHARE", fused.Share(tokens=104, elements=2**20, unit=8))
    monkeypatch.setattr(mosaic_tpu, "CHUNK", 128)
    monkeypatch.setattr(mosaic_tpu, "GRADIENT_CHUNK", 128)
    tokens, width, vocabulary = 200, 96, 600
    tiles = Tiles(rows=128, columns=256, buffer=2 * tokens * 2 * 256)
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16)
    head = jnp.asarray(rng.normal(size=(vocabulary + padded, width)) * 2 * width**-0.5, jnp.bfloat16)
    bias = np.append(np.zeros(vocabulary, np.float32), -np.inf) if padded else None
    targets = rng.integers(0, vocabulary, tokens).astype(np.int32)
    targets[:5] = -1, 0, 127, 128, vocabulary - 1
    g = {name: rng.normal(size=tokens).astype(np.float32) for name in OUTPUTS}
    call = replace(call_of(hidden, head, outputs=OUTPUTS, temperature=0.7), shards=2 if padded else 1)

    def total(hidden, head):
        arrays = (hidden, head, jnp.asarray(targets))
        kernels = Kernels(tiles=tiles, interpret=True)
        out = fused.compute(kernels, arrays, None if bias is None else jnp.asarray(bias), WORDS, call, None)
        return sum((out[name] * g[name]).sum() for name in OUTPUTS), out

    (_, out), gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(hidden, head)
    want, derived = statistics(
        hidden, head, targets, bias=bias, outputs=OUTPUTS, noise=np.zeros((tokens, 1)), cotangents=g, temperature=0.7
    )
    for name in OUTPUTS:
        np.testing.assert_allclose(out[name], want[name], atol=1e-5, rtol=1e-5, err_msg=name)
    for got, right in zip(gradients, derived):
        assert np.linalg.norm(np.asarray(got, np.float64) - right) < 4e-3 * np.linalg.norm(right)


def test_large_logits_stay_finite_and_exact():
    hidden, head = jnp.full((16, 128), 8.0, jnp.bfloat16), jnp.zeros((130, 128), jnp.bfloat16)
    head = head.at[3].set(9.75).at[129].set(-9.75)  # logits 9984, 0 and -9984
    call = call_of(hidden, head)
    arrays = (hidden, head, jnp.array([3, 129, 0] + [3] * 13))
    kernels = Kernels(tiles=Tiles(rows=128, columns=128), interpret=True)
    out = fused.compute(kernels, arrays, None, WORDS, call, None)
    np.testing.assert_array_equal(out["logprob"][:3], [0.0, -19968.0, -9984.0])
    np.testing.assert_array_equal(out["entropy"], np.zeros(16))


def grids(jaxpr):
    """(grid, how its axes are run) of each kernel of a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params["grid_mapping"].grid, equation.params["compiler_params"].dimension_semantics
        for inner in jax.core.jaxprs_in_params(equation.params):
            yield from grids(inner)


def test_bits_are_those_of_one_order_of_sums_however_often_and_beside_whom_a_token_is_computed():
    tokens, width, vocabulary = 384, 128, 900
    rng = np.random.default_rng(3)
    hidden = jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16)
    head = jnp.asarray(rng.normal(size=(vocabulary, width)) * 0.2, jnp.bfloat16)
    targets = jnp.asarray(rng.integers(0, vocabulary, tokens))
    call = call_of(hidden, head, outputs=("logprob", "entropy"))
    kernels = Kernels(tiles=Tiles(rows=128, columns=256), interpret=True)

    def total(hidden, head, targets):
        out = fused.compute(kernels, (hidden, head, targets), None, WORDS, call, None)
        return sum(x.sum() for x in out.values()), out

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, out), (dhidden, dhead) = run(hidden, head, targets)
    (_, again), slopes = run(hidden, head, targets)
    for name in out:
        np.testing.assert_array_equal(out[name], again[name])
    for x, y in zip((dhidden, dhead), slopes):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
    # Blocks of tokens run in any order; a token's sums go over the vocabulary in one order alone.
    turned = np.roll(np.arange(tokens), 128)
    (_, other), (slope, _) = run(hidden[turned], head, targets[turned])
    for name in out:
        np.testing.assert_array_equal(out[name][turned], other[name])
    np.testing.assert_array_equal(np.asarray(dhidden, np.float32)[turned], np.asarray(slope, np.float32))
    found = list(grids(jax.make_jaxpr(jax.grad(lambda *a: total(*a)[0], (0, 1)))(hidden, head, targets).jaxpr))
    assert len(found) >= 2
    assert all(how == ("parallel", "arbitrary") and grid[0] == tokens // 128 for grid, how in found)


@pytest.mark.parametrize(
    ("tokens", "width", "vocabulary"), [(8191, 1024, 151669), pytest.param(16384, 3584, 151936, marks=pytest.mark.slow)]
)
def test_both_passes_lower_for_tpu_without_whole_logits(tokens, width, vocabulary):
    hidden, head = (jax.ShapeDtypeStruct((n, width), jnp.bfloat16) for n in (tokens, vocabulary))
    call = call_of(jnp.zeros((1, width), jnp.bfloat16), jnp.zeros((1, width), jnp.bfloat16), outputs=OUTPUTS)
    call = replace(call, platform="tpu", tokens=tokens, vocabulary=vocabulary)

    tiles = Tiles.of("TPU v6 lite", tokens, width)

    def total(hidden, head, targets):
        out = fused.compute(Kernels(tiles=tiles), (hidden, head, targets), None, WORDS, call, None)
        return sum(x.sum() for x in out.values())

    traced = jax.jit(jax.grad(total, argnums=(0, 1))).trace(hidden, head, jax.ShapeDtypeStruct((tokens,), jnp.int32))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    # The forward's kernel and the backward's, for whole buffers and for the rest.
    assert text.count("@tpu_custom_call") == 3
    assert f"x{vocabulary}x" not in text.replace(f"<{vocabulary}x", "<")


def test_tpus_take_bfloat16_and_every_other_device_and_call_is_refused():
    call = replace(call_of(jnp.zeros((4, 128), jnp.bfloat16), jnp.zeros((1000, 128), jnp.bfloat16)), platform="tpu")
    assert dispatch.choose("token_stats", BACKENDS, call, None) is mosaic_tpu
    refused = {
        "float32": {"dtype": "float32"},
        "soft_cap": {"soft_cap": 30.0},
        "bias": {"biased": True},
        "chunk": {"chunk": 512},
        "noise_logprob": {"outputs": ("noise_logprob",)},
        "no block of width": {"width": 2**18},
        "gpu": {"platform": "gpu"},
    }
    for reason, change in refused.items():
        assert reason in dispatch.refusal("token_stats", "mosaic_tpu", replace(call, **change))
    with pytest.raises(ValueError, match=r"mosaic_tpu: it runs on TPUs \(got cpu\)"):
        token_stats(jnp.ones((2, 64)), jnp.ones((300, 64)), jnp.zeros(2, jnp.int32), backend="mosaic_tpu")


def test_blocks_that_cannot_be_laid_out_are_refused():
    with pytest.raises(ValueError, match="multiples of 128"):
        Tiles(rows=64)
    with pytest.raises(ValueError, match="multiples of 128"):
        Tiles(columns=192)


@pytest.mark.parametrize("width", [896, 1536, 2048, 2100, 3584, 5120, 8192])
@pytest.mark.parametrize(
    ("kind", "mib", "most"), [("TPU v6 lite", 128, 1024), ("TPU v5p", 64, 512), ("TPU v4", 16, 512)]
)
def test_each_chip_gets_blocks_of_the_whole_width_within_its_memory(kind, mib, most, width):
    tiles = Tiles.of(kind, 4096, width)
    # Twice, because the next block is on its way: hidden states, head and dz in bfloat16; beside them a float32 chunk of logits.
    blocks = 2 * 2 * (tiles.rows * width + tiles.columns * width + tiles.rows * tiles.columns)
    assert blocks + 4 * min(512, tiles.columns) * tiles.rows < tiles.vmem < mib * 2**20
    assert tiles.rows == most or (kind == "TPU v4" and width > 2048)
    assert Tiles.of(kind, 40, width).rows == 128
