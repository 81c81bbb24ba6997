"""The learner's gradient is the objective's, however a step is split; bad gradients change nothing; nothing recompiles."""

import logging

import jax
import numpy as np
import optax
import pytest
from learner_cases import (
    CLIP,
    GROUPS,
    GRPO_CASE,
    MEMBERS,
    SFT_CASE,
    advantages_and_counted,
    assert_gradients_agree,
    batches_of,
    expected,
    expected_streams,
    first_gradient,
    fresh_state,
    leaves,
    make_batch,
    make_learner,
    make_stats,
    padded,
    split,
)

from jaxrl_llm.learner.batch import bare, to_device
from jaxrl_llm.learner.learner import Learner

SEQUENCES = GROUPS * MEMBERS


@pytest.fixture(scope="module")
def grpo() -> Learner:
    return make_learner(GRPO_CASE)


@pytest.fixture(scope="module")
def sft() -> Learner:
    return make_learner(SFT_CASE)


def norm_of(tree):
    return np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in leaves(tree).values()))


def test_scores_are_those_of_the_full_softmax(grpo):
    rows = make_batch().rows
    state = fresh_state(grpo)
    found = [grpo.score(state.params, to_device(bare(r), grpo.partitioner))["policy"] for r in rows]
    logprob, entropy = expected_streams()
    for name, want in {"logprob": logprob, "entropy": entropy}.items():
        got = make_batch().unpack([np.asarray(x[name]) for x in found])
        np.testing.assert_allclose(got[:SEQUENCES], want, rtol=1e-5, atol=1e-5)
        assert not got[SEQUENCES:].any()
    frozen = [np.asarray(grpo.score_frozen(state.policy, to_device(bare(r), grpo.partitioner))) for r in rows]
    np.testing.assert_allclose(make_batch().unpack(frozen)[:SEQUENCES], logprob, rtol=1e-5, atol=1e-5)


def test_credit_is_the_group_relative_advantage_with_truncated_weights(grpo):
    stats = make_stats()
    sequences = make_batch().sequences(
        {n: make_batch().tokenwise(list(stats[n])) for n in ("old_logprobs", "ref_logprobs")},
        {"kl_coef": 0.1},
        GROUPS,
    )
    assigned = jax.device_get(grpo.advantages(sequences))
    advantage, counted = advantages_and_counted()
    mask = padded()["mask"] & counted[:, None]
    np.testing.assert_array_equal(assigned.loss_mask[:SEQUENCES], mask)
    np.testing.assert_allclose(
        assigned.advantages[:SEQUENCES], np.where(mask, advantage[:, None], 0), rtol=1e-5, atol=1e-6
    )
    ratio = np.exp(stats["old_logprobs"].astype(float) - stats["sampler_logprobs"])
    np.testing.assert_allclose(
        assigned.weights[:SEQUENCES], np.where(mask, np.minimum(ratio, 2.0), 0), rtol=1e-5, atol=1e-6
    )
    assert (ratio[mask] > 2).any() and (ratio[mask] < 2).any()


