"""Laws that every algorithm of gin/algorithms obeys; a new gin file is tested without touching this one."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import TOKENS, make_batch, make_outputs, make_sequences, total_loss, value_and_gradient

import jaxrl_llm
from jaxrl_llm.algorithms.grpo import PolicyGradient
from jaxrl_llm.protocols import NEEDS, Learns

FOLDER = Path(jaxrl_llm.__file__).parent / "gin" / "algorithms"
NAMES = sorted(path.stem for path in FOLDER.glob("*.gin"))
MACROS = ["RESPONSE_LIMIT = 6", "GROUP_SIZE = 4"]


@cache
def build(name):
    """The algorithm that a gin file names."""
    gin.clear_config(clear_constants=True)
    gin.parse_config_files_and_bindings([str(FOLDER / f"{name}.gin")], MACROS)
    return gin.get_configurable("ALGORITHM/gin.macro")()


@cache
def advantages_of(name):
    """The algorithm's advantages, compiled once."""
    return jax.jit(build(name).advantages)


def sequences_of(name, **changes):
    """Sequences with all that any algorithm may need: groups of unequal size with a greedy response, or pairs."""
    paired = build(name).learns_from == "pairs" or "sides" in build(name).needs
    sequences = make_sequences(4, pairs=paired, **changes)
    if "greedy" in build(name).needs:
        first = np.concatenate([[True], np.asarray(sequences.group[1:-1] != sequences.group[:-2]), [False]])
        sequences = replace(sequences, greedy=jnp.asarray(first))
    return sequences


@cache
def made(name):
    """(sequences, advantages, batch with one sequence a row, outputs)."""
    sequences = sequences_of(name)
    assigned = advantages_of(name)(sequences)
    return sequences, assigned, make_batch(sequences, assigned, build(name).constant), make_outputs(sequences)


def case(name):
    """(algorithm, sequences, advantages, batch, outputs), of which a test may change the outputs."""
    sequences, assigned, batch, outputs = made(name)
    return build(name), sequences, assigned, batch, {model: dict(stats) for model, stats in outputs.items()}


def packed(outputs, rows):
    """[S, T] outputs side by side in rows, as the batch of the same rows is."""
    width = TOKENS * max(len(r) for r in rows)

    def pack(x):
        out = np.full((len(rows), width), np.nan, np.float32)
        for line, members in zip(out, rows):
            for place, i in enumerate(members):
                line[place * TOKENS : (place + 1) * TOKENS] = np.asarray(x)[i]
        return jnp.asarray(out)

    return jax.tree.map(pack, outputs)


