"""Gradients that layers write out themselves, against derivations in NumPy's float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.layers import rotate
from jaxrl_llm.models.linear import gated_linear


def gated_in_float64(gate, up, weights, g):
    """y = (silu(a) u) W and the gradients of sum(g y): silu'(a) = s (1 + a (1 - s)), s = 1 / (1 + exp(-a))."""
    gate, up, weights, g = (np.asarray(x, np.float64) for x in (gate, up, weights, g))
    share = 1 / (1 + np.exp(-gate))
    h, dh = gate * share * up, np.einsum("btd,md->btm", g, weights)
    dgate = dh * up * (share + gate * share * (1 - share))
    return np.einsum("btm,md->btd", h, weights), (dgate, dh * gate * share, np.einsum("btm,btd->md", h, g))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 8e-3)])
def test_a_gated_product_and_its_three_gradients_are_those_of_float64(dtype, tolerance):
    keys = jax.random.split(jax.random.key(0), 4)
    gate, up, g = (4 * jax.random.normal(k, (2, 5, n), dtype) for k, n in zip(keys, (24, 24, 6)))
    weights = jax.random.normal(keys[3], (24, 6))
    y, pull = jax.vjp(gated_linear, gate, up, weights)
    found = pull(g)
    assert [x.dtype for x in found] == [gate.dtype, up.dtype, jnp.float32]
    want_y, want = gated_in_float64(gate, up, weights.astype(dtype), g)
    for x, exact in zip((y, *found), (want_y, *want)):
        assert np.linalg.norm(np.asarray(x, np.float64) - exact) <= tolerance * np.linalg.norm(exact)


def test_a_gated_product_of_extreme_gates_has_finite_gradients():
    gate = jnp.array([[[-1e4, 1e4, 0.0]]])
    found = jax.grad(lambda a: gated_linear(a, jnp.ones((1, 1, 3)), jnp.ones((3, 1))).sum())(gate)
    np.testing.assert_allclose(found, [[[0.0, 1.0, 0.5]]], atol=1e-6)


def test_rotation_is_a_product_with_complex_numbers_and_its_gradient_one_with_their_conjugates():
    keys = jax.random.split(jax.random.key(1), 3)
    angles = 100 * jax.random.uniform(keys[0], (2, 3, 4))
    x, g = (jax.random.normal(key, (2, 3, 5, 8)) for key in keys[1:])
    y, pull = jax.vjp(lambda x: rotate(x, (jnp.cos(angles), jnp.sin(angles))), x)
    pairs = lambda x: np.asarray(x[..., :4], np.float64) + 1j * np.asarray(x[..., 4:], np.float64)  # noqa: E731
    turn = np.exp(1j * np.asarray(angles, np.float64))[:, :, None, :]
    np.testing.assert_allclose(pairs(y), pairs(x) * turn, atol=2e-6)
    np.testing.assert_allclose(pairs(pull(g)[0]), pairs(g) * turn.conj(), atol=2e-6)
