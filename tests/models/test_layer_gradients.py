"""Gradients that layers write out themselves, against derivations in NumPy's float64."""

import re
from contextlib import nullcontext
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.kernels import dispatch
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.gated import gated_linear
from jaxrl_llm.models.layers import Projection, rope, rotate
from jaxrl_llm.models.linear import Spread, Stored, linear, written


@dataclass(frozen=True)
class Tpu:
    platform: str = "tpu"


def gated_in_float64(gate, up, weights, g):
    """y = (silu(a) u) W and the gradients of sum(g y): silu'(a) = s (1 + a (1 - s)), s = 1 / (1 + exp(-a))."""
    gate, up, weights, g = (np.asarray(x, np.float64) for x in (gate, up, weights, g))
    share = 1 / (1 + np.exp(-gate))
    h, dh = gate * share * up, np.einsum("btd,md->btm", g, weights)
    dgate = dh * up * (share + gate * share * (1 - share))
    return np.einsum("btm,md->btd", h, weights), (dgate, dh * gate * share, np.einsum("btm,btd->md", h, g))


def gated_with_gradients(gate, up, weights, g):
    y, pull = jax.vjp(gated_linear, gate, up, weights)
    return y, *pull(g)


@pytest.mark.parametrize("target", [None, Tpu()])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 8e-3)])
def test_a_gated_product_and_its_three_gradients_are_those_of_float64(dtype, tolerance, target):
    keys = jax.random.split(jax.random.key(0), 4)
    gate, up, g = (4 * jax.random.normal(k, (2, 5, n), dtype) for k, n in zip(keys, (24, 24, 6)))
    weights = jax.random.normal(keys[3], (24, 6))
    with dispatch.target(target) if target else nullcontext():
        y, *found = gated_with_gradients(gate, up, weights, g)
    assert [x.dtype for x in found] == [gate.dtype, up.dtype, jnp.float32]
    want_y, want = gated_in_float64(gate, up, weights.astype(dtype), g)
    for x, exact in zip((y, *found), (want_y, *want)):
        assert np.linalg.norm(np.asarray(x, np.float64) - exact) <= tolerance * np.linalg.norm(exact)


def test_products_on_tpus_read_gated_values_that_are_written_once():
    gated, weights, g = (jnp.ones(shape, jnp.bfloat16) for shape in ((2, 5, 24), (24, 6), (2, 5, 6)))
    with dispatch.target(Tpu()):
        text = jax.jit(gated_with_gradients).lower(gated, gated, weights, g).as_text()
    barrier = r"%(\w+)(?:#\d)?(?:, %\w+(?:#\d)?)* = |%(\w+):\d+ = "
    lines = [line for line in text.splitlines() if "stablehlo.optimization_barrier" in line]
    names = {next(filter(None, re.search(barrier, line).groups())) for line in lines}
    assert [line.count("tensor<2x5x24xbf16>") for line in lines] == [1, 3]
    products = [line for line in text.splitlines() if "dot_general" in line and "(tensor<2x5x24xbf16>," in line]
    assert len(products) == 2  # forward, and the gradient of the weights
    for line in products:
        assert re.search(r"dot_general %(\w+)", line)[1] in names


def test_what_products_read_is_written_on_tpus_alone_and_not_for_single_tokens():
    kept = lambda tokens: "optimization_barrier" in jax.jit(written).lower(jnp.ones((2, tokens, 8))).as_text()  # noqa: E731
    assert not kept(5)
    with dispatch.target(Tpu()):
        assert kept(5) and not kept(1)
        np.testing.assert_array_equal(jax.grad(lambda x: (written(x) ** 2).sum())(jnp.arange(6.0).reshape(1, 2, 3)), [[[0, 2, 4], [6, 8, 10]]])  # fmt: skip


def test_a_gated_product_of_extreme_gates_has_finite_gradients():
    gate = jnp.array([[[-1e4, 1e4, 0.0]]])
    found = jax.grad(lambda a: gated_linear(a, jnp.ones((1, 1, 3)), jnp.ones((3, 1))).sum())(gate)
    np.testing.assert_allclose(found, [[[0.0, 1.0, 0.5]]], atol=1e-6)


def whole_numbers(key, *shape):
    """Numbers of -9 to 9 in bfloat16: float32 holds sums of hundreds of their products exactly, bfloat16 does not."""
    return jax.random.randint(jax.random.key(key), shape, -9, 10).astype(jnp.bfloat16)


def rounded(x):
    return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16), np.float32)


@pytest.mark.parametrize("backward", [False, True])
def test_a_sum_of_which_two_devices_hold_parts_is_rounded_once(backward):
    mesh = Partitioner.create(MeshConfig(fsdp=1, tensor=2), jax.devices()[:2]).mesh
    many, weights = whole_numbers(0, 1, 64, 512), whole_numbers(1, 512, 16).astype(jnp.float32)
    exact = np.asarray(many, np.int64) @ np.asarray(weights, np.int64)
    split = (None, "tensor") if backward else ("tensor", None)
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    stored, many = Stored(mesh, None, PartitionSpec(*split)), place(many, None, None, "tensor")

    def forward(x, w):
        return linear(x, Spread(w, stored))

    if backward:  # of a product with 512 outputs, by its inputs
        x = jnp.zeros((1, 64, 16), jnp.bfloat16)
        found = jax.jit(lambda w, g: jax.vjp(forward, x, w)[1](g)[0])(place(weights.T, *split), many)
    else:
        found = jax.jit(forward)(many, place(weights, *split))
    parts = [
        np.asarray(many, np.int64)[..., h] @ np.asarray(weights, np.int64)[h] for h in (slice(256), slice(256, 512))
    ]
    twice = rounded(sum(map(rounded, parts)))
    assert found.dtype == jnp.bfloat16 and (rounded(exact) != twice).mean() > 0.1
    np.testing.assert_array_equal(np.asarray(found, np.float32), rounded(exact))


