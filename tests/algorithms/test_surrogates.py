"""Every surrogate's loss and gradient against float64 NumPy, written from the definition and differentiated
numerically."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import make_batch, make_outputs, make_sequences, numeric_gradient, value_and_gradient

from jaxrl_llm.algorithms.cispo import CISPO
from jaxrl_llm.algorithms.clip_cov import ClipCov
from jaxrl_llm.algorithms.dppo import DPPO
from jaxrl_llm.algorithms.dro import DRO
from jaxrl_llm.algorithms.gmpo import GMPO
from jaxrl_llm.algorithms.gpg import GPG
from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.algorithms.gspo import GSPO
from jaxrl_llm.algorithms.kl_cov import KLCov
from jaxrl_llm.algorithms.ppo import PPO
from jaxrl_llm.algorithms.reinforce import Reinforce
from jaxrl_llm.algorithms.sapo import SAPO
from jaxrl_llm.algorithms.vespo import VESPO


class Stats:
    """The stats of a case in float64, 0 outside the mask; `at` is where stopped gradients stand still."""

    def __init__(self, sequences, assigned, outputs):
        self.mask = np.asarray(assigned.loss_mask)
        clean = lambda x: np.where(self.mask, np.asarray(x, np.float64), 0)  # noqa: E731
        self.a, self.old, self.at = (
            clean(assigned.advantages),
            clean(sequences.old_logprobs),
            clean(outputs["policy"]["logprob"]),
        )
        self.w = 1.0 if assigned.weights is None else clean(assigned.weights)
        self.length = self.mask.sum(1, keepdims=True)

    def mean(self, x):
        return np.where(self.mask, x, 0).sum(1, keepdims=True) / np.maximum(self.length, 1)


def clip(s, new, low=0.2, high=0.2):
    rho = np.exp(new - s.old)
    return np.maximum(-s.a * rho, -s.a * np.clip(rho, 1 - low, 1 + high))


def gspo(s, new):
    # The value is the sequence's; a token's gradient is its own log-prob's.
    ratio = np.exp(new - s.at + s.mean(s.at - s.old))
    return np.maximum(-s.a * ratio, -s.a * np.clip(ratio, 0.9, 1.1))


def dual_clipped(rule, dual):
    """The rule, where a negative advantage counts at most `dual` times."""
    return lambda s, new: np.where(s.a < 0, np.minimum(rule(s, new), -s.a * dual), rule(s, new))


def sapo(s, new):
    tau = np.where(s.a > 0, 1.0, 1.05)
    return -s.a * 4 / tau / (1 + np.exp(-tau * (np.exp(new - s.old) - 1)))


def cispo(s, new, low=np.inf):
    return -np.clip(np.exp(s.at - s.old), 1 - low, 1.3) * s.a * new


def gmpo(s, new):
    sign, d = np.where(s.a < 0, -1, 1), new - s.old
    kept = sign * np.minimum(sign * d, sign * np.clip(d, -0.1, 0.1))
    return -s.mean(s.a) * np.exp(s.mean(kept)) * np.ones(d.shape)


def dppo_tv(s, new):
    gap = np.exp(s.at) - np.exp(s.old)
    keep = np.where(s.a > 0, gap <= 0.02, gap >= -0.02)
    return -s.a * np.minimum(np.exp(s.at - s.old), 1.2) * new * keep


def dppo_kl(s, new):
    p, q = np.exp(np.where(s.mask, s.at, -1)), np.exp(np.where(s.mask, s.old, -1))
    kl = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    keep = (kl <= 0.005) | np.where(s.a > 0, p <= q, p >= q)
    return -s.a * np.minimum(np.exp(s.at - s.old), 20) * new * keep


def vespo(s, new):
    whole = np.exp(np.where(s.mask, s.at - s.old, 0).sum(1, keepdims=True))
    weight = np.where(
        s.a >= 0, np.exp(3.0) * whole**2 * np.exp(-3.0 * whole), np.exp(2.0) * whole**3 * np.exp(-2.0 * whole)
    )
    return -weight * s.a * new


def dro(s, new):
    return -(s.a * new - 0.25 * (new - s.old) ** 2)


CASES = {
    "gspo": (GSPO(clip_low=0.1, clip_high=0.1), gspo),
    "gspo with a dual clip": (GSPO(clip_low=0.1, clip_high=0.1, clip_dual=1.11), dual_clipped(gspo, 1.11)),
    "luspo": (GSPO(clip_low=0.1, clip_high=0.1, aggregation="seq-mean-token-sum"), gspo),
    "vespo": (VESPO(), vespo),
    "sapo": (SAPO(), sapo),
    "cispo": (CISPO(clip_high=0.3), cispo),
    "cispo with both bounds": (CISPO(clip_low=0.1, clip_high=0.3), lambda s, new: cispo(s, new, 0.1)),
    "gmpo": (GMPO(clip_low=0.1, clip_high=0.1), gmpo),
    "dppo_tv": (DPPO(low=0.02, high=0.02, ratio_max=1.2), dppo_tv),
    "dppo_kl": (DPPO(divergence="kl", low=0.005, high=0.005), dppo_kl),
    "dro": (DRO(beta=0.5), dro),
    "ppo": (PPO(), clip),
    "gpg": (GPG(), lambda s, new: -s.a * new),
    "reinforce": (Reinforce(), lambda s, new: -s.a * new),
    "importance ratio": (Reinforce(objective="ratio", correction=None), lambda s, new: -s.a * np.exp(new - s.old)),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_follow_the_definition(name):
    algorithm, rule = CASES[name]
    sequences = make_sequences(11)
    assigned = algorithm.advantages(sequences)
    outputs = make_outputs(sequences)
    s = Stats(sequences, assigned, outputs)

    def expected(new):
        losses = np.where(s.mask, s.w * rule(s, np.where(s.mask, new, 0)), 0)
        if algorithm.aggregation == "seq-mean-token-mean":
            return (losses.sum(1) / np.maximum(s.length[:, 0], 1)).sum() / s.mask.any(1).sum()
        return losses.sum() / (s.mask.any(1) if algorithm.aggregation == "seq-mean-token-sum" else s.mask).sum()

    batch = make_batch(sequences, assigned, algorithm.constant)

    def policy_term(logprob):
        terms, _ = algorithm.loss({**outputs, "policy": {**outputs["policy"], "logprob": logprob}}, batch)
        total, count = terms["policy"]
        return total / batch.counts[count]

    value, gradient = jax.value_and_grad(policy_term)(outputs["policy"]["logprob"])
    np.testing.assert_allclose(value, expected(s.at), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(gradient, numeric_gradient(expected, s.at, s.mask), rtol=2e-4, atol=2e-6)


def test_the_bounds_of_the_cases_bind_on_some_tokens_and_not_on_others():
    sequences = make_sequences(11)
    for name in ("gspo", "cispo", "cispo with both bounds", "gmpo", "dppo_tv", "dppo_kl", "ppo"):
        algorithm, _ = CASES[name]
        assigned = algorithm.advantages(sequences)
        _, metrics = algorithm.loss(make_outputs(sequences), make_batch(sequences, assigned, 1.0))
        assert 0 < float(metrics["ratio/clip_fraction"][0]) < int(np.asarray(assigned.loss_mask).sum()), name


def test_vespo_keeps_a_sequences_ratio_within_its_bounds():
    sequences = make_sequences(11)
    algorithm = VESPO()
    assigned = algorithm.advantages(sequences)
    for distance in (-30.0, 30.0):
        outputs = {"policy": {"logprob": sequences.old_logprobs + distance}}
        value, gradient = value_and_gradient(algorithm, outputs, make_batch(sequences, assigned, 1.0))
        assert np.isfinite(value) and np.abs(gradient).max() < 1e-12  # the weight of such a sequence is 0


def test_the_divergence_times_the_ratio_is_that_of_the_policy_now():
    sequences = make_sequences(11)
    algorithm = GRPO(kl_coef=0.5, kl_by_ratio=True)
    assigned, outputs = algorithm.advantages(sequences), make_outputs(sequences)
    s, mask = Stats(sequences, assigned, outputs), np.asarray(assigned.loss_mask)
    ref, batch = np.where(mask, np.asarray(sequences.ref_logprobs, np.float64), 0), make_batch(sequences, assigned, 1.0)

    def expected(new):
        k3 = np.exp(ref - new) - (ref - new) - 1
        return 0.5 * np.where(mask, np.exp(new - s.old) * k3, 0).sum() / mask.sum()

    def kl_term(logprob):
        total, count = algorithm.loss({**outputs, "policy": {**outputs["policy"], "logprob": logprob}}, batch)[0]["kl"]
        return total / batch.counts[count]

    value, gradient = jax.value_and_grad(kl_term)(outputs["policy"]["logprob"])
    np.testing.assert_allclose(value, expected(s.at), rtol=2e-5)
    np.testing.assert_allclose(gradient, numeric_gradient(expected, s.at, mask), rtol=2e-4, atol=2e-6)
    plain = GRPO(kl_coef=0.5).loss(outputs, batch)[0]["kl"][0]
    assert abs(float(plain) / mask.sum() / expected(s.at) - 1) > 0.02
    with pytest.raises(ValueError, match=r"grpo\.GRPO\.kl_by_ratio"):
        GRPO(kl_coef=0.5, kl_by_ratio=True, kl_in="reward")


@pytest.mark.parametrize("limit", [0.1, None])
def test_the_critic_learns_the_returns_within_its_limit(limit):
    sequences = make_sequences(11)
    algorithm = PPO(value_clip=limit, value_coef=0.5)
    assigned = algorithm.advantages(sequences)
    outputs, batch, mask = make_outputs(sequences), make_batch(sequences, assigned, 1.0), np.asarray(assigned.loss_mask)
    v, old, r = (
        np.where(mask, np.asarray(x, np.float64), 0)
        for x in (outputs["critic"]["value"], sequences.values, assigned.returns)
    )

    def expected(v):
        plain = (v - r) ** 2
        moved = plain if limit is None else (np.clip(v, old - limit, old + limit) - r) ** 2
        return 0.25 * np.where(mask, np.maximum(plain, moved), 0).sum() / mask.sum()

    def value_term(value):
        total, count = algorithm.loss({**outputs, "critic": {"value": value}}, batch)[0]["value"]
        return total / batch.counts[count]

    value, gradient = jax.value_and_grad(value_term)(outputs["critic"]["value"])
    np.testing.assert_allclose(value, expected(v), rtol=1e-5)
    np.testing.assert_allclose(gradient, numeric_gradient(expected, v, mask), rtol=1e-4, atol=1e-6)


def covariances(sequences, assigned):
    mask = np.asarray(assigned.loss_mask)
    a, p = np.asarray(assigned.advantages, np.float64), np.asarray(sequences.old_logprobs, np.float64)
    return mask, np.where(mask, (a - a[mask].mean()) * (p - p[mask].mean()), -np.inf)


def test_kl_cov_holds_back_the_tokens_of_highest_covariance():
    sequences = make_sequences(12)
    algorithm = KLCov(share=0.1, coef=0.7, correction=None)
    assigned = algorithm.advantages(sequences)
    mask, cov = covariances(sequences, assigned)
    count = int(0.1 * mask.sum())
    held = cov >= np.sort(cov.ravel())[::-1][count - 1]
    np.testing.assert_array_equal(assigned.aux["held"], held)
    outputs = make_outputs(sequences)
    s = Stats(sequences, assigned, outputs)

    def expected(new):
        losses = -s.a * np.exp(new - s.old) + 0.7 * held * np.abs(new - s.old)
        return losses[mask].sum() / mask.sum()

    value, gradient = value_and_gradient(algorithm, outputs, make_batch(sequences, assigned, 1.0))
    np.testing.assert_allclose(value, expected(s.at), rtol=1e-5)
    np.testing.assert_allclose(gradient, numeric_gradient(expected, s.at, mask), rtol=1e-4, atol=1e-6)


def test_at_least_one_token_is_held_back():
    assigned = KLCov(share=1e-6).advantages(make_sequences(12))
    assert int(assigned.aux["held"].sum()) == 1


def test_clip_cov_leaves_out_a_share_of_the_tokens_of_high_covariance():
    sequences = make_sequences(12)
    algorithm = ClipCov(share=0.1, covariance_min=0.2, covariance_max=1.0, correction=None)
    assigned = algorithm.advantages(sequences)
    mask, cov = covariances(sequences, assigned)
    eligible = (cov > 0.2) & (cov < 1.0)
    left_out = np.asarray(assigned.aux["left_out"])
    assert eligible.sum() > left_out.sum() == int(0.1 * mask.sum())
    assert not (left_out & ~eligible).any()
    outputs = make_outputs(sequences)
    s = Stats(sequences, assigned, outputs)
    clipped = clip(s, s.at) > -s.a * np.exp(s.at - s.old)

    def expected(new):
        return np.where(left_out & ~clipped, 0, clip(s, new))[mask].sum() / mask.sum()

    value, gradient = value_and_gradient(algorithm, outputs, make_batch(sequences, assigned, 1.0))
    np.testing.assert_allclose(value, expected(s.at), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, numeric_gradient(expected, s.at, mask), rtol=1e-4, atol=1e-6)


def test_the_draw_of_clip_cov_is_the_same_for_the_same_batch_and_another_for_another():
    sequences = make_sequences(12)
    algorithm = ClipCov(share=0.1, covariance_min=-5.0, covariance_max=5.0)
    first, again = (np.asarray(algorithm.advantages(sequences).aux["left_out"]) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    noise = jnp.asarray(np.random.default_rng(0).normal(0, 1e-3, sequences.mask.shape), jnp.float32)
    other = make_sequences(12, old_logprobs=sequences.old_logprobs + noise)
    assert (first != np.asarray(algorithm.advantages(other).aux["left_out"])).any()


@pytest.mark.parametrize(
    ("build", "binding"),
    [
        (lambda: GSPO(aggregation="token-mean"), "gspo.GSPO.aggregation"),
        (lambda: GMPO(aggregation="constant"), "gmpo.GMPO.aggregation"),
        (lambda: GMPO(clip_low=0.0), "gmpo.GMPO.clip_low"),
        (lambda: SAPO(tau_negative=0.0), "sapo.SAPO.tau_negative"),
        (lambda: CISPO(clip_high=0.0), "cispo.CISPO.clip_high"),
        (lambda: DPPO(high=-0.1), "dppo.DPPO.high"),
        (lambda: DPPO(ratio_max=0.0), "dppo.DPPO.ratio_max"),
        (lambda: DRO(beta=0.0), "dro.DRO.beta"),
        (lambda: KLCov(share=0.0), "kl_cov.KLCov.share"),
        (lambda: KLCov(coef=-1.0), "kl_cov.KLCov.coef"),
        (lambda: ClipCov(share=2.0), "clip_cov.ClipCov.share"),
        (lambda: ClipCov(covariance_min=9.0), "clip_cov.ClipCov.covariance_min"),
        (lambda: PPO(lam=1.5), "ppo.PPO.lam"),
        (lambda: PPO(value_clip=0.0), "ppo.PPO.value_clip"),
        (lambda: PPO(value_coef=0.0), "ppo.PPO.value_coef"),
    ],
)
def test_a_bad_setting_is_refused_by_its_binding(build, binding):
    with pytest.raises(ValueError, match=binding):
        build()
