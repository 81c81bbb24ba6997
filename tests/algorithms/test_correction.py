"""Importance weights and rejections against float64 NumPy; bounds are on what their names say."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import make_sequences

from jaxrl_llm.algorithms.correction import Correction, Rejection, log_ratios
from jaxrl_llm.algorithms.grpo import GRPO

SEQUENCES = make_sequences(9)
MASK = np.asarray(SEQUENCES.learned)
RHO = np.where(
    MASK, np.asarray(SEQUENCES.old_logprobs, np.float64) - np.asarray(SEQUENCES.sampler_logprobs, np.float64), 0
)
LENGTH = np.maximum(MASK.sum(1, keepdims=True), 1)


def jax_log_ratios():
    return log_ratios(SEQUENCES.old_logprobs, SEQUENCES.sampler_logprobs, SEQUENCES.learned)


@pytest.mark.parametrize(
    ("level", "ratio"),
    [
        ("token", np.exp(RHO)),
        ("sequence", np.exp(RHO.sum(1, keepdims=True)) * np.ones(RHO.shape)),
        ("geometric", np.exp(RHO.sum(1, keepdims=True) / LENGTH) * np.ones(RHO.shape)),
    ],
)
def test_weights_are_ratios_capped_or_cut_off(level, ratio):
    weights, metrics = Correction(level=level, ratio_max=1.2).weights(jax_log_ratios(), SEQUENCES.learned)
    capped = np.where(MASK, np.minimum(ratio, 1.2), 0)
    np.testing.assert_allclose(weights, capped, rtol=1e-5)
    np.testing.assert_allclose(metrics["correction/changed_fraction"], (ratio > 1.2)[MASK].mean(), rtol=1e-6)
    effective = capped[MASK].mean() ** 2 / (capped[MASK] ** 2).mean()
    np.testing.assert_allclose(metrics["correction/effective_fraction"], effective, rtol=1e-5)

    popped = Correction(level=level, mode="mask", ratio_min=0.8, ratio_max=1.2)
    weights, _ = popped.weights(jax_log_ratios(), SEQUENCES.learned)
    kept = MASK & (ratio >= 0.8) & (ratio <= 1.2)
    assert 0 < kept.sum() < MASK.sum()
    np.testing.assert_allclose(weights, np.where(kept, ratio, 0), rtol=1e-5)


def test_a_sequence_with_a_vetoed_token_has_no_weight() -> None:
    lowest = np.where(MASK, np.exp(RHO), np.inf).min(1)
    bound = float(np.median(lowest[np.isfinite(lowest)]))  # about half of the sequences have a token below it
    weights, metrics = Correction(ratio_max=1.2, veto=bound).weights(jax_log_ratios(), SEQUENCES.learned)
    kept = MASK & (lowest >= bound)[:, None]
    assert 0 < kept.sum() < MASK.sum()
    np.testing.assert_allclose(weights, np.where(kept, np.minimum(np.exp(RHO), 1.2), 0), rtol=1e-5)
    changed = (np.exp(RHO) > 1.2) | ~kept
    np.testing.assert_allclose(metrics["correction/changed_fraction"], changed[MASK].mean(), rtol=1e-6)
    assert GRPO(correction=Correction(veto=0.1)).selects and not GRPO().selects


def test_normalised_weights_have_mean_one():
    weights, _ = Correction(normalize=True).weights(jax_log_ratios(), SEQUENCES.learned)
    np.testing.assert_allclose(np.asarray(weights)[MASK].mean(), 1.0, rtol=1e-5)


def test_far_policies_do_not_overflow():
    far = jnp.full((1, 50), 15.0)
    weights, _ = Correction(level="sequence", ratio_max=1e9).weights(far, jnp.ones((1, 50), bool))
    np.testing.assert_allclose(weights, np.exp(20.0), rtol=1e-5)


@pytest.mark.parametrize("level", ["token", "sum", "mean", "max"])
@pytest.mark.parametrize("statistic", ["k1", "k2", "k3"])
def test_rejection_keeps_what_is_within_its_bounds(statistic, level):
    if (statistic, level) == ("k1", "max"):
        with pytest.raises(ValueError, match=r"correction\.Rejection\.statistic"):
            Rejection(statistic=statistic, level=level)
        return
    x = -RHO
    k = np.where(MASK, {"k1": x, "k2": x**2 / 2, "k3": np.exp(-x) + x - 1}[statistic], 0)
    over = {"token": k, "sum": k.sum(1, keepdims=True), "mean": k.sum(1, keepdims=True) / LENGTH}
    value = over.get(level, k.max(1, keepdims=True)) * np.ones(k.shape)
    limit = np.median(value[MASK]) + 1e-3
    if statistic == "k1":  # an asymmetric interval of the ratio, which would be inverted if it were one of k1
        low, high = 0.7, 3.0
        expected = MASK & (np.exp(-value) >= low) & (np.exp(-value) <= high)
        rejection = Rejection(level=level, ratio_min=low, ratio_max=high)
    else:
        expected = MASK & (value <= limit)
        rejection = Rejection(statistic=statistic, level=level, divergence_max=float(limit))
    assert 0 < expected.sum() < MASK.sum()
    np.testing.assert_array_equal(rejection.keep(jax_log_ratios(), SEQUENCES.learned), expected)


def test_rejected_tokens_leave_the_loss_and_are_counted():
    rejections = (Rejection(ratio_max=1.5, ratio_min=0.0), Rejection(statistic="k2", divergence_max=0.1))
    assigned = GRPO(rejections=rejections).advantages(SEQUENCES)
    expected = MASK & (np.exp(RHO) <= 1.5) & (RHO**2 / 2 <= 0.1)
    np.testing.assert_array_equal(assigned.loss_mask, expected)
    rejected = 1 - expected.sum() / MASK.sum()
    np.testing.assert_allclose(assigned.metrics["correction/rejected_fraction"], rejected, rtol=1e-5)


def test_without_a_correction_all_weights_are_one():
    assert GRPO(correction=None).advantages(SEQUENCES).weights is None


def test_equal_policies_have_weight_one():
    assigned = GRPO().advantages(replace(SEQUENCES, sampler_logprobs=SEQUENCES.old_logprobs))
    np.testing.assert_array_equal(assigned.weights, MASK.astype(np.float32))


@pytest.mark.parametrize(
    ("build", "binding"),
    [
        (lambda: Correction(ratio_min=3.0), r"correction\.Correction\.ratio_min"),
        (lambda: Correction(ratio_max=0.0), r"correction\.Correction\.ratio_min must be in \[0, 0.0\)"),
        (lambda: Rejection(ratio_min=-1.0), "correction.Rejection"),
        (lambda: Rejection(statistic="k2", divergence_max=0.0), "divergence_max"),
    ],
)
def test_a_bad_setting_is_refused_by_its_binding(build, binding):
    with pytest.raises(ValueError, match=binding):
        build()