def test_there_is_an_algorithm_to_test():
    assert {"grpo", "dr_grpo", "dapo", "gspo", "rloo", "ppo", "sft", "dpo", "kto"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_needs(name):
    algorithm = build(name)
    assert algorithm.learns_from in get_args(Learns)
    assert algorithm.needs <= NEEDS
    assert algorithm.group_size_at_least >= 1
    assert algorithm.constant > 0
    assert all(np.isfinite(x) for x in algorithm.controls.values())
    assert hash(algorithm) == hash(replace(algorithm))


@pytest.mark.parametrize("name", NAMES)
def test_loss_gradient_and_metrics_are_finite_though_all_else_is_nan(name):
    algorithm, _, assigned, batch, outputs = case(name)
    value, gradient = value_and_gradient(algorithm, outputs, batch)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert (gradient[~np.asarray(assigned.loss_mask)] == 0).all()
    _, metrics = algorithm.loss(outputs, batch)
    assert "loss/policy" in metrics or "loss/reward_model" in metrics
    assert all(np.isfinite(x) and count in batch.counts for x, count in metrics.values())
    assert all(np.isfinite(x) for x in assigned.metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_learns_something(name):
    algorithm, _, assigned, batch, outputs = case(name)
    _, gradient = value_and_gradient(algorithm, outputs, batch)
    assert np.asarray(assigned.loss_mask).any()
    assert np.abs(gradient).max() > 1e-4


SAMPLED = [name for name in NAMES if isinstance(build(name), PolicyGradient)]


@pytest.mark.parametrize("name", SAMPLED)
def test_without_advantage_there_is_no_policy_gradient(name):
    algorithm, sequences, assigned, batch, outputs = case(name)
    outputs["policy"]["logprob"] = sequences.old_logprobs
    batch = batch.replace(advantages=jnp.zeros_like(batch.advantages))

    def policy_term(logprob):
        terms, _ = algorithm.loss({**outputs, "policy": {**outputs["policy"], "logprob": logprob}}, batch)
        return terms["policy"][0]

    gradient = jax.grad(policy_term)(sequences.old_logprobs)
    np.testing.assert_array_equal(np.where(np.asarray(assigned.loss_mask), gradient, 0), 0)


@pytest.mark.parametrize("name", [n for n in SAMPLED if n != "clip_cov"])  # drops tokens on-policy too
def test_on_policy_the_gradient_is_that_of_reinforce(name):
    """At ratio 1 nothing is clipped: the gradient of each token is -weight x advantage, as its own aggregation has
    it."""
    algorithm, sequences, assigned, batch, outputs = case(name)
    outputs["policy"]["logprob"] = sequences.old_logprobs

    def policy_term(logprob):
        terms, _ = algorithm.loss({**outputs, "policy": {**outputs["policy"], "logprob": logprob}}, batch)
        total, count = terms["policy"]
        return total / batch.counts[count]

    gradient = np.asarray(jax.grad(policy_term)(sequences.old_logprobs), np.float64)
    mask = np.asarray(assigned.loss_mask)
    length = np.maximum(mask.sum(1, keepdims=True), 1)
    share = {
        "token-mean": 1 / mask.sum(),
        "seq-mean-token-sum": 1 / mask.any(1).sum(),
        "seq-mean-token-mean": 1 / mask.any(1).sum() / length,
        "constant": 1 / mask.any(1).sum() / algorithm.constant,
    }[algorithm.aggregation]
    weights = np.asarray(1.0 if assigned.weights is None else assigned.weights, np.float64) * np.ones(mask.shape)
    if name == "gmpo":  # one ratio a sequence: each token has the same gradient, of the mean weight
        weights = np.where(mask, weights, 0).sum(1, keepdims=True) / length
    expected = np.where(mask, -weights * np.asarray(assigned.advantages, np.float64) * share, 0)
    np.testing.assert_allclose(np.where(mask, gradient, 0), expected, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_invalid_sequences_and_masked_tokens_have_no_influence(name):
    algorithm, sequences, assigned, batch, outputs = case(name)
    hidden = ~np.asarray(sequences.mask)
    other = {
        f: np.where(hidden, 7.0, getattr(sequences, f)) for f in ("old_logprobs", "sampler_logprobs", "ref_logprobs")
    }
    other |= {f: np.where(hidden, 7.0, getattr(sequences, f)) for f in ("entropy", "sum_p2", "values")}
    changed = replace(
        sequences,
        reward=sequences.reward.at[-1].set(1e6),
        parts={n: x.at[-1].set(-1e6) for n, x in sequences.parts.items()},
        **{n: jnp.asarray(x, jnp.float32) for n, x in other.items()},
    )
    again = advantages_of(name)(changed)
    np.testing.assert_array_equal(again.loss_mask, assigned.loss_mask)
    np.testing.assert_array_equal(again.advantages, assigned.advantages)
    filled = jax.tree.map(lambda x: jnp.where(jnp.asarray(hidden), 3.0, x), outputs)
    before = value_and_gradient(algorithm, outputs, batch)
    after = value_and_gradient(algorithm, filled, make_batch(changed, again, algorithm.constant))
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_array_equal(after[1], before[1])


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_sequences_and_groups_does_not_matter(name):
    sequences, assigned = sequences_of(name), None
    assigned = advantages_of(name)(sequences)
    order = np.random.default_rng(0).permutation(len(sequences.group))
    number = np.random.default_rng(1).permutation(sequences.groups)
    moved = jax.tree.map(lambda x: x[order], sequences)
    moved = replace(moved, group=jnp.asarray(number)[moved.group])
    again = advantages_of(name)(moved)
    np.testing.assert_allclose(again.advantages, np.asarray(assigned.advantages)[order], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(again.loss_mask, np.asarray(assigned.loss_mask)[order])
    for stat, x in assigned.aux.items():
        np.testing.assert_allclose(again.aux[stat], np.asarray(x)[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_more_padding_changes_nothing(name):
    sequences = sequences_of(name)
    assigned = advantages_of(name)(sequences)

    def wider(x):
        rows = jnp.zeros((3, *x.shape[1:]), x.dtype)
        x = jnp.concatenate([x, rows])
        return jnp.concatenate([x, jnp.zeros((x.shape[0], 2), x.dtype)], axis=1) if x.ndim == 2 else x

    again = build(name).advantages(jax.tree.map(wider, sequences))
    shape = assigned.advantages.shape
    np.testing.assert_allclose(again.advantages[: shape[0], : shape[1]], assigned.advantages, rtol=1e-4, atol=1e-5)
    assert int(again.loss_mask.sum()) == int(assigned.loss_mask.sum())


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_and_packed_rows_sum_to_the_whole(name):
    algorithm, sequences, assigned, batch, outputs = case(name)
    whole = float(total_loss(algorithm, outputs, batch))
    real = len(sequences.group) - len(sequences.group) % 2  # two to a row, where the halves of a pair stay together
    rows = [[i, i + 1] for i in range(0, real, 2)]
    for size in (1, 4):
        parts = [rows[i : i + size] for i in range(0, len(rows), size)]
        split = sum(
            float(
                total_loss(algorithm, packed(outputs, part), make_batch(sequences, assigned, algorithm.constant, part))
            )
            for part in parts
        )
        np.testing.assert_allclose(split, whole, rtol=2e-5, atol=2e-6)
