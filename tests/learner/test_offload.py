"""Moments that lie on the host learn as those on the device do, and travel a group of parameters at a time."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from learner_cases import GRPO_CASE, batches_of, fresh_state, leaves, make_batch, make_learner

from jaxrl_llm.distributed.mesh import MeshConfig
from jaxrl_llm.learner import offload
from jaxrl_llm.tools import memory

pytestmark = pytest.mark.slow  # its programs take long to compile


def learner_of(away, **changes):
    learner = make_learner(GRPO_CASE, **changes)
    return replace(
        learner, optimizers={"policy": replace(learner.optimizers["policy"], offload=away, max_grad_norm=0.1)}
    )


def kinds(state):
    return {x.sharding.memory_kind for x in jax.tree.leaves(state.moments)}


@pytest.fixture(autouse=True)
def _several_groups(monkeypatch):
    monkeypatch.setattr(offload, "GROUP", 12_000)  # bytes: several groups of the tiny model


@pytest.mark.parametrize("ahead", [2**33, 40_000, 0], ids=["all", "small groups", "none"])
def test_updates_are_those_of_moments_on_the_device(monkeypatch, ahead):
    monkeypatch.setattr(offload, "AHEAD", ahead)
    found = {}
    for away in (False, True):
        learner = learner_of(away)
        state, batches = fresh_state(learner), batches_of(learner, make_batch())
        for _ in range(2):
            state, metrics = learner.update(state, batches)
        found[away] = leaves((state.params, state.moments, state.step)), leaves(metrics)
        assert kinds(state) == {"pinned_host" if away else "device"}
        if away:
            assert len(offload.groups(state.policy)) > 3
            before = learner.compilations
            learner.update(state, batches)
            assert learner.compilations == before
    for here, there in zip(found[False], found[True]):
        assert here.keys() == there.keys()
        for name, x in here.items():
            np.testing.assert_allclose(there[name], x, rtol=1e-6, atol=1e-7, err_msg=name)


def test_a_gradient_that_is_not_finite_changes_nothing_on_the_host():
    learner = learner_of(True)
    state, (batch,) = fresh_state(learner), batches_of(learner, make_batch())
    before = leaves(jax.tree.map(np.array, (state.params, state.moments)))
    state, metrics = learner.update(state, [batch.replace(advantages=batch.advantages * np.float32("inf"))])
    assert int(state.skipped) == 1 and float(metrics["update/skipped"]) == 1
    for name, x in leaves((state.params, state.moments)).items():
        np.testing.assert_array_equal(x, before[name], err_msg=name)


def test_moments_on_the_host_are_split_as_their_parameters_are_and_cost_the_device_nothing():
    learner = learner_of(True, mesh=MeshConfig(fsdp=4), devices=4)
    state = fresh_state(learner)
    for m, x in zip(jax.tree.leaves(state.moments["policy"][0].mu), jax.tree.leaves(state.policy)):
        assert m.sharding == x.sharding.with_memory_kind("pinned_host")
    assert memory.size(learner.abstract) == pytest.approx(memory.size(learner.abstract.params), abs=8)
    assert memory.size(learner_of(False, mesh=MeshConfig(fsdp=4), devices=4).abstract) > 2.9 * memory.size(
        learner.abstract
    )


def test_groups_hold_every_leaf_once_and_stay_within_their_bytes():
    params = fresh_state(learner_of(True)).policy
    found = offload.groups(params, most=12_000)
    paths = [path for group in found for path in group]
    assert sorted(paths) == sorted(tuple(k.key for k in p) for p, _ in jax.tree_util.tree_leaves_with_path(params))
    for group in found:
        size = sum(x.nbytes for x in jax.tree.leaves(offload.pruned(params, group)))
        assert size <= 12_000 or len(group) == 1


def test_a_small_model_has_several_groups_too(monkeypatch):
    monkeypatch.setattr(offload, "GROUP", 2**40)
    params = fresh_state(learner_of(True)).policy
    whole = sum(x.nbytes for x in jax.tree.leaves(params))
    for group in offload.groups(params):
        size = sum(x.nbytes for x in jax.tree.leaves(offload.pruned(params, group)))
        assert size <= whole / offload.PARTS or len(group) == 1


@pytest.mark.parametrize(("arrays", "together"), [(3, 1), (4, 2)], ids=["too large together", "room for two"])
def test_moments_move_in_ahead_where_those_of_two_groups_take_no_more_than_the_parameters(arrays, together):
    one = jax.ShapeDtypeStruct((1000,), np.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    params = {f"p{i}": one for i in range(arrays)}
    found = offload.visits(params, (params, params))
    assert found == [[8000] * together] * (arrays - 1) + [[8000]]  # two moments of 4000 bytes, in a group of one array


@pytest.mark.parametrize("ahead", [2**33, 40_000, 0], ids=["all", "small groups", "none"])
def test_the_account_of_a_streamed_update_frees_each_gradient_and_holds_moments_within_bounds(monkeypatch, ahead):
    monkeypatch.setattr(offload, "AHEAD", ahead)
    learner = learner_of(True)
    state = learner.abstract
    params, moments = state.params["policy"], state.moments["policy"]
    sizes = [sum(x.size for x in jax.tree.leaves(offload.pruned(params, g))) for g in offload.groups(params)]
    assert sizes[1:] == sorted(sizes[1:]) and len(sizes) > 3
    pairs = [8 * sum(sizes[i : i + 2]) for i in range(len(sizes))]
    held = [both if both <= ahead else 8 * size for both, size in zip(pairs, sizes, strict=True)]
    ends = [4 * sum(sizes[i:]) + held[i] for i in range(len(sizes))]
    assert ahead != 40_000 or (any(both <= ahead for both in pairs[:-1]) and any(both > ahead for both in pairs))
    counts = 2 * sum(x.dtype.itemsize * x.size for x in jax.tree.leaves(moments) if x.dtype == np.int32)
    assert max(ends) <= memory.streaming(params, moments, params) <= max(ends) + counts


def test_a_streamed_update_uses_up_its_gradient_and_the_moments_before_it():
    learner = learner_of(True)
    state, (batch,) = fresh_state(learner), batches_of(learner, make_batch())
    gradient, _ = learner._only(state.params, batch, {}, (state.step, np.uint32(0)))
    learner._apply_parts(state, gradient)
    assert all(x.is_deleted() for x in jax.tree.leaves(gradient))
    assert all(x.is_deleted() for x in jax.tree.leaves(state.moments["policy"][0].mu))
