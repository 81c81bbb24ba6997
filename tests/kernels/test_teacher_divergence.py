"""The divergence of a teacher's distribution from the policy's: values and gradients in float64, tiles, meshes and memory."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxrl_llm.kernels.teacher_divergence import reference
from jaxrl_llm.kernels.teacher_divergence.api import teacher_divergence

T, D, E, V = 13, 8, 6, 37
TARGETS = jnp.array([1, 2, -1, 10, 36, 4, 5, -1, 7, 8, 9, 20, 30])
MIXTURES = (0.0, 0.3, 0.5, 1.0)


def arrays(entries=(V, V)):
    rng = np.random.default_rng(0)
    shapes = ((T, D), (entries[0], D)), ((T, E), (entries[1], E))
    return tuple(tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in pair) for pair in shapes)


def softmax(hidden, head, temperature):
    z = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / temperature
    p = np.exp(z - z.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def divergence_of(p, q, mixture):
    """One token's divergence of float64 probabilities, from the definitions."""
    if mixture == 0:
        return float(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    if mixture == 1:
        return float(sum(b * math.log(b / a) for a, b in zip(p, q, strict=True)))
    m = mixture * p + (1 - mixture) * q
    return mixture * divergence_of(p, m, 0) + (1 - mixture) * divergence_of(q, m, 0)


def expected(policy, teacher, weights, mixture, temperature, entries=V):
    p = softmax(teacher[0], np.asarray(teacher[1])[:entries], temperature)
    q = softmax(policy[0], np.asarray(policy[1])[:entries], temperature)
    kept = np.asarray(TARGETS) != -1
    return sum(w * divergence_of(a, b, mixture) for w, a, b, k in zip(weights, p, q, kept, strict=True) if k)


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("tile", [None, 4])
def test_value_and_gradient_are_those_of_the_definition(mixture, tile):
    policy, teacher = arrays()
    weights = np.random.default_rng(1).normal(size=T)

    def total(hidden, head):
        found = teacher_divergence((hidden, head), teacher, TARGETS, mixture=mixture, temperature=0.7, tile=tile)
        return jnp.sum(jnp.asarray(weights, jnp.float32) * found)

    value, gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(*policy)
    np.testing.assert_allclose(value, expected(policy, teacher, weights, mixture, 0.7), rtol=2e-5)
    rng = np.random.default_rng(2)
    for which, gradient in enumerate(gradients):
        for _ in range(6):  # central differences along random directions
            direction, step = rng.normal(size=gradient.shape), 1e-5
            moved = [[np.asarray(x, np.float64) for x in policy] for _ in range(2)]
            moved[0][which] += step * direction
            moved[1][which] -= step * direction
            above, below = (expected(x, teacher, weights, mixture, 0.7) for x in moved)
            slope = float((np.asarray(gradient, np.float64) * direction).sum())
            assert slope == pytest.approx((above - below) / (2 * step), rel=2e-4, abs=1e-5)


def test_skipped_rows_are_0_whatever_they_hold_and_the_teacher_has_no_gradient():
    policy, teacher = arrays()
    bad = jnp.where((TARGETS == -1)[:, None], jnp.nan, policy[0])

    def total(hidden, other):
        found = teacher_divergence((hidden, policy[1]), (other, teacher[1]), TARGETS, mixture=0.5, tile=5)
        return found.sum(), found

    (gradients, found) = jax.grad(total, argnums=(0, 1), has_aux=True)(bad, teacher[0])
    skipped = np.asarray(TARGETS) == -1
    assert (np.asarray(found)[skipped] == 0).all() and (np.asarray(found)[~skipped] > 0).all()
    assert np.isfinite(gradients[0]).all() and (np.asarray(gradients[0])[skipped] == 0).all()
    assert (np.asarray(gradients[1]) == 0).all()


def test_entries_that_one_head_lacks_are_left_out():
    policy, teacher = arrays((V, V + 5))
    found = teacher_divergence(policy, teacher, TARGETS, mixture=1.0)
    np.testing.assert_allclose(found.sum(), expected(policy, teacher, np.ones(T), 1.0, 1.0), rtol=2e-5)


def test_a_policy_that_is_its_teacher_has_no_divergence():
    policy, _ = arrays()
    for mixture in MIXTURES:
        found = teacher_divergence(policy, policy, TARGETS, mixture=mixture)
        np.testing.assert_allclose(found, 0.0, atol=1e-6)
        plain = reference.compute(policy, policy, TARGETS, mixture=mixture)
        np.testing.assert_allclose(plain, 0.0, atol=1e-6)


@pytest.mark.parametrize("sizes", [(2, 1, 1, 1), (1, 2, 1, 2), (1, 1, 4, 1), (2, 2, 2, 1)])
def test_a_mesh_gives_the_values_and_gradients_of_one_device(sizes):
    mesh = Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), ("data", "fsdp", "tensor", "context"))
    policy, teacher = arrays()
    weights = jnp.asarray(np.random.default_rng(1).normal(size=T), jnp.float32)

    def total(hidden, head, mesh):
        return jnp.sum(weights * teacher_divergence((hidden, head), teacher, TARGETS, mixture=0.3, tile=2, mesh=mesh))

    both = [
        jax.jit(jax.value_and_grad(lambda h, w, m=m: total(h, w, m), argnums=(0, 1)))(*policy) for m in (None, mesh)
    ]
    for one, many in zip(*(jax.tree.leaves(x) for x in both), strict=True):
        np.testing.assert_allclose(many, one, rtol=2e-5, atol=2e-6)


def test_no_buffer_holds_the_logits_of_the_batch():
    tokens, entries, width = 8192, 8192, 16
    shape = lambda *x: jax.ShapeDtypeStruct(x, jnp.float32)  # noqa: E731
    pairs = (shape(tokens, width), shape(entries, width)), (shape(tokens, width), shape(entries, width))

    def temporary(compute):
        gradient = jax.grad(lambda policy, teacher, targets: compute(policy, teacher, targets, mixture=0.5).sum())
        lowered = jax.jit(gradient).lower(*pairs, jax.ShapeDtypeStruct((tokens,), jnp.int32))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    logits = 4 * tokens * entries
    assert temporary(reference.compute) >= logits
    assert temporary(teacher_divergence) < logits / 4


def test_shapes_and_values_that_do_not_fit_are_refused():
    policy, teacher = arrays()
    with pytest.raises(ValueError, match="the teacher needs hidden states"):
        teacher_divergence(policy, (teacher[0][:3], teacher[1]), TARGETS, mixture=0.5)
    with pytest.raises(ValueError, match="mixture must be in"):
        teacher_divergence(policy, teacher, TARGETS, mixture=1.5)
    with pytest.raises(ValueError, match="temperature must be positive"):
        teacher_divergence(policy, teacher, TARGETS, mixture=0.5, temperature=0.0)
