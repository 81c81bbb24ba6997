"""Hidden states, gradients and cached runs are the same on every mesh."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import slow_but

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models.mistral import Mistral
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen2 import Qwen2

SIZES = {"vocabulary_size": 64, "width": 32, "layers": 2, "mlp_width": 48, "init_std": 0.2}
MESHES = {
    "tensor2": (MeshConfig(fsdp=1, tensor=2), 2),
    "context2": (MeshConfig(fsdp=1, context=2), 2),
    "context4": (MeshConfig(fsdp=1, context=4), 4),
    "fsdp2_tensor2_context2": (MeshConfig(fsdp=2, tensor=2, context=2), 8),
    "fsdp2_tensor4": (MeshConfig(fsdp=2, tensor=4), 8),  # more shards than key/value heads
}
MODELS = {
    "qwen2": Qwen2(**SIZES, heads=4, kv_heads=2, head_width=8),
    "ministral": Mistral(**SIZES, heads=4, kv_heads=1, head_width=8, window=3, sliding=(False, True)),
    "odd_heads": Qwen2(**SIZES, heads=3, kv_heads=3, head_width=8),
}
ROWS, LENGTH = 4, 8


def policy_on(name, config, devices):
    return Policy(MODELS[name], Partitioner.create(config, jax.devices()[:devices]))


def packed_rows():
    tokens = jax.random.randint(jax.random.key(1), (ROWS, LENGTH), 0, 64)
    positions = jnp.tile(jnp.array([0, 1, 2, 3, 4, 0, 1, 0]), (ROWS, 1))
    segments = jnp.tile(jnp.array([1, 1, 1, 1, 1, 2, 2, 0]), (ROWS, 1))
    return tokens, positions, segments


def placed(policy, params):
    """Parameters moved onto the policy's mesh."""
    return jax.tree.map(lambda x, like: jax.device_put(np.asarray(x), like.sharding), params, policy.abstract())


def results(policy, params):
    """Hidden states and gradients of packed rows, and the hidden states of a cached run of 4 tokens and then 1."""
    tokens, positions, segments = packed_rows()

    def loss(params):
        hidden = policy.hidden(params, tokens, positions, segments, max_segments=2)
        return jnp.sum(jnp.where(segments[..., None] > 0, hidden, 0) ** 3), hidden

    (_, hidden), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    extend = jax.jit(policy.extend, donate_argnums=1)
    first, entries = extend(params, policy.cache(ROWS, LENGTH), tokens[:, :4], jnp.tile(jnp.arange(4), (ROWS, 1)))
    second, _ = extend(params, entries, tokens[:, 4:5], jnp.full((ROWS, 1), 4))
    return hidden, grads, jnp.concatenate([first, second], axis=1)


@cache
def single(name):
    """Parameters and results on one device."""
    policy = policy_on(name, MeshConfig(fsdp=1), 1)
    params = policy.init(jax.random.key(0))
    return params, results(policy, params)


CASES = [("qwen2", mesh) for mesh in ("tensor2", "context2", "fsdp2_tensor2_context2")]
CASES += [
    ("ministral", "fsdp2_tensor4"),
    ("odd_heads", "tensor2"),
    ("odd_heads", "context2"),
    ("ministral", "context4"),
]
QUICK = (("qwen2", "fsdp2_tensor2_context2"), ("odd_heads", "tensor2"), ("ministral", "context4"))


@pytest.mark.parametrize(("name", "mesh"), slow_but(QUICK, CASES))
def test_a_mesh_changes_no_value(name, mesh):
    params, (hidden, grads, cached) = single(name)
    policy = policy_on(name, *MESHES[mesh])
    got_hidden, got_grads, got_cached = results(policy, placed(policy, params))
    np.testing.assert_allclose(got_hidden[:, :7], hidden[:, :7], atol=1e-5)
    np.testing.assert_allclose(got_cached, cached, atol=1e-5)
    for got, want in zip(jax.tree.leaves(got_grads), jax.tree.leaves(grads)):
        np.testing.assert_allclose(got, want, atol=1e-5 * float(jnp.abs(want).max()) + 1e-5)


@pytest.mark.parametrize(("name", "heads", "kv_heads"), [("qwen2", 1, 1), ("odd_heads", 1, 1)])
def test_a_context_axis_splits_heads_and_leaves_packed_rows_whole(name, heads, kv_heads, monkeypatch):
    """A fused backend takes whole rows alone; heads that four devices do not divide (3) are filled up to four."""
    seen = []

    def attention(q, k, v, **places):
        seen.append((q.shape, k.shape, places["q_segments"].shape, places["max_segments"]))
        return q

    monkeypatch.setattr("jaxrl_llm.models.attention.attention", attention)
    policy = policy_on(name, *MESHES["context4"])
    step = jax.jit(lambda params: policy.hidden(params, *packed_rows(), max_segments=2))
    text = step.lower(policy.abstract()).compile().as_text()
    rows, whole = (ROWS, LENGTH, heads, 8), (ROWS, LENGTH)
    assert set(seen) == {(rows, (ROWS, LENGTH, kv_heads, 8), whole, 2)}
    assert "all-to-all" in text


def test_random_parameters_are_the_same_on_every_mesh_and_are_split_as_declared():
    one = policy_on("qwen2", MeshConfig(fsdp=1), 1).init(jax.random.key(5))
    policy = policy_on("qwen2", MeshConfig(fsdp=4, tensor=2), 8)
    many = policy.init(jax.random.key(5))
    for a, b, declared in zip(jax.tree.leaves(one), jax.tree.leaves(many), jax.tree.leaves(policy.abstract())):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert b.sharding == declared.sharding
    local = {name: leaf.addressable_shards[0].data.shape for name, leaf in many["layers"]["mlp"].items()}
    assert local == {"gate": (2, 8, 24), "up": (2, 8, 24), "down": (2, 24, 8)}
    attention = many["layers"]["attention"]
    assert attention["query"]["kernel"].addressable_shards[0].data.shape == (2, 8, 2, 8)
    assert attention["output"].addressable_shards[0].data.shape == (2, 2, 8, 8)
    assert many["embedding"].addressable_shards[0].data.shape == (32, 8)


def test_decoding_on_a_mesh_moves_no_cache_between_devices():
    policy = policy_on("qwen2", MeshConfig(fsdp=4, tensor=2), 8)
    params, entries = policy.init(jax.random.key(0)), policy.cache(8, 16)
    assert entries["k"].addressable_shards[0].data.shape == (2, 2, 16, 1, 8)
    tokens = positions = jnp.zeros((8, 1), jnp.int32)
    text = jax.jit(policy.extend, donate_argnums=1).lower(params, entries, tokens, positions).compile().as_text()
    moves = [line for line in text.splitlines() if any(op in line for op in ("all-gather(", "all-to-all(", "permute("))]
    # Weights and activations move; nothing as long as the cache (16 entries a slot) does.
    assert moves
    assert not [line for line in moves if "16," in line.split("=")[1].split("(")[0]]
