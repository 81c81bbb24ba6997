"""token_stats over meshes of simulated devices: the numbers of one device, and only sums on the wires."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.kernels.token_stats import fused
from jaxrl_llm.kernels.token_stats.api import token_stats
from jaxrl_llm.kernels.token_stats.definition import OUTPUTS

T, D, V = 13, 8, 37
TARGETS = jnp.array([1, 2, -1, 10, 36, 4, 5, -1, 7, 8, 9, 20, 30])


def mesh_of(sizes, names=("data", "fsdp", "tensor", "context")):
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), names)


def arrays():
    rng = np.random.default_rng(0)
    bias = rng.normal(size=V)
    bias[[0, 3, 35]] = -np.inf
    return tuple(jnp.asarray(x, jnp.float32) for x in (rng.normal(size=(T, D)), rng.normal(size=(V, D)), bias))


def values_and_gradients(mesh, chunk=None, bias=True):
    hidden, head, added = arrays()
    g = np.random.default_rng(1).normal(size=(len(OUTPUTS), T)).astype(np.float32)

    def total(hidden, head, added):
        given = {"bias": added} if bias else {}
        out = token_stats(
            hidden,
            head,
            TARGETS,
            outputs=OUTPUTS,
            noise_key=jax.random.key(3),
            temperature=0.7,
            soft_cap=3.0,
            chunk=chunk,
            mesh=mesh,
            **given,
        )
        return sum((out[name] * g[i]).sum() for i, name in enumerate(OUTPUTS)), out

    step = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2) if bias else (0, 1), has_aux=True))
    (_, out), gradients = step(hidden, head, added)
    return out, gradients


def assert_same(got, want):
    for mine, true in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, true, atol=2e-5, rtol=2e-5)


@pytest.fixture(scope="module")
def alone():
    return values_and_gradients(None)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 1, 2, 1), (1, 2, 2, 1), (2, 1, 2, 2), (1, 1, 8, 1)], ids=str)
def test_any_mesh_gives_the_numbers_of_one_device(sizes, alone):
    assert_same(values_and_gradients(mesh_of(sizes)), alone)


def test_shards_may_work_in_tiles(alone):
    assert_same(values_and_gradients(mesh_of((1, 2, 2, 1)), chunk=5), alone)


def test_shards_may_take_their_tokens_in_shares(alone, monkeypatch):
    # 7 tokens a device: shares of 3, of which the last begins at 4.
    monkeypatch.setattr(fused, "SHARE", fused.Share(tokens=3, elements=2**20, unit=1))
    assert_same(values_and_gradients(mesh_of((1, 2, 2, 1))), alone)


def test_a_vocabulary_that_does_not_divide_is_padded_without_a_trace():
    assert_same(values_and_gradients(mesh_of((1, 1, 4, 1)), bias=False), values_and_gradients(None, bias=False))


def test_a_mesh_may_lack_axes(alone):
    assert_same(values_and_gradients(mesh_of((2,), ("tensor",))), alone)


def test_the_head_gradient_is_rounded_once_after_the_sum_over_token_shards():
    tokens = 64
    hidden = jnp.ones((tokens, D), jnp.bfloat16)
    head = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.bfloat16)
    targets = jnp.arange(tokens) % V

    def gradient(mesh):
        return jax.jit(jax.grad(lambda w: token_stats(hidden, w, targets, mesh=mesh)["logprob"].sum()))(head)

    np.testing.assert_allclose(
        np.float32(gradient(mesh_of((8, 1, 1, 1)))), np.float32(gradient(None)), rtol=2**-8, atol=1e-6
    )


def collectives(mesh, function, *args):
    """[(operation, elements)] of the compiled program."""
    text = jax.jit(function).lower(*args).compile().as_text()
    found = []
    for line in text.splitlines():
        match = re.search(r"= (.+?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)\(", line)
        if match:
            shapes = re.findall(r"\[([\d,]*)\]", match.group(1))
            found.append((match.group(2), sum(math.prod(int(n) for n in s.split(",") if n) for s in shapes)))
    return found


def test_the_forward_exchanges_only_a_maximum_and_sums_of_tokens():
    mesh = mesh_of((2, 1, 2, 1))
    tokens, width, entries = 32, 64, 512
    hidden = jax.device_put(jnp.ones((tokens, width)), NamedSharding(mesh, P(("data", "fsdp", "context"))))
    head = jax.device_put(jnp.ones((entries, width)), NamedSharding(mesh, P("tensor")))
    targets = jax.device_put(jnp.zeros(tokens, jnp.int32), NamedSharding(mesh, P(("data", "fsdp", "context"))))
    found = collectives(mesh, lambda h, w, t: token_stats(h, w, t, mesh=mesh), hidden, head, targets)
    assert found and {operation for operation, _ in found} == {"all-reduce"}
    # Per shard of 16 tokens: the maximum; then total, target and centred sum; and the count of entries.
    assert sum(elements for _, elements in found) <= 16 * 4 + 1