def test_an_update_takes_the_gradient_of_grpo(grpo):
    value, gradient = expected("grpo")
    state, metrics = grpo.update(fresh_state(grpo), batches_of(grpo, make_batch()))
    np.testing.assert_allclose(metrics["loss/total"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm/policy"], norm_of(gradient), rtol=1e-5)
    assert_gradients_agree(first_gradient(state), gradient)
    assert 0 < metrics["ratio/clip_fraction"] < 1  # some tokens are clipped, and most are not
    assert (int(state.step), int(state.skipped), float(metrics["update/skipped"])) == (1, 0, 0.0)


def test_an_update_takes_the_gradient_of_sft_clipped_by_its_global_norm(sft):
    value, gradient = expected("sft")
    norm = norm_of(gradient)
    assert norm > CLIP
    state, metrics = sft.update(fresh_state(sft), batches_of(sft, make_batch()))
    np.testing.assert_allclose(metrics["loss/total"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm/policy"], norm, rtol=1e-5)
    assert_gradients_agree(first_gradient(state), jax.tree.map(lambda g: g * CLIP / norm, gradient))


def test_a_gradient_within_the_limit_is_not_scaled(sft):
    _, gradient = expected("sft")
    (batch,) = batches_of(sft, make_batch())
    fewer = batch.replace(counts={**batch.counts, "tokens": batch.counts["tokens"] * 64})
    state, _ = sft.update(fresh_state(sft), [fewer])
    assert_gradients_agree(first_gradient(state), jax.tree.map(lambda g: g / 64, gradient))


@pytest.mark.parametrize("parts", [2, 4, 8, 9])
def test_any_split_into_micro_batches_gives_the_same_update(grpo, parts):
    value, gradient = expected("grpo")
    order = np.random.default_rng(parts).permutation(SEQUENCES)
    members = [order[start::8].tolist() for start in range(8)] + [[]] if parts == 9 else np.split(order, parts)
    batches = batches_of(grpo, split(members))
    assert len(batches) == parts  # the ninth is empty
    state, metrics = grpo.update(fresh_state(grpo), batches)
    assert_gradients_agree(first_gradient(state), gradient)
    _, whole = grpo.update(fresh_state(grpo), batches_of(grpo, make_batch()))
    assert metrics.keys() == whole.keys()
    for name in whole:
        np.testing.assert_allclose(metrics[name], whole[name], rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(metrics["loss/total"], value, rtol=1e-5)


def test_accumulated_and_whole_updates_lead_to_the_same_parameters(grpo):
    order = np.random.default_rng(0).permutation(SEQUENCES)
    ends = []
    for batches in (batches_of(grpo, make_batch()), batches_of(grpo, split(np.split(order, 2)))):
        state = fresh_state(grpo)
        for _ in range(4):
            state, metrics = grpo.update(state, batches)
        ends.append((leaves(state.policy), float(metrics["loss/total"])))
    (whole, loss), (accumulated, other) = ends
    start = leaves(fresh_state(grpo).policy)
    np.testing.assert_allclose(loss, other, rtol=1e-4)
    for path in whole:
        # Adam divides by the gradient's own size, so noise in entries near 0 moves them by up to the learning rate.
        moved = np.abs(whole[path] - start[path]).mean()
        assert moved > 5e-4 and np.abs(whole[path] - accumulated[path]).mean() < 0.01 * moved, path
    assert loss < expected("grpo")[0]


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(grpo):
    (batch,) = batches_of(grpo, make_batch())
    state, _ = grpo.update(fresh_state(grpo), [batch])
    before = leaves({"params": state.params, "moments": state.moments})
    for count in (1, 2):
        state, metrics = grpo.update(state, [batch.replace(advantages=batch.advantages.at[0, 0].set(np.nan) * np.inf)])
        assert (int(state.step), int(state.skipped), float(metrics["update/skipped"])) == (1 + count, count, 1.0)
    after = leaves({"params": state.params, "moments": state.moments})
    for path, x in before.items():
        np.testing.assert_array_equal(x, after[path], err_msg=path)
    state, metrics = grpo.update(state, [batch])
    assert (int(state.step), int(state.skipped), float(metrics["update/skipped"])) == (4, 0, 0.0)
    assert int(optax.tree_utils.tree_get(state.moments["policy"], "ScaleByAdamState").count["embedding"]) == 2


@pytest.mark.parametrize("parts", [1, 2])
def test_the_old_state_is_donated_and_a_second_update_compiles_nothing(grpo, parts, caplog):
    batches = batches_of(grpo, split(np.split(np.arange(SEQUENCES), parts)))
    old = fresh_state(grpo)
    state, _ = grpo.update(old, batches)
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
    before = grpo.compilations
    with jax.log_compiles(), caplog.at_level(logging.DEBUG, logger="jax"):
        state, _ = grpo.update(state, batches)
        jax.block_until_ready(state)
        assert not [r.getMessage() for r in caplog.records if "ompil" in r.getMessage()]
        jax.jit(lambda x: x + parts)(1.0)  # this is what a compilation would have looked like
        assert [r.getMessage() for r in caplog.records if "ompil" in r.getMessage()]
    assert grpo.compilations == before > 0


def test_the_abstract_state_describes_the_state(grpo):
    state = fresh_state(grpo)
    described = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), grpo.abstract)
    assert described == jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)
