"""Attention over packed rows against a float64 derivation, forward and gradient."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_float64 import attention as derived

from jaxrl_llm.kernels.attention import blocked
from jaxrl_llm.kernels.attention.api import attention

B, T, C = 2, 12, 4


def packed(lengths, total=T):
    """(positions, segments) of one row: segments of these lengths, then padding."""
    positions = np.concatenate([np.arange(n) for n in (*lengths, total - sum(lengths))])
    segments = np.concatenate([np.full(n, i + 1) for i, n in enumerate(lengths)] + [np.zeros(total - sum(lengths))])
    return positions.astype(np.int32), segments.astype(np.int32)


def rows(*lengths):
    found = [packed(of_row) for of_row in lengths]
    return np.stack([p for p, _ in found]), np.stack([s for _, s in found])


def arrays(heads, kv_heads, queries=T, keys=T, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, queries, heads, C), (B, keys, kv_heads, C), (B, keys, kv_heads, C), (B, queries, heads, C))
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


@partial(jax.jit, static_argnames=("window", "scale", "backend"))
def step(q, k, v, g, positions, segments, window=None, scale=None, backend="reference"):
    def total(q, k, v):
        out = attention(
            q,
            k,
            v,
            q_positions=positions[0],
            k_positions=positions[1],
            q_segments=segments[0],
            k_segments=segments[1],
            window=window,
            scale=scale,
            backend=backend,
        )
        return (out.astype(jnp.float32) * g).sum(), out

    (_, out), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return out, gradients


LAYOUTS = {
    "one full segment": rows((12,), (12,)),
    "several segments": rows((3, 5, 4), (1, 1, 10)),
    "padding": rows((4, 3), (5,)),
    "a row of padding alone": rows((12,), ()),
}


@pytest.mark.parametrize("backend", ["reference", "blocked"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "heads,kv_heads,window,scale", [(2, 2, None, None), (4, 2, None, 0.3), (4, 2, 3, None), (3, 1, 1, None)]
)
def test_values_and_gradients_are_those_of_the_float64_derivation(
    layout, heads, kv_heads, window, scale, backend, monkeypatch
):
    monkeypatch.setattr(blocked, "BLOCKS", (4,))  # three blocks a row
    positions, segments = LAYOUTS[layout]
    q, k, v, g = arrays(heads, kv_heads)
    how = {"window": window, "scale": scale, "backend": backend}
    out, gradients = step(q, k, v, g, (positions, positions), (segments, segments), **how)
    want, slopes = derived(q, k, v, (positions, positions), (segments, segments), g, window=window, scale=scale)
    np.testing.assert_allclose(out, want, atol=3e-6)
    assert (np.asarray(out)[segments == 0] == 0).all()
    for mine, true in zip(gradients, slopes):
        np.testing.assert_allclose(mine, true, atol=2e-5)
        assert (np.asarray(mine)[segments == 0] == 0).all()


@pytest.mark.parametrize("backend", ["reference", "blocked"])
@pytest.mark.parametrize("queries", [1, 3])
def test_queries_into_a_longer_cache_see_entries_up_to_their_own_position(queries, backend, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCKS", (8,))
    q, k, v, g = arrays(4, 2, queries=queries, keys=16)
    q_positions = np.array([[4], [9]], np.int32) + np.arange(queries, dtype=np.int32)
    k_positions = np.tile(np.arange(16, dtype=np.int32), (B, 1))
    segments = np.ones((B, queries), np.int32), np.ones((B, 16), np.int32)
    out, gradients = step(q, k, v, g, (q_positions, k_positions), segments, backend=backend)
    want, slopes = derived(q, k, v, (q_positions, k_positions), segments, g)
    np.testing.assert_allclose(out, want, atol=3e-6)
    for mine, true in zip(gradients, slopes):
        np.testing.assert_allclose(mine, true, atol=2e-5)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_large_scores_stay_finite_forward_and_backward(backend):
    positions, segments = rows((4, 3), ())
    q, k, v, g = (x * 1e3 for x in arrays(2, 2))
    out, gradients = step(q, k, v, g, (positions, positions), (segments, segments), backend=backend)
    want, _ = derived(q, k, v, (positions, positions), (segments, segments), g)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-2)
    assert all(np.isfinite(x).all() for x in gradients)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_bfloat16_keeps_its_dtype_and_tolerance(backend):
    positions, segments = rows((3, 5, 4), (7, 2))
    q, k, v, g = arrays(4, 2, dtype=jnp.bfloat16)
    out, gradients = step(q, k, v, g.astype(jnp.float32), (positions, positions), (segments, segments), backend=backend)
    want, slopes = derived(q, k, v, (positions, positions), (segments, segments), g)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(out), want, atol=2e-2)
    for mine, true in zip(gradients, slopes):
        assert mine.dtype == jnp.bfloat16
        assert np.linalg.norm(np.float32(mine) - true) < 1e-2 * np.linalg.norm(true)


QKV = dict(zip("qkv", arrays(4, 2)))
BAD = {
    "share B and C": {"k": jnp.ones((B, T, 2, C + 1)), "v": jnp.ones((B, T, 2, C + 1))},
    "k and v all axes": {"v": jnp.ones((B, T + 1, 2, C))},
    "at least one row": {"q": jnp.ones((B, 0, 4, C))},
    "4 query heads cannot share 3": {"k": jnp.ones((B, T, 3, C)), "v": jnp.ones((B, T, 3, C))},
    "share one dtype": {"k": jnp.ones((B, T, 2, C), jnp.bfloat16)},
    "one dtype of .*int32": {n: jnp.ones((B, T, 2, C), jnp.int32) for n in "qkv"},
    "q_positions must be": {"q_positions": jnp.zeros((B, 3), jnp.int32)},
    "window must be at least 1": {"window": 0},
    "max_segments must be at least 1": {"max_segments": 0},
    "unknown attention backend 'flash'": {"backend": "flash"},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused(message):
    positions, segments = (jnp.asarray(x) for x in rows((12,), (12,)))
    given = {**QKV, "q_positions": positions, "k_positions": positions, "q_segments": segments, "k_segments": segments}
    given |= BAD[message]
    # The function below the checker of annotations, as users run it.
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(attention)(given.pop("q"), given.pop("k"), given.pop("v"), **given)
