"""Ordered arithmetic: a row has the same bits whatever it is computed with, and the values are those of float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_float64 import attention as derived

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.attention import ordered as packed
from jaxrl_llm.kernels.attention.api import attention
from jaxrl_llm.kernels.decode_attention.api import decode_attention
from jaxrl_llm.kernels.ordered import arithmetic


def test_exponentials_and_logarithms_are_those_of_float64():
    x = np.linspace(-86.9, 87.9, 20001, dtype=np.float32)
    np.testing.assert_allclose(jax.jit(arithmetic.exp)(x), np.exp(x.astype(np.float64)), rtol=1.8e-7)
    y = np.exp(np.linspace(-80, 80, 20001)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(arithmetic.log)(y), np.log(y.astype(np.float64)), rtol=1.8e-7, atol=6e-8)
    ends = np.asarray(jax.jit(arithmetic.exp)(np.float32([0, -1e30, -np.inf, np.nan])))
    assert ends[:3].tolist() == [1, 0, 0] and np.isnan(ends[3])
    assert np.asarray(jax.jit(arithmetic.log)(np.float32([1, np.inf]))).tolist() == [0, np.inf]


@pytest.mark.parametrize("size", [1, 3, 7, 33])
def test_functions_have_the_same_bits_at_every_length(size):
    x = np.random.default_rng(0).normal(0, 10, 4000).astype(np.float32)

    @jax.jit
    def found(x):
        e, z = arithmetic.exp(x), arithmetic.log(jnp.abs(x) + 1)
        return e, z, e * x + z, arithmetic.sigmoid(x)

    whole = found(x)
    for start in range(0, 60 * size, size):
        for few, many in zip(found(x[start : start + size]), whole):
            assert np.array_equal(few, many[start : start + size])


def test_a_pinned_product_is_rounded_before_it_is_added_to():
    a, b, c = np.random.default_rng(1).normal(size=(3, 5000)).astype(np.float32)
    pinned = jax.jit(lambda a, b, c: arithmetic.pin(a * b) + c)(a, b, c)
    assert np.array_equal(pinned, a * b + c)  # NumPy's products are rounded
    assert not np.array_equal((a.astype(np.float64) * b + c).astype(np.float32), a * b + c)


ROWS_SHAPES = [(128, 384), (96, 50), (24, 20), (48, 8)]


@pytest.mark.parametrize("turned", [False, True], ids=["upright", "turned"])
@pytest.mark.parametrize("inputs,outputs", ROWS_SHAPES)
def test_a_product_of_a_row_has_the_same_bits_in_every_company_and_place(inputs, outputs, turned):
    """Each form by itself: some processors add in another order where the weights lie the other way, and sampler and learner use the same."""
    rng = np.random.default_rng(2)
    x, w = rng.normal(size=(150, inputs)).astype(np.float32), rng.normal(size=(inputs, outputs)).astype(np.float32)
    lain = (lambda w: w.T.copy()) if turned else (lambda w: w)
    compute = partial(arithmetic.matmul, turned=turned)
    product = jax.jit(lambda x, w: compute(x, w))
    whole = np.asarray(product(x, lain(w)))
    np.testing.assert_allclose(whole, x.astype(np.float64) @ w, rtol=1e-4, atol=1e-4)
    assert np.array_equal(product(x[70:73], lain(w)), whole[70:73])
    assert np.array_equal(np.roll(product(np.roll(x, 37, 0), lain(w)), -37, 0), whole)
    alone = jax.jit(lambda x, w: jax.nn.relu(compute(x * 1.5, w)) + 1)(x[:1] / 1.5, lain(w))
    assert np.array_equal(alone, np.maximum(product((x[:1] / 1.5) * np.float32(1.5), lain(w)), 0) + 1)
    first, second = (product(x[:, part], lain(w[part])) for part in (slice(inputs // 2), slice(inputs // 2, None)))
    assert not np.array_equal(first + second, whole)  # another order of the sum is seen


def test_totals_are_sums_of_rows():
    x = np.random.default_rng(3).normal(size=(70, 300)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(arithmetic.totals)(x), x.sum(1, dtype=np.float64), atol=1e-4)


def test_a_rounding_to_bfloat16_is_kept():
    x = np.random.default_rng(4).normal(size=1000).astype(np.float32)
    found = jax.jit(lambda x: arithmetic.rounded(x * 3, jnp.bfloat16).astype(jnp.float32) * 5)(x)
    assert np.array_equal(found, (x * 3).astype(jnp.bfloat16).astype(np.float32) * 5)


# -- attention ---------------------------------------------------------------------------------------------------------

H, K, C, T, SEGMENTS = 6, 2, 12, 96, 7


def rows_of(*lengths):
    """(positions, segments) [B, T] of rows of such sequences, with a gap of padding after the first of each row."""
    positions, segments = np.zeros((len(lengths), T), np.int32), np.zeros((len(lengths), T), np.int32)
    for b, row in enumerate(lengths):
        at = 0
        for j, n in enumerate(row):
            positions[b, at : at + n], segments[b, at : at + n] = np.arange(n), j + 1
            at += n
    return positions, segments


@partial(jax.jit, static_argnames=("window",))
def attended(q, k, v, positions, segments, *, window):
    places = {"q_positions": positions, "k_positions": positions, "q_segments": segments, "k_segments": segments}
    return attention(q, k, v, **places, window=window, max_segments=SEGMENTS, backend="ordered")


@partial(jax.jit, static_argnames=("window",))
def gradients_of(q, k, v, g, positions, segments, *, window):
    def total(q, k, v):
        out = attended(q, k, v, positions, segments, window=window)
        return (out * g).sum(), out

    (_, out), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return out, gradients


def drawn(rows, seed=5):
    rng = np.random.default_rng(seed)
    shapes = ((rows, T, H, C), (rows, T, K, C), (rows, T, K, C), (rows, T, H, C))
    return [rng.normal(size=s).astype(np.float32) for s in shapes]


LENGTHS = ((33, 1, 16, 40), (5, 17, 2, 31, 9, 3, 29))


@pytest.mark.parametrize("window", [None, 7])
def test_packed_attention_is_that_of_float64_and_so_is_its_gradient(window):
    positions, segments = rows_of(*LENGTHS)
    q, k, v, g = drawn(2)
    out, gradients = gradients_of(q, k, v, g, positions, segments, window=window)
    want, slopes = derived(q, k, v, (positions, positions), (segments, segments), g, window=window, scale=None)
    np.testing.assert_allclose(out, want, atol=3e-6)
    assert (np.asarray(out)[segments == 0] == 0).all()
    for found, slope in zip(gradients, slopes):
        np.testing.assert_allclose(found, slope, atol=2e-5)


def decoded(q, k, v, positions, segments, window, length):
    """What decode attention gives each token of the rows, from caches of `length` entries that hold its sequence and then numbers."""
    cached = np.random.default_rng(6).normal(size=(2, 1, len(q) * T, length, K, C)).astype(np.float32)
    at = np.zeros(len(q) * T, np.int32)
    for i, (b, t) in enumerate(np.ndindex(len(q), T)):
        if segments[b, t]:
            start, n = t - positions[b, t], positions[b, t] + 1
            cached[:, 0, i, :n], at[i] = np.stack([k[b, start : start + n], v[b, start : start + n]]), n - 1
    run = jax.jit(partial(decode_attention, window=window, backend="ordered"))
    out = run(q.reshape(-1, H, C), *cached, jnp.int32(0), at)
    return np.where(segments[..., None, None] > 0, np.asarray(out).reshape(q.shape), 0)


@pytest.mark.parametrize("window", [None, 7])
def test_a_tokens_attention_has_the_same_bits_in_decode_and_in_every_packing(window, monkeypatch):
    positions, segments = rows_of(*LENGTHS)
    q, k, v, _ = drawn(2)
    out = np.asarray(attended(q, k, v, positions, segments, window=window))
    assert np.array_equal(decoded(q, k, v, positions, segments, window, 41), out)
    # The last sequence of the first row, alone in a row of its own.
    own = np.s_[:1, 50:90]
    alone = [np.pad(x[own], ((0, 0), (0, T - 40), (0, 0), (0, 0))) for x in (q, k, v)]
    moved = np.asarray(attended(*alone, *rows_of((40,)), window=window))
    assert np.array_equal(moved[:, :40], out[own])
    monkeypatch.setattr(packed, "KEYS", 8)
    assert not np.array_equal(decoded(q, k, v, positions, segments, window, 41), out)


def test_calls_without_an_order_are_refused_by_name():
    q, k, v, _ = map(jnp.asarray, drawn(1))
    positions, segments = map(jnp.asarray, rows_of((40,)))
    places = {"q_positions": positions, "k_positions": positions, "q_segments": segments, "k_segments": segments}
    with dispatch.ordering(True), pytest.raises(ValueError, match="packed rows, whose sequences"):
        attention(q, k, v, **places)
    with dispatch.ordering(True), pytest.raises(ValueError, match="the bitwise mode has no grouped_matmul"):
        dispatch.choose("grouped_matmul", ("xla",), None, None)
    assert "compute capability 9.0 (got tpu)" in arithmetic.refusal("tpu")


@pytest.mark.parametrize("rows,keys", [(1, 3), (7, 3), (1000, 50), (1000, 5000), (4097, 2)])
def test_sums_by_key_are_those_of_float64_and_keys_without_rows_have_zeros(rows, keys):
    rng = np.random.default_rng(3)
    key, x = rng.integers(0, keys, rows).astype(np.int32), rng.normal(size=(rows, 5)).astype(np.float32)
    want = np.zeros((keys, 5))
    np.add.at(want, key, x.astype(np.float64))
    found = np.asarray(jax.jit(arithmetic.sums_by_key, static_argnums=2)(key, x, keys))
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
    assert not found[want[:, 0] == 0].any()


def test_sums_by_key_have_the_same_bits_whatever_rows_of_other_keys_stand_between():
    rng = np.random.default_rng(4)
    x = rng.normal(size=(100, 8)).astype(np.float32)
    alone = arithmetic.sums_by_key(jnp.zeros(100, jnp.int32), jnp.asarray(x), 1)[0]
    place = np.sort(rng.permutation(700)[:100])
    among, key = rng.normal(size=(700, 8)).astype(np.float32), rng.integers(1, 9, 700).astype(np.int32)
    among[place], key[place] = x, 0
    assert np.array_equal(arithmetic.sums_by_key(jnp.asarray(key), jnp.asarray(among), 9)[0], alone)