def test_heads_are_one_dimension_of_the_products_whose_gradients_devices_sum():
    mesh = Partitioner.create(MeshConfig(fsdp=2), jax.devices()[:2]).mesh
    stored = Stored(mesh, ("fsdp", None), PartitionSpec("fsdp"))
    x, weights, g = (whole_numbers(key, *shape) for key, shape in enumerate(((2, 8, 4), (4, 3, 5), (2, 8, 3, 5))))

    def run(x, weights, g):
        y, pull = jax.vjp(lambda x, w: linear(x, Spread(w, stored)), x, weights)
        return y, *pull(g)

    run = jax.jit(run)
    y, dx, dw = run(x, weights.astype(jnp.float32), g)
    x, weights, g = (np.asarray(value, np.int64) for value in (x, weights, g))
    np.testing.assert_array_equal(np.asarray(y, np.float32), rounded(np.einsum("btd,dhc->bthc", x, weights)))
    np.testing.assert_array_equal(np.asarray(dx, np.float32), rounded(np.einsum("bthc,dhc->btd", g, weights)))
    np.testing.assert_array_equal(dw, np.einsum("btd,bthc->dhc", x, g))
    text = run.lower(*(jnp.asarray(value, jnp.bfloat16) for value in (x, weights, g))).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 3 and not any("x3x5x" in line for line in products)


BIASED = Architecture(
    vocabulary_size=8, width=16, layers=1, heads=4, kv_heads=2, head_width=8, mlp_width=8, qkv_bias=True
)
TOKENS = (8, 512)  # so many that a sum in bfloat16, whose steps are 1/128 of it, is visibly wrong
MESHES = {"alone": {"fsdp": 1}, "fsdp8": {"fsdp": 8}, "context4": {"fsdp": 2, "context": 4}, "tensor2": {"tensor": 2}}


def gradients_of_a_projection(sizes):
    """(gradient of the bias, the gradient [B, T, heads, C] that reached the sum) of a projection in bfloat16 on a mesh."""
    config = MeshConfig(**sizes)
    partitioner = Partitioner.create(config, jax.devices()[: 1 if sizes == MESHES["alone"] else 8])
    projection = Projection(BIASED, 4, "heads", rngs=nnx.Rngs(0))
    keys = jax.random.split(jax.random.key(2), 2)
    x = jax.random.normal(keys[0], (*TOKENS, 16), jnp.bfloat16)
    g = (1 + jax.random.normal(keys[1], (*TOKENS, 4, 8))).astype(jnp.bfloat16)
    place = lambda a: jax.device_put(a, NamedSharding(partitioner.mesh, PartitionSpec(("data", "fsdp"), "context")))  # noqa: E731
    graph, params = nnx.split(projection)

    def total(params, x, g):
        whole = nnx.merge(graph, params)
        return jnp.sum(whole.of(linear(x, whole.kernel[...])).astype(jnp.float32) * g.astype(jnp.float32))

    found = jax.jit(jax.grad(total))(params, place(x), place(g))
    return np.asarray(found["bias"][...]), np.asarray(g, np.float64)


@pytest.mark.parametrize("mesh", MESHES)
def test_the_gradient_of_a_bias_is_a_float32_sum_on_every_mesh(mesh):
    got, g = gradients_of_a_projection(MESHES[mesh])
    want = g.sum(axis=(0, 1))
    assert got.dtype == np.float32
    # Float32 rounds a sum by 6e-8 of it at each of its 12 levels of pairs or fewer, and bfloat16 by 4e-3.
    assert np.linalg.norm(got - want) <= 1e-6 * np.linalg.norm(want)


def test_rotation_is_a_product_with_complex_numbers_and_its_gradient_one_with_their_conjugates():
    keys = jax.random.split(jax.random.key(1), 3)
    angles = 100 * jax.random.uniform(keys[0], (2, 3, 4))
    x, g = (jax.random.normal(key, (2, 3, 5, 8)) for key in keys[1:])
    y, pull = jax.vjp(lambda x: rotate(x, (jnp.cos(angles), jnp.sin(angles))), x)
    pairs = lambda x: np.asarray(x[..., :4], np.float64) + 1j * np.asarray(x[..., 4:], np.float64)  # noqa: E731
    turn = np.exp(1j * np.asarray(angles, np.float64))[:, :, None, :]
    np.testing.assert_allclose(pairs(y), pairs(x) * turn, atol=2e-6)
    np.testing.assert_allclose(pairs(pull(g)[0]), pairs(g) * turn.conj(), atol=2e-6)


def test_angles_of_rotations_are_computed_once_on_tpus():
    lowered = lambda: jax.jit(lambda p: rope(BIASED, p)).lower(jnp.arange(10).reshape(2, 5)).as_text()  # noqa: E731
    assert "optimization_barrier" not in lowered()
    with dispatch.target(Tpu()):
        assert lowered().count("optimization_barrier") == 2
