"""Masked statistics and aggregations against NumPy, with NaN everywhere outside the mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.masked import (
    aggregate,
    masked_mean,
    masked_sum,
    masked_var,
    sequence_mean,
    sequence_sum,
    spread,
    whiten,
)

RNG = np.random.default_rng(0)
MASK = RNG.random((3, 8)) < 0.7
X = np.where(MASK, RNG.normal(size=(3, 8)), np.nan).astype(np.float32)
# Four sequences packed in three rows; number 4 has no token, and what is outside the mask bears any number.
SEQUENCE = np.array([[0, 0, 0, 1, 1, 1, 9, 9], [2, 2, 2, 2, 2, 2, 2, 2], [3, 3, 3, 3, 3, 3, 9, 9]])
MASK[[0, 2], -2:] = False
X[~MASK] = np.nan
x, mask, sequence = jnp.asarray(X), jnp.asarray(MASK), jnp.asarray(SEQUENCE)
TOTALS = np.array([np.nansum(np.where((s == SEQUENCE) & MASK, X.astype(np.float64), 0)) for s in range(5)])
TOKENS = np.array([((s == SEQUENCE) & MASK).sum() for s in range(5)])


def test_sums_means_and_variances():
    values = X[MASK].astype(np.float64)
    np.testing.assert_allclose(masked_sum(x, mask), values.sum(), rtol=1e-6)
    np.testing.assert_allclose(masked_mean(x, mask), values.mean(), rtol=1e-5)
    np.testing.assert_allclose(masked_mean(x, mask, axis=1), np.nanmean(X, axis=1), rtol=1e-5)
    for ddof in (0, 1):
        np.testing.assert_allclose(masked_var(x, mask, ddof), values.var(ddof=ddof), rtol=1e-5)


def test_empty_masks_give_zero():
    none = jnp.zeros_like(mask)
    assert float(masked_mean(x, none)) == float(masked_sum(x, none)) == float(masked_var(x, none)) == 0
    assert not np.asarray(whiten(x, none)).any()
    one = none.at[0, np.nonzero(MASK[0])[0][0]].set(True)
    assert float(masked_var(x, one, ddof=1)) == 0
    assert not np.asarray(whiten(x, one)).any()


def test_whitened_values_have_mean_zero_and_variance_one():
    out = np.asarray(whiten(x, mask))
    values = X[MASK].astype(np.float64)
    np.testing.assert_allclose(out[MASK], (values - values.mean()) / values.std(ddof=1), rtol=1e-4, atol=1e-6)
    assert not out[~MASK].any()


def test_the_variance_of_values_far_from_zero_keeps_its_digits():
    far = jnp.asarray(1000.0 + np.where(MASK, X, 0))
    np.testing.assert_allclose(masked_var(far, mask), masked_var(x, mask), rtol=1e-3)


def test_sums_and_means_by_sequence_and_back():
    np.testing.assert_allclose(sequence_sum(x, sequence, mask, 5), TOTALS, rtol=1e-5, atol=1e-6)
    means = TOTALS / np.maximum(TOKENS, 1)
    np.testing.assert_allclose(sequence_mean(x, sequence, mask, 5), means, rtol=1e-5, atol=1e-6)
    back = np.where(MASK, means[np.where(MASK, SEQUENCE, 0)], 0)
    np.testing.assert_allclose(spread(jnp.asarray(means, jnp.float32), sequence, mask), back, rtol=1e-6)


@pytest.mark.parametrize(
    ("how", "total", "count"),
    [
        ("token-mean", TOTALS.sum(), "tokens"),
        ("token-sum", TOTALS.sum(), "one"),
        ("seq-mean-token-sum", TOTALS.sum(), "sequences"),
        ("seq-mean-token-mean", (TOTALS / np.maximum(TOKENS, 1)).sum(), "sequences"),
        ("constant", TOTALS.sum(), "constant"),
    ],
)
def test_aggregations_and_their_gradients(how, total, count):
    value, name = aggregate(x, mask, sequence, 5, how)
    np.testing.assert_allclose(value, total, rtol=1e-5)
    assert name == count
    gradient = np.asarray(jax.grad(lambda x: aggregate(x, mask, sequence, 5, how)[0])(x))
    share = 1 / TOKENS[np.where(MASK, SEQUENCE, 0)] if how == "seq-mean-token-mean" else np.ones(MASK.shape)
    np.testing.assert_allclose(gradient, np.where(MASK, share, 0), rtol=1e-6)


def test_half_precision_is_summed_in_single_precision():
    ones = jnp.ones(4096, jnp.bfloat16)
    total = masked_sum(ones, jnp.ones(4096, bool))
    assert total.dtype == jnp.float32
    assert float(total) == 4096
