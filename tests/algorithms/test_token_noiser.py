"""The noiser's loss is the cross-entropy with its noisy target, on the tokens of the better rollouts alone."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import make_batch, make_sequences

from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.algorithms.token_noiser import TokenNoiser
from jaxrl_llm.kernels.token_stats.api import token_stats

V, EPSILON = 9, 0.1
TARGETS = np.array([3, 0, 8, 3], np.int32)
LOGITS = np.random.default_rng(0).normal(size=(len(TARGETS), V)).astype(np.float32)


@cache
def batch_of_all():
    """A batch whose mask holds one row of TARGETS; nothing else of it is read."""
    sequences = make_sequences()
    return make_batch(sequences, GRPO().advantages(sequences), 1.0).replace(mask=jnp.ones((1, len(TARGETS)), bool))


def target_of(noiser, keys=(0,)):
    """The target mass [T, V] that the noiser's gradient by the logits implies: dL/dz = W p - target, sum(target) = W."""
    needs = tuple(sorted(noiser.needs & {"noise_logprob", "uniform_logprob"}))

    batch = batch_of_all()

    @jax.jit
    def gradient_of(logits, key):
        return jax.grad(loss)(logits, key)

    def loss(logits, key):
        stats = token_stats(logits, jnp.eye(V), jnp.asarray(TARGETS), outputs=("logprob", *needs), noise_key=key)
        policy = {n: x[None] for n, x in stats.items()} | {"entries": jnp.float32(V)}
        terms, _ = noiser.loss({"policy": policy}, batch)
        return sum(total for total, _ in terms.values())

    gradients = [np.asarray(gradient_of(LOGITS, jax.random.key(key)), np.float64) for key in keys]
    p = np.exp(LOGITS.astype(np.float64))
    p /= p.sum(1, keepdims=True)
    rows = np.arange(len(TARGETS))
    gradient = np.mean(gradients, axis=0)
    mass = (gradient[rows, TARGETS] + (1 - EPSILON)) / p[rows, TARGETS]  # the target's own share is 1 - epsilon
    return mass[:, None] * p - gradient


@pytest.mark.parametrize("noise", ["sampled", "expected"])
@pytest.mark.parametrize(("weights", "mass"), [("paper", 1.0), ("reference_code", 0.91)])
def test_the_target_mass_is_nine_tenths_and_noise(noise, weights, mass):
    target = target_of(TokenNoiser(base=GRPO(), noise=noise, weights=weights, epsilon=EPSILON))
    np.testing.assert_allclose(target.sum(1), mass, atol=1e-5)
    rows = np.arange(len(TARGETS))
    np.testing.assert_allclose(target[rows, TARGETS], 0.9, atol=1e-5)
    others = np.delete(target, 0, axis=1)[0], target[1, 1:]
    assert (target > -1e-6).all()
    if noise == "expected":
        np.testing.assert_allclose(others[1], (mass - 0.9) / (V - 1), atol=1e-6)
    else:
        assert others[1].std() > 0.05 * (mass - 0.9)


def test_drawn_noise_has_the_expected_noise_as_its_mean():
    sampled, expected = (TokenNoiser(base=GRPO(), noise=n, epsilon=EPSILON) for n in ("sampled", "expected"))
    mean = target_of(sampled, range(60))
    np.testing.assert_allclose(mean, target_of(expected), atol=4 * EPSILON / (V - 1) / np.sqrt(60))


def test_only_tokens_whose_advantage_is_not_negative_are_kept():
    sequences = make_sequences()
    assigned, base = TokenNoiser(base=GRPO()).advantages(sequences), GRPO().advantages(sequences)
    kept, learned = np.asarray(assigned.loss_mask), np.asarray(base.loss_mask)
    np.testing.assert_array_equal(kept, learned & (np.asarray(base.advantages) >= 0))
    assert (
        kept.any() and not kept[np.asarray(base.advantages) < 0].any() and not kept[~np.asarray(sequences.mask)].any()
    )
    np.testing.assert_allclose(assigned.metrics["noiser/kept_fraction"], kept.sum() / learned.sum(), rtol=1e-6)


def test_nothing_kept_is_no_loss():
    sequences = make_sequences()
    assigned = TokenNoiser(base=GRPO()).advantages(replace(sequences, valid=jnp.zeros_like(sequences.valid)))
    assert not np.asarray(assigned.loss_mask).any()
    batch = make_batch(sequences, assigned, 1.0)
    policy = {"logprob": sequences.old_logprobs, "noise_logprob": sequences.old_logprobs}
    policy = {n: jnp.nan_to_num(x) for n, x in policy.items()}
    terms, _ = TokenNoiser(base=GRPO()).loss({"policy": policy}, batch)
    assert [float(total) for total, _ in terms.values()] == [0.0, 0.0]


@pytest.mark.parametrize("field", [{"epsilon": 0.0}, {"epsilon": 1.0}])
def test_settings_that_make_no_sense_are_refused(field):
    with pytest.raises(ValueError, match=f"TokenNoiser.{next(iter(field))} must be"):
        TokenNoiser(base=GRPO(), **field)
