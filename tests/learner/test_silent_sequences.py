"""Updates that skip sequences without advantages are the updates of the whole minibatch, and read fewer rows."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import make_group
from learner_cases import (
    GROUPS,
    MEMBERS,
    PACKING,
    RESPONSE,
    TEMPERATURE,
    assert_gradients_agree,
    first_gradient,
    fresh_state,
    host_params,
    leaves,
    make_learner,
    make_rollouts,
    make_stats,
    padded,
    streams_of,
)

from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.learner.batch import Batch

ALGORITHM = GRPO(aggregation="seq-mean-token-mean")


@pytest.fixture(scope="module")
def learner():
    return make_learner(ALGORITHM)


def step(equal, minibatches):
    """(batch, sequences) of a step whose groups named in `equal` have one reward for all."""
    rng, sampler = np.random.default_rng(5), make_stats()["sampler_logprobs"]
    rollouts = [replace(r, sampler_logprobs=x[: len(r.tokens)]) for r, x in zip(make_rollouts(), sampler)]
    groups = []
    for g in range(GROUPS):
        rewards = np.full(MEMBERS, 0.3) if g in equal else rng.normal(size=MEMBERS)
        members = rollouts[g * MEMBERS : (g + 1) * MEMBERS]
        groups.append(make_group(members, {"r": rewards}, {"r": np.ones(MEMBERS, bool)}))
    batch = Batch.build(
        groups, PACKING, minibatches=minibatches, sources=["s"], response_tokens=RESPONSE, capacity=GROUPS * MEMBERS + 2
    )
    stats = {"old_logprobs": batch.tokenwise(list(make_stats()["old_logprobs"]))}
    return batch, batch.sequences(stats, {}, GROUPS)


def updated(learner, batch, sequences, assigned):
    """(parameters, first moments, metrics of each update) after the minibatches in turn."""
    state, found = fresh_state(learner), []
    for mini in batch.micro_batches(sequences, assigned, ALGORITHM.constant, learner.partitioner):
        state, metrics = learner.update(state, mini)
        found.append(jax.device_get(metrics))
    return leaves(state.policy), leaves(state.moments), found


@pytest.mark.parametrize(("equal", "minibatches"), [((1, 3), 1), ((1, 3), 2), ((0, 1), 2)])
def test_updates_are_those_of_all_sequences(learner, equal, minibatches):
    batch, sequences = step(equal, minibatches)
    assigned = jax.device_get(learner.advantages(sequences))
    fewer = batch.without(PACKING, assigned.silent)
    numbers = lambda b: sorted(i for rows in b.rows for i in rows.members.tolist() if i >= 0)  # noqa: E731
    learned = np.flatnonzero((assigned.loss_mask & (assigned.advantages != 0)).any(1)).tolist()
    alone = [0] if equal == (0, 1) else []  # the first minibatch has nothing else
    assert numbers(batch) == list(range(GROUPS * MEMBERS)) and numbers(fewer) == sorted({*learned, *alone})
    whole, part = (updated(learner, b, sequences, assigned) for b in (batch, fewer))
    assert_gradients_agree(part[0], whole[0], 1e-6)
    assert_gradients_agree(part[1], whole[1], 1e-5)
    for a, b in zip(part[2], whole[2], strict=True):
        for name in ("loss/total", "loss/policy", "grad_norm/policy"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-7)


def exact(advantage, counted, read):
    """The gradient of GRPO's objective in float64: means over the tokens of each sequence that is `read`, over the number of all `counted`."""
    stats = {n: x.astype(np.float64) for n, x in make_stats().items()}
    mask = padded()["mask"] & counted[:, None]

    def objective(params):
        ratio = jnp.exp(streams_of(params, TEMPERATURE)[0] - stats["old_logprobs"])
        gain = jnp.minimum(advantage[:, None] * ratio, advantage[:, None] * jnp.clip(ratio, 1 - 0.2, 1 + 0.28))
        loss = -np.minimum(np.exp(stats["old_logprobs"] - stats["sampler_logprobs"]), 2.0) * gain
        means = jnp.sum(jnp.where(mask & read[:, None], loss, 0.0), axis=1) / np.maximum(mask.sum(1), 1)
        return jnp.sum(means) / counted.sum()

    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), host_params())
        return jax.tree.map(np.asarray, jax.jit(jax.grad(objective))(params))


def test_the_gradient_is_that_of_all_sequences_to_1e_8_in_float64_and_the_learners_is_it(learner):
    batch, sequences = step((1, 3), 1)
    assigned = jax.device_get(learner.advantages(sequences))
    reward, advantage = np.asarray(sequences.reward)[: GROUPS * MEMBERS].astype(np.float64), np.zeros(GROUPS * MEMBERS)
    counted = np.array([r.role == "sample" for r in make_rollouts()])
    for g in (0, 2):
        rows = [i for i in range(g * MEMBERS, (g + 1) * MEMBERS) if counted[i]]
        advantage[rows] = (reward[rows] - reward[rows].mean()) / (reward[rows].std(ddof=1) + 1e-6)
    whole, fewer = exact(advantage, counted, counted), exact(advantage, counted, advantage != 0)
    assert 0 < np.sum(advantage != 0) < counted.sum()
    assert_gradients_agree(fewer, whole, 1e-8)
    (mini,) = batch.without(PACKING, assigned.silent).micro_batches(sequences, assigned, 1.0, learner.partitioner)
    state, _ = learner.update(fresh_state(learner), mini)
    assert_gradients_agree(first_gradient(state), whole)


def test_means_over_tokens_are_those_of_the_sequences_that_are_read(learner):
    batch, sequences = step((1, 3), 1)
    assigned = jax.device_get(learner.advantages(sequences))
    (mini,) = batch.without(PACKING, assigned.silent).micro_batches(sequences, assigned, 1.0, learner.partitioner)
    (whole,) = batch.micro_batches(sequences, assigned, 1.0, learner.partitioner)
    speaking = ~np.asarray(assigned.silent)
    assert float(mini[0].counts["tokens"]) == float(whole[0].counts["tokens"]) == assigned.loss_mask.sum()
    assert float(mini[0].counts["read"]) == assigned.loss_mask[speaking].sum()
    assert float(whole[0].counts["read"]) == assigned.loss_mask.sum()
    params = {"policy": fresh_state(learner).policy}
    found, ratio = learner.measure(params, mini)["ratio/mean"], learner.measure(params, whole)["ratio/mean"]
    assert 0.5 < float(found) < 2 and abs(float(found) - float(ratio)) < 0.5


def test_packed_again_after_a_shuffle(learner):
    batch, sequences = step((1, 3), 2)
    assigned = jax.device_get(learner.advantages(sequences))
    dealt = batch.shuffled(PACKING, (0, 1, 1)).without(PACKING, assigned.silent)
    assert [len(members) for members in dealt.counted] == [2 * MEMBERS, 2 * MEMBERS]
    assert not set(np.flatnonzero(assigned.silent)) & {
        i for rows in dealt.rows for i in rows.members.tolist() if i >= 0
    }
