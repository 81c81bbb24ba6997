"""The bitwise mode's kernels for Hopper, on the CPU: right in the interpreters, the same bits in every company, lowered for CUDA."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_float64 import attention as derived
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_llm.distributed.mesh import Partitioner
from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.attention import ordered_gpu as attention
from jaxrl_llm.kernels.attention.api import Call
from jaxrl_llm.kernels.ordered import arithmetic, hopper
from jaxrl_llm.kernels.token_stats import mosaic_gpu, ordered, ordered_gpu
from jaxrl_llm.kernels.token_stats.api import call_of
from jaxrl_llm.models.policy import check_bitwise
from jaxrl_llm.models.qwen2 import Qwen2

NEW_INTERPRETER = hasattr(plgpu, "InterpretGPUParams")
RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Gpu:
    compute_capability: str
    platform: str = "gpu"
    core_count: int = 132


def interpreter():
    """A context in which Mosaic GPU kernels run on the CPU; jax before 0.11 has it in a private module."""
    if NEW_INTERPRETER:
        return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams())
    from jax._src.pallas.mosaic_gpu.interpret import params

    return params.force_gpu_interpret_mode(params.InterpretGPUParams())


def drawn(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.bfloat16)


def wide(x):
    return np.asarray(x.astype(jnp.float32)).astype(np.float64)


# -- products and sums of rows -----------------------------------------------------------------------------------------


def test_a_product_is_right_in_the_interpreter_in_widths_that_are_filled_up(monkeypatch):
    # The interpreter of jax 0.10 knows no clusters that share a tile.
    cluster = 2 if NEW_INTERPRETER else 1
    tiles = hopper.Tiles(columns=128, stages=2, cluster=cluster, multiprocessors=2 * cluster)
    monkeypatch.setattr(hopper, "tiles_of", lambda rows, columns: tiles)
    x, w = drawn(tiles.block + 3, 100), drawn(100, 200)
    with interpreter():
        y = jax.block_until_ready(hopper.product.__wrapped__(x, w))
    want = wide(x) @ wide(w)
    assert y.shape == want.shape and y.dtype == jnp.bfloat16
    np.testing.assert_allclose(wide(y), want, atol=2.0**-8 * np.abs(want).max())


def test_instructions_of_a_product_go_by_the_weights_alone():
    for columns, rows in ((1536, 64), (8960, 64), (200, 64)):
        with dispatch.target(Gpu("9.0")):
            tiles = [hopper.tiles_of(n, columns) for n in (1, 100, 600, 9000, 10**6)]
        assert len({(t.columns, t.depth) for t in tiles}) == 1
        assert all(t.rows % rows == 0 for t in tiles)


def test_few_rows_are_made_in_lower_blocks_where_more_multiprocessors_work_on_them():
    with dispatch.target(Gpu("9.0")):
        assert [hopper.tiles_of(n, 896).block for n in (64, 512, 1024, 2048, 16384)] == [64, 64, 64, 256, 512]
        assert [hopper.tiles_of(n, 8960).block for n in (64, 512, 16384)] == [64, 128, 256]


@pytest.mark.slow
def test_a_block_of_one_tile_of_rows_has_the_bits_of_one_of_two(monkeypatch):
    x, w = drawn(70, 192), drawn(192, 128)

    def product(**sizes):
        tiles = hopper.Tiles(columns=128, stages=2, cluster=1, multiprocessors=1, **sizes)
        monkeypatch.setattr(hopper, "tiles_of", lambda rows, columns: tiles)
        with interpreter():
            return wide(jax.block_until_ready(hopper.product.__wrapped__(x, w)))

    low = product(warpgroups=1)
    np.testing.assert_allclose(low, wide(x) @ wide(w), atol=2.0**-8 * np.abs(low).max())
    assert np.array_equal(low, product(warpgroups=2))


@pytest.mark.slow
def test_products_of_several_weights_by_one_kernel_have_the_bits_of_each_alone(monkeypatch):
    tiles = hopper.Tiles(columns=128, stages=2, warpgroups=1, cluster=1, multiprocessors=2)
    monkeypatch.setattr(hopper, "tiles_of", lambda *sizes: tiles)
    x, weights = drawn(70, 100), [drawn(100, 3, 64), drawn(100, 128), drawn(100, 260)]
    with interpreter():
        together = jax.block_until_ready(hopper.linears(x[:, None], weights))
        alone = jax.block_until_ready([hopper.linear(x[:, None], w, 1) for w in weights])
    for one, other, w in zip(together, alone, weights):
        assert one.shape == (70, 1, *w.shape[1:]) and np.array_equal(wide(one), wide(other))
        want = wide(x) @ wide(w).reshape(100, -1)
        np.testing.assert_allclose(wide(one).reshape(70, -1), want, atol=2.0**-8 * np.abs(want).max())


def test_kernels_of_several_weights_are_of_one_instruction_each(monkeypatch):
    seen = []

    def joined(x, weights, tiles, turned):
        seen.append((tiles.columns, [w.shape[1] for w in weights]))
        return [x @ w for w in weights]

    monkeypatch.setattr(hopper, "_joined", joined)
    x, weights = drawn(3, 16), [drawn(16, n) for n in (4096, 128, 8192, 384)]
    with dispatch.target(Gpu("9.0")):
        found = hopper.products.__wrapped__(x, weights)
    assert seen == [(256, [4096, 8192]), (128, [128, 384])]
    assert all(np.array_equal(wide(y), wide(x @ w)) for y, w in zip(found, weights))


@pytest.mark.parametrize("width", [384, 64])
def test_norms_and_chosen_logits_are_those_of_float64_and_of_a_row_alone(width):
    x, scale, head = drawn(37, width), jnp.asarray(RNG.normal(size=width), jnp.float32), drawn(11, width)
    targets = jnp.asarray(RNG.integers(0, 11, 37), jnp.int32)
    norms = hopper._norms(x, scale, 1e-6, interpret=True)
    want = wide(x) / np.sqrt((wide(x) ** 2).mean(axis=1, keepdims=True) + 1e-6) * np.asarray(scale)
    np.testing.assert_allclose(wide(norms), want, rtol=2.0**-8)
    logits = hopper.chosen_logits(x, head, targets, interpret=True)
    np.testing.assert_allclose(logits, (wide(x) * wide(head)[targets]).sum(axis=1), atol=1e-4)
    assert np.array_equal(wide(hopper._norms(x[5:6], scale, 1e-6, interpret=True)), wide(norms)[5:6])
    assert np.array_equal(hopper.chosen_logits(x[5:8], head, targets[5:8], interpret=True), logits[5:8])


@pytest.mark.parametrize("width", [384, 896])
def test_a_sum_and_its_norm_in_one_pass_have_the_bits_of_two(width):
    # Sums that are exact: compiled for CPUs, the interpreter's program leaves the rounding between them and the norm out.
    x, y = (jnp.asarray(RNG.integers(-64, 64, (37, 1, width)) / 8, jnp.bfloat16) for _ in range(2))
    scale = jnp.asarray(RNG.normal(size=width), jnp.float32)
    total, norm = hopper.added_norm(x, y, scale, 1e-6, True)
    assert np.array_equal(wide(total), wide(arithmetic.added(x, y)))
    assert np.array_equal(wide(norm)[:, 0], wide(hopper._norms(total[:, 0], scale, 1e-6, True)))
    alone = hopper.added_norm(x[5:6], y[5:6], scale, 1e-6, True)
    assert all(np.array_equal(wide(a), wide(b)[5:6]) for a, b in zip(alone, (total, norm)))


def test_the_norms_gradient_is_that_of_float64(monkeypatch):
    norms = hopper._norms
    monkeypatch.setattr(hopper, "_norms", lambda *arrays: norms(*arrays, interpret=True))
    x, scale, g = drawn(5, 64), jnp.asarray(RNG.normal(size=64), jnp.float32), drawn(5, 64)
    _, back = jax.vjp(lambda x, s: hopper.rms_norm(x, s, 1e-6), x, scale)
    dx, dscale = back(g)
    wx, ws, wg = wide(x), np.asarray(scale, np.float64), wide(g)
    inverse = 1 / np.sqrt((wx**2).mean(axis=1, keepdims=True) + 1e-6)
    want = inverse * ws * wg - wx * inverse**3 * (ws * wg * wx).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(wide(dx), want, atol=2.0**-8 * np.abs(want).max())
    np.testing.assert_allclose(dscale, (wx * inverse * wg).sum(axis=0), rtol=1e-2, atol=1e-2)


# -- token_stats -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_log_probs_are_those_of_float64_with_a_last_tile_that_overlaps():
    vocabulary, cluster = 112, 2 if NEW_INTERPRETER else 1
    # The interpreter of jax 0.10 knows no transposed operands either.
    tiles = mosaic_gpu.Tiles(
        rows=64, columns=64, depth=32, stages=2, cluster=cluster, multiprocessors=2 * cluster, head_columns=not NEW_INTERPRETER
    )  # fmt: skip
    tokens, width = tiles.cluster * 128, 64
    hidden, head = drawn(tokens, width), drawn(vocabulary, width) / 4
    temperature = jnp.asarray(RNG.uniform(0.5, 2, tokens), jnp.float32)
    targets = jnp.asarray(RNG.integers(0, vocabulary, tokens), jnp.int32)
    with interpreter():
        shares, logits = jax.block_until_ready(ordered_gpu.read(hidden, head, temperature, 4, logits=True, tiles=tiles))
    chosen = hopper.chosen_logits(hidden, head, targets, interpret=True)
    maximum, total, first, square, log_total, logprob = ordered_gpu._summed(shares, chosen, temperature, interpret=True)
    z = wide(hidden) @ wide(head).T
    np.testing.assert_allclose(logits, z, atol=1e-4)
    d = (z - z.max(axis=1, keepdims=True)) / np.asarray(temperature)[:, None]
    e = np.exp(d)
    np.testing.assert_allclose(maximum, z.max(axis=1), atol=1e-4)
    for found, want in (
        (total, e.sum(1)),
        (first, (e * d).sum(1)),
        (square, (e * e).sum(1)),
        (log_total, np.log(e.sum(1))),
    ):
        np.testing.assert_allclose(found, want, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(logprob, d[np.arange(tokens), targets] - np.log(e.sum(1)), atol=2e-4)


def test_calls_that_the_kernels_cannot_take_are_refused_by_name():
    call = replace(call_of(jnp.zeros((1, 64), jnp.bfloat16), jnp.zeros((512, 64), jnp.bfloat16)), platform="gpu")
    with dispatch.target(Gpu("9.0")):
        assert ordered.refusal(call) is None
        assert "bfloat16 (got float32)" in ordered.refusal(replace(call, dtype="float32"))
        assert "the vocabulary of 16 and at least 256 (got 64 and 504)" in ordered.refusal(
            replace(call, vocabulary=504)
        )
    for capability in ("8.9", "10.0"):
        with dispatch.target(Gpu(capability)):
            assert f"a GPU of compute capability {capability}" in ordered.refusal(call)
            assert f"a GPU of compute capability {capability}" in arithmetic.refusal("gpu")


def test_policies_for_which_a_gpu_has_no_order_are_refused_by_name():
    model = Qwen2(vocabulary_size=256, width=64, layers=1, heads=1, kv_heads=1, head_width=64, mlp_width=64)

    def check(gpu, dtype):
        one = Mock(spec=Partitioner, mesh=SimpleNamespace(devices=np.array([gpu]), shape={}))
        with dispatch.target(gpu):
            check_bitwise(model, one, dtype)

    check(Gpu("9.0"), "bfloat16")
    with pytest.raises(ValueError, match=r"set compute_dtype = 'bfloat16' \(got 'float32'\)"):
        check(Gpu("9.0"), "float32")
    with pytest.raises(ValueError, match=r"got a GPU of compute capability 8\.0"):
        check(Gpu("8.0"), "bfloat16")


# -- attention ---------------------------------------------------------------------------------------------------------

H, K, C, T = 4, 2, 32, 208
LENGTHS = ((66, 1, 64, 65), (40, 17, 2, 70, 9))


def packed(lengths):
    """(positions, segments) of rows of such sequences, with a gap after the first of each."""
    positions, segments = np.zeros((2, len(lengths), T), np.int32)
    for b, row in enumerate(lengths):
        at = 0
        for j, n in enumerate(row):
            positions[b, at : at + n], segments[b, at : at + n] = np.arange(n), j + 1
            at += n + 3 * (j == 0)
    return positions, segments


def attended(q, k, v, segments, window, most=7):
    call = Call(
        platform="gpu", dtype="bfloat16", batch=len(q), queries=T, keys=T, heads=H, kv_heads=K, width=C, window=window, scale=C**-0.5,
        max_segments=most,
    )  # fmt: skip
    return wide(attention.packed(q, k, v, jnp.asarray(segments), call, interpret=True))


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 50])
def test_attention_is_that_of_float64_and_the_same_bits_in_every_packing_and_in_caches(window, monkeypatch):
    positions, segments = packed(LENGTHS)
    q, k, v = (drawn(2, T, heads, C) for heads in (H, K, K))
    out = attended(q, k, v, segments, window)
    want, _ = derived(
        *map(wide, (q, k, v)), (positions, positions), (segments, segments), wide(q), window=window, scale=None
    )
    np.testing.assert_allclose(out, want, atol=0.02)
    assert (out[segments == 0] == 0).all()
    # The sequence of 70 tokens alone in a row, and its tokens as those of slots whose caches hold other numbers after them.
    first, n = 40 + 3 + 17 + 2, 70
    own = np.s_[1:, first : first + n]
    alone = [jnp.pad(x[own], ((0, 0), (5, T - n - 5), (0, 0), (0, 0)), constant_values=9.0) for x in (q, k, v)]
    row = np.zeros((1, T), np.int32)
    row[:, 5 : 5 + n] = 1
    assert np.array_equal(attended(*alone, row, window, most=1)[:, 5 : 5 + n], out[own])
    cached = np.full((2, 2, n, 100, K, C), 7.0, np.float32)
    for i in range(n):
        cached[:, 1, i, : i + 1] = np.stack([wide(x)[1, first : first + i + 1] for x in (k, v)])
    slots = (q[own][0], *jnp.asarray(cached, jnp.bfloat16), jnp.int32(1), jnp.arange(n, dtype=jnp.int32))
    found = attention.decoded(*slots, window=window, interpret=True)
    assert np.array_equal(wide(found), out[own][0])
    monkeypatch.setattr(attention, "KEYS", 32)
    other = attention.decoded.__wrapped__(*slots, window=window, interpret=True)  # compiled for other keys
    assert not np.array_equal(wide(other), out[own][0])


@pytest.mark.skipif(NEW_INTERPRETER, reason="jax 0.11 lowers Triton programs where a GPU is there alone")
def test_every_kernel_lowers_for_cuda():
    bf, shape = jnp.bfloat16, jax.ShapeDtypeStruct

    def read(x, w, scale, head, targets, temperature):
        y = hopper.rms_norm(hopper.product(x, w), scale, 1e-6)
        read = ordered_gpu.read(y, head, temperature, logits=True)
        return ordered_gpu.logprobs(read[0], y, head, targets, temperature), read[1]

    for rows in (100, 9000):
        arrays = [shape((rows, 896), bf), shape((896, 896), bf), shape((896,), jnp.float32), shape((4112, 896), bf)]
        arrays += [shape((rows,), jnp.int32), shape((rows,), jnp.float32)]
        with dispatch.target(Gpu("9.0")):
            text = jax.jit(read).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") == 2 and text.count("xla.gpu.triton") == 3
