"""GRPO's advantages, loss and gradient against NumPy float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import make_batch, make_outputs, make_sequences, numeric_gradient, value_and_gradient

from jaxrl_llm.algorithms.grpo import GRPO


def group_relative(sequences, std, singleton="zero"):
    """(r - mean) / (std + 1e-6) by the definition, group by group, over valid sampled sequences with tokens."""
    reward, group = np.asarray(sequences.reward, np.float64), np.asarray(sequences.group)
    counted = np.asarray(sequences.valid) & ~np.asarray(sequences.greedy) & np.asarray(sequences.mask).any(1)
    out = np.zeros(len(reward))
    for g in range(sequences.groups):
        members = counted & (group == g)
        r = reward[members]
        if members.sum() == 1:
            out[members] = r if singleton == "raw" else 0.0
        elif members.sum() > 1 and np.ptp(r) > 0:
            out[members] = (r - r.mean()) / (np.std(r, ddof=1) + 1e-6 if std else 1.0)
    return np.where(np.asarray(sequences.mask) & counted[:, None], out[:, None], 0.0)


def grpo_loss(logprob, sequences, assigned, kl_coef=0.0, entropy_coef=0.0, dual=np.inf):
    """Token mean of min(rho, 2) weighted clipped surrogate, k3 to the reference and the entropy bonus."""
    m = np.asarray(assigned.loss_mask)
    a = np.where(m, np.asarray(assigned.advantages, np.float64), 0)
    old, sampler, ref = (
        np.where(m, np.asarray(x, np.float64), 0)
        for x in (sequences.old_logprobs, sequences.sampler_logprobs, sequences.ref_logprobs)
    )
    new = np.where(m, logprob, 0.0)
    ratio = np.exp(new - old)
    loss = np.maximum(-a * ratio, -a * np.clip(ratio, 0.8, 1.28))
    loss = np.where(a < 0, np.minimum(loss, -a * dual), loss) if np.isfinite(dual) else loss
    loss = loss * np.minimum(np.exp(old - sampler), 2.0)
    d = ref - new
    loss = (
        loss + kl_coef * (np.exp(d) - d - 1) - entropy_coef * np.where(m, np.asarray(sequences.entropy, np.float64), 0)
    )
    return loss[m].sum() / m.sum()


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize("singleton", ["zero", "raw"])
def test_advantages_are_the_groups_standardised_rewards(std, singleton):
    sequences = make_sequences(3)
    sequences = make_sequences(3, valid=sequences.valid.at[1].set(False), greedy=sequences.greedy.at[5].set(True))
    assigned = GRPO(std=std, singleton=singleton).advantages(sequences)
    np.testing.assert_allclose(assigned.advantages, group_relative(sequences, std, singleton), rtol=2e-5, atol=1e-6)
    assert not np.asarray(assigned.loss_mask)[[1, 5, -1]].any()
    assert float(assigned.metrics["groups/singletons"]) == 1
    assert float(assigned.metrics["groups/invalid"]) == 1


def test_equal_rewards_give_no_advantage_at_all():
    sequences = make_sequences(0)
    assigned = GRPO().advantages(sequences)
    assert (np.asarray(assigned.advantages)[np.asarray(sequences.group) == 1] == 0).all()


@pytest.mark.parametrize("settings", [{}, {"kl_coef": 0.1, "entropy_coef": 0.01}, {"clip_dual": 1.3}])
def test_loss_and_gradient_follow_the_definition(settings):
    sequences = make_sequences(5)
    algorithm = GRPO(**settings)
    assigned = algorithm.advantages(sequences)
    batch, outputs = make_batch(sequences, assigned, algorithm.constant), make_outputs(sequences)
    value, gradient = value_and_gradient(algorithm, outputs, batch)

    def expected(logprob):
        renamed = {"dual" if k == "clip_dual" else k: v for k, v in settings.items()}
        return grpo_loss(logprob, sequences, assigned, **renamed)

    logprob = np.asarray(outputs["policy"]["logprob"], np.float64)
    np.testing.assert_allclose(value, expected(logprob), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        gradient, numeric_gradient(expected, logprob, np.asarray(assigned.loss_mask)), rtol=1e-4, atol=1e-6
    )


def test_kl_in_the_reward_lowers_the_reward_of_the_sequence():
    sequences = make_sequences(2)
    assigned = GRPO(kl_coef=0.5, kl_in="reward", kl_estimator="k1", std=False).advantages(sequences)
    mask = np.asarray(sequences.mask)
    k1 = np.where(
        mask, np.asarray(sequences.old_logprobs, np.float64) - np.asarray(sequences.ref_logprobs, np.float64), 0
    )
    lowered = make_sequences(2, reward=jnp.asarray(np.asarray(sequences.reward) - 0.5 * k1.sum(1), jnp.float32))
    np.testing.assert_allclose(assigned.advantages, group_relative(lowered, std=False), rtol=1e-4, atol=1e-6)


def test_a_source_has_its_own_share_of_the_kl():
    sources = np.arange(len(make_sequences(2).group)) % 3
    sequences = make_sequences(2, source=jnp.asarray(sources, jnp.int32), sources=("code", "maths", "web"))
    settings = {"kl_coef": 0.5, "kl_by_source": (("web", 3.0), ("code", 0.0))}
    assigned = GRPO(**settings, kl_in="reward", kl_estimator="k1", std=False).advantages(sequences)
    mask = np.asarray(sequences.mask)
    coef = np.array([0.0, 0.5, 1.5])[sources]
    k1 = np.where(
        mask, np.asarray(sequences.old_logprobs, np.float64) - np.asarray(sequences.ref_logprobs, np.float64), 0
    )
    lowered = make_sequences(2, reward=jnp.asarray(np.asarray(sequences.reward) - coef * k1.sum(1), jnp.float32))
    np.testing.assert_allclose(assigned.advantages, group_relative(lowered, std=False), rtol=1e-4, atol=1e-6)
    in_loss = np.asarray(GRPO(**settings).advantages(sequences).aux["kl_coef"])
    np.testing.assert_allclose(in_loss, np.where(np.asarray(sequences.learned), coef[:, None], 0))
    with pytest.raises(ValueError, match=r"grpo.GRPO.kl_by_source must be of sources that the data has.*\['chat'\]"):
        GRPO(kl_coef=0.5, kl_by_source=(("chat", 1.0),)).advantages(sequences)


def test_a_controlled_coefficient_replaces_the_first_one():
    sequences = make_sequences(2, controls={"kl_coef": jnp.asarray(0.25)})
    assigned = GRPO(kl_coef=0.5).advantages(sequences)
    assert (np.asarray(assigned.aux["kl_coef"])[np.asarray(sequences.learned)] == 0.25).all()


@pytest.mark.parametrize(
    ("settings", "binding"),
    [
        ({"aggregation": "mean"}, "aggregation"),
        ({"kl_coef": -1.0}, "grpo.GRPO.kl_coef"),
        ({"constant_length": 0}, "grpo.GRPO.constant_length"),
        ({"entropy_share": 0.0}, "grpo.GRPO.entropy_share"),
        ({"kl_by_source": (("web", 2.0),)}, "grpo.GRPO.kl_coef"),
        ({"kl_coef": 1.0, "kl_by_source": (("web", 2.0), ("web", 1.0))}, "grpo.GRPO.kl_by_source"),
        ({"kl_coef": 1.0, "kl_by_source": (("web", -2.0),)}, "grpo.GRPO.kl_by_source"),
        ({"clip_low": 1.5}, "grpo.GRPO.clip_low"),
        ({"clip_high": 0.0}, "grpo.GRPO.clip_high"),
        ({"clip_dual": 1.0}, "grpo.GRPO.clip_dual"),
    ],
)
def test_a_bad_setting_is_refused_by_its_binding(settings, binding):
    with pytest.raises(Exception, match=binding):
        GRPO(**settings)


def test_a_reference_is_needed_only_for_a_divergence():
    assert GRPO().needs == frozenset()
    assert GRPO(kl_coef=0.1).needs == {"reference"}
    assert GRPO(entropy_coef=0.1).needs == {"entropy"}
    assert GRPO().group_size_at_least == 2
    assert GRPO(constant_length=100).constant == 100.0
