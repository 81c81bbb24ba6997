"""An update is the same on every mesh, and keeps the state where its shardings say."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from learner_cases import (
    GROUPS,
    GRPO_CASE,
    LEARNING_RATE,
    MEMBERS,
    assert_gradients_agree,
    batches_of,
    expected,
    first_gradient,
    fresh_state,
    leaves,
    make_batch,
    make_learner,
    split,
)

from jaxrl_llm.distributed.mesh import MeshConfig
from jaxrl_llm.learner.batch import by_sequence

MESHES = {
    "data2": (MeshConfig(data=2, fsdp=1), 2),
    "fsdp8": (MeshConfig(fsdp=8), 8),
    "fsdp3": (MeshConfig(fsdp=3), 3),  # divides the MLP (48) and not the width (32), which is filled up to 33 elsewhere
    "fsdp6": (MeshConfig(fsdp=6), 6),  # the same, to 36
    "tensor2": (MeshConfig(fsdp=1, tensor=2), 2),
    "context2": (MeshConfig(fsdp=1, context=2), 2),
    "fsdp2_tensor2_context2": (MeshConfig(fsdp=2, tensor=2, context=2), 8),
}
UPDATES = 3


@pytest.fixture(scope="module")
def alone():
    """Metrics of the first update on one device, and the parameters after the last."""
    return updated(make_learner(GRPO_CASE))[1:]


def updated(learner):
    state, batches = fresh_state(learner), batches_of(learner, make_batch())
    state, metrics = learner.update(state, batches)
    gradient = first_gradient(state)
    compilations = learner.compilations
    for _ in range(UPDATES - 1):
        state, _ = learner.update(state, batches)
    assert learner.compilations == compilations
    assert jax.tree.map(lambda x: x.sharding, state) == learner.shardings
    moments = [optax.tree_utils.tree_get(state.moments["policy"], name) for name in ("mu", "nu")]
    for tree in (state.policy, *moments):
        assert not any(jax.tree.leaves(jax.tree.map(beyond, tree, learner.policy.sizes()))), "filling stays 0"
    gradient, params = (jax.tree.map(inside, tree, learner.policy.sizes()) for tree in (gradient, state.policy))
    return gradient, jax.device_get(metrics), leaves(params)


def inside(x, own):
    """The part of a stored array within its own shape."""
    return np.asarray(x)[tuple(map(slice, own.shape))]


def beyond(x, own):
    """How many elements of a stored array outside of its own shape are not 0."""
    return np.count_nonzero(np.asarray(x)) - np.count_nonzero(inside(x, own))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.slow
def test_a_mesh_changes_no_gradient(mesh, alone):
    gradient, metrics, params = updated(make_learner(GRPO_CASE, *MESHES[mesh]))
    value, want = expected("grpo")
    assert_gradients_agree(gradient, want)
    np.testing.assert_allclose(metrics["loss/total"], value, rtol=1e-5)
    first, last = alone
    assert metrics.keys() == first.keys()
    for name, x in first.items():
        np.testing.assert_allclose(metrics[name], x, rtol=1e-5, atol=1e-6, err_msg=name)
    for path, x in last.items():
        # Adam moves an entry by its gradient's sign, so noise in an entry near 0 may move it the other way.
        assert np.abs(params[path] - x).mean() < 0.01 * UPDATES * LEARNING_RATE, path


def test_micro_batches_on_a_mesh_give_the_same_update_and_compile_once():
    learner = make_learner(GRPO_CASE, *MESHES["fsdp2_tensor2_context2"])
    order = np.random.default_rng(3).permutation(GROUPS * MEMBERS)
    batches = batches_of(learner, split(np.split(order, 4)))
    state, metrics = learner.update(fresh_state(learner), batches)
    value, want = expected("grpo")
    assert_gradients_agree(first_gradient(state), want)
    np.testing.assert_allclose(metrics["loss/total"], value, rtol=1e-5)
    compilations = learner.compilations
    assert compilations == 5  # advantages, a micro-batch, zeros and sums of metrics around it, and the optimizer's step
    state, _ = learner.update(state, batches)
    assert learner.compilations == compilations
    assert jax.tree.map(lambda x: x.sharding, state) == learner.shardings


@pytest.mark.parametrize("mesh", ["fsdp8", "fsdp2_tensor2_context2", "fsdp3"])
def test_advantages_are_worked_out_a_share_of_the_sequences_on_each_device(mesh):
    """48 sequences of 1,024 tokens, and 8 or 3 devices: each takes 6 or 16 of them, whatever the axes are."""
    config, devices = MESHES[mesh]
    rng, shape = np.random.default_rng(0), (48, 1024)
    number = lambda: rng.normal(-1, 0.3, shape).astype(np.float32)  # noqa: E731
    batch = replace(make_batch(), capacity=shape[0], response_tokens=shape[1])
    stats = {name: number() for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs", "entropy")}
    given = {"reward": rng.normal(size=48).astype(np.float32), "valid": np.ones(48, bool), "mask": number() > -1.2}
    given["group"] = np.repeat(np.arange(4, dtype=np.int32), 12)
    sequences = replace(batch.sequences(stats, {"kl_coef": 0.1}, 4), **given, greedy=np.zeros(48, bool))
    learner, alone = make_learner(GRPO_CASE, config, devices), make_learner(GRPO_CASE)
    found, want = learner.advantages(sequences), alone.advantages(sequences)
    for path, x in leaves(want).items():
        np.testing.assert_allclose(leaves(found)[path], x, rtol=1e-5, atol=1e-6, err_msg=path)

    def memory(learner):
        placed = by_sequence(sequences, learner.partitioner)
        return learner._advantages.lower(placed).compile().memory_analysis()

    split, whole = memory(learner), memory(alone)
    for name in ("argument_size_in_bytes", "output_size_in_bytes"):
        assert getattr(split, name) < getattr(whole, name) / devices + 4096
    assert split.temp_size_in_bytes < whole.temp_size_in_bytes / devices + 2 * 4 * shape[0] * shape[1] / devices


def test_parameters_and_moments_lie_split_over_the_mesh():
    learner = make_learner(GRPO_CASE, *MESHES["fsdp2_tensor2_context2"])
    state = fresh_state(learner)
    gates = [x for path, x in jax.tree_util.tree_leaves_with_path(state) if "gate" in jax.tree_util.keystr(path)]
    # A parameter and its two moments, [2 layers, width 32 over fsdp, 48 over tensor].
    assert [x.addressable_shards[0].data.shape for x in gates] == [(2, 16, 24)] * 3
    three = fresh_state(make_learner(GRPO_CASE, *MESHES["fsdp3"]))
    uneven = three.policy["layers"]["attention"]["output"]  # [2 layers, 4 heads, 8, width 32]
    assert uneven.shape == (2, 4, 8, 33) and uneven.addressable_shards[2].data.shape == (2, 4, 8, 11)
    other = three.policy["layers"]
    assert {name: x.addressable_shards[0].data.shape for name, x in other["mlp"].items()} == {
        "gate": (2, 32, 16), "up": (2, 32, 16), "down": (2, 16, 32),
    }  # fmt: skip
    (batch,) = batches_of(learner, make_batch())
    assert batch.tokens.addressable_shards[0].data.shape == (4, 16)  # rows over fsdp, positions over context
    assert batch.group.addressable_shards[0].data.shape == (16,)
