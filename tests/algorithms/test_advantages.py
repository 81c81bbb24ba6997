"""Every advantage against a float64 loop over groups, sequences and tokens, written from the definition."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import make_sequences

from jaxrl_llm.algorithms.gdpo import GDPO
from jaxrl_llm.algorithms.gpg import GPG
from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.algorithms.grpo_passk import GRPOPassK
from jaxrl_llm.algorithms.opo import OPO
from jaxrl_llm.algorithms.otb import OTB
from jaxrl_llm.algorithms.ppo import PPO
from jaxrl_llm.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from jaxrl_llm.algorithms.remax import ReMax
from jaxrl_llm.algorithms.rloo import RLOO


@pytest.fixture
def sequences():
    """Ragged groups with an invalid member, an all-equal group and a group of one."""
    sequences = make_sequences(8)
    return replace(sequences, valid=sequences.valid.at[9].set(False))


def members_of(sequences):
    """Indices of the counted sequences of each group."""
    counted = np.asarray(sequences.valid) & ~np.asarray(sequences.greedy) & np.asarray(sequences.mask).any(1)
    return [np.nonzero(counted & (np.asarray(sequences.group) == g))[0] for g in range(sequences.groups)]


def spread(sequences, advantage):
    """A number a sequence, at its counted tokens."""
    counted = np.zeros(len(sequences.group), bool)
    counted[np.concatenate(members_of(sequences))] = True
    return np.where(np.asarray(sequences.mask) & counted[:, None], advantage[:, None], 0.0)


def by_group(sequences, rule, singleton=lambda r: 0.0):
    """The advantages that `rule` gives the rewards and lengths of each group of two or more."""
    reward, length = np.asarray(sequences.reward, np.float64), np.asarray(sequences.mask).sum(1)
    out = np.zeros(len(reward))
    for m in members_of(sequences):
        out[m] = rule(reward[m], length[m]) if len(m) > 1 else [singleton(r) for r in reward[m]]
    return spread(sequences, out)


def whitened(x, mask):
    values = x[mask]
    return np.where(mask, (x - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8), 0.0)


def check(algorithm, sequences, expected, **tolerance):
    assigned = algorithm.advantages(sequences)
    np.testing.assert_allclose(assigned.advantages, expected, **{"rtol": 3e-5, "atol": 2e-6, **tolerance})
    return assigned


@pytest.mark.parametrize(("singleton", "alone"), [("zero", lambda r: 0.0), ("raw", lambda r: r)])
def test_rloo_subtracts_the_mean_of_the_others(sequences, singleton, alone):
    def others(r, _):
        return np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))])

    check(RLOO(singleton=singleton), sequences, by_group(sequences, others, alone))


@pytest.mark.parametrize(("singleton", "alone"), [("zero", lambda r: 0.0), ("raw", lambda r: r)])
def test_opo_subtracts_the_length_weighted_mean(sequences, singleton, alone):
    expected = by_group(sequences, lambda r, n: r - (r * n).sum() / n.sum(), alone)
    check(OPO(singleton=singleton), sequences, expected)


@pytest.mark.parametrize("std", [True, False])
def test_pass_at_k_credits_the_best_by_its_lead(sequences, std):
    def lead(r, _):
        first, second = np.sort(r)[::-1][:2]
        scale = np.std(r, ddof=1) + 1e-6 if std else 1.0
        return np.where(r == first, first - second, 0.0) / scale

    check(GRPOPassK(std=std), sequences, by_group(sequences, lead))
    tied = replace(sequences, reward=jnp.ones_like(sequences.reward))
    assert not np.asarray(GRPOPassK(std=std).advantages(tied).advantages).any()


@pytest.mark.parametrize("signal", ["group", "reward"])
def test_gpg_scales_by_the_sequences_that_have_a_signal(sequences, signal):
    sequences = replace(sequences, reward=sequences.reward.at[0].set(0.0))
    reward = np.asarray(sequences.reward)
    groups = members_of(sequences)
    counted = np.concatenate(groups)
    told = sum(len(m) for m in groups if len(m) > 1 and np.ptp(reward[m]) > 0)
    told = told if signal == "group" else (reward[counted] != 0).sum()
    expected = by_group(sequences, lambda r, _: (r - r.mean()) * len(counted) / told)
    check(GPG(signal=signal), sequences, expected)


def returns_to_go(rewards, mask, gamma):
    """Token by token from the end; masked tokens are not there."""
    out = np.zeros(mask.shape)
    for i in range(len(mask)):
        ahead = 0.0
        for t in reversed(np.nonzero(mask[i])[0]):
            ahead = rewards[i, t] + gamma * ahead
            out[i, t] = ahead
    return out


def terminal(sequences):
    """The rewards at the last counted token, and the mask of the counted tokens."""
    mask = spread(sequences, np.ones(len(sequences.group))) > 0
    rewards = np.zeros(mask.shape)
    for i in np.nonzero(mask.any(1))[0]:
        rewards[i, np.nonzero(mask[i])[0][-1]] = np.asarray(sequences.reward)[i]
    return rewards, mask


def test_reinforce_plus_plus_whitens_discounted_returns_with_the_divergence_in_the_reward(sequences):
    rewards, mask = terminal(sequences)
    k1 = np.where(
        mask, np.asarray(sequences.old_logprobs, np.float64) - np.asarray(sequences.ref_logprobs, np.float64), 0
    )
    expected = whitened(returns_to_go(rewards - 0.1 * k1, mask, 0.9), mask)
    check(ReinforcePlusPlus(gamma=0.9, kl_coef=0.1), sequences, expected)


def test_reinforce_plus_plus_with_a_baseline_whitens_centered_rewards(sequences):
    _, mask = terminal(sequences)
    expected = whitened(by_group(sequences, lambda r, _: r - r.mean()), mask)
    check(ReinforcePlusPlus(baseline=True), sequences, expected)


def test_remax_subtracts_the_greedy_reward_and_needs_it(sequences):
    greedy = [0, 4, 8, 10]  # group 2 has none, and that of group 4 is invalid
    sequences = replace(
        sequences, greedy=sequences.greedy.at[jnp.asarray(greedy)].set(True), valid=sequences.valid.at[10].set(False)
    )
    reward = np.asarray(sequences.reward, np.float64)
    expected = np.zeros(len(reward))
    for first, rest in ((0, [1, 2, 3]), (4, [5, 6]), (8, [])):
        expected[rest] = reward[rest] - reward[first]
    assigned = ReMax().advantages(sequences)
    keep = np.asarray(assigned.loss_mask)
    np.testing.assert_allclose(
        np.where(keep, assigned.advantages, 0), np.where(keep, expected[:, None], 0), rtol=1e-5, atol=1e-6
    )
    assert keep.any(1).nonzero()[0].tolist() == [1, 2, 3, 5, 6]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8)])
def test_ppo_whitens_gae_and_skips_masked_tokens(sequences, gamma, lam):
    rewards, mask = terminal(sequences)
    value = np.asarray(sequences.values, np.float64)
    raw, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for i in range(len(mask)):
        ahead, next_value = 0.0, 0.0
        for t in reversed(np.nonzero(mask[i])[0]):
            ahead = rewards[i, t] + gamma * next_value - value[i, t] + gamma * lam * ahead
            next_value = value[i, t]
            raw[i, t], returns[i, t] = ahead, ahead + value[i, t]
    assigned = check(PPO(gamma=gamma, lam=lam), sequences, whitened(raw, mask))
    np.testing.assert_allclose(assigned.returns, returns, rtol=1e-5, atol=2e-6)
    unexplained = np.var(returns[mask] - value[mask]) / np.var(returns[mask])
    np.testing.assert_allclose(assigned.metrics["value/explained_variance"], 1 - unexplained, rtol=1e-4)


@pytest.mark.parametrize("singleton", ["zero", "raw"])
def test_otb_weighs_the_baseline_of_each_token_by_the_energy_spent(sequences, singleton):
    _, mask = terminal(sequences)
    reward, pi = np.asarray(sequences.reward, np.float64), np.exp(np.asarray(sequences.old_logprobs, np.float64))
    p2 = np.asarray(sequences.sum_p2, np.float64)
    expected = np.zeros(mask.shape)
    for m in members_of(sequences):
        for t in range(mask.shape[1]):
            here = [i for i in m if mask[i, t]]
            spent = {i: sum(1 - 2 * pi[i, s] + p2[i, s] for s in range(t + 1) if mask[i, s]) for i in here}
            total = sum(spent.values())
            baseline = sum(spent[i] * reward[i] for i in here) / total if len(here) > 1 else 0.0
            for i in here:
                expected[i, t] = reward[i] - baseline if len(m) > 1 or singleton == "raw" else 0.0
    check(OTB(singleton=singleton), sequences, expected, rtol=2e-4)


@pytest.mark.parametrize("normalize", ["tokens", "sequences", "none"])
def test_gdpo_sums_parts_that_were_normalised_one_by_one(sequences, normalize):
    def standardised(r, _):
        return np.zeros(len(r)) if np.ptp(r) == 0 else (r - r.mean()) / (np.std(r, ddof=1) + 1e-6)

    total = sum(
        weight * by_group(replace(sequences, reward=sequences.parts[name]), standardised)
        for name, weight in (("main", 1.0), ("style", 0.5))
    )
    _, mask = terminal(sequences)
    if normalize == "tokens":
        total = whitened(total, mask)
    if normalize == "sequences":
        one = total[mask.any(1), 0]
        total = np.where(mask, (total - one.mean()) / (one.std(ddof=1) + 1e-6), 0)
    check(GDPO(parts=("main", "style"), weights=(1.0, 0.5), normalize=normalize), sequences, total)


def classmates(**settings):
    """Two prompts with two answers: main rewards 1, 0, 3, 1 and classmate rewards 2, 0, 1, 1; thought on two of three
    tokens."""
    base = make_sequences(0, sizes=(2, 2))
    mask = jnp.zeros_like(base.mask).at[:4, :3].set(True)
    main, mate = jnp.asarray([1.0, 0, 3, 1, 0]), jnp.asarray([2.0, 0, 1, 1, 0])
    thought = mask.at[:, 2].set(False)
    sequences = replace(
        base, mask=mask, parts={"main": main, "mate": mate}, reward=main + mate, spans={"thought": thought}
    )
    return np.asarray(GDPO(std=False, correction=None, **settings).advantages(sequences).advantages)[0, :4]


def test_gdpo_credits_a_part_on_its_span():
    partial = {"span": "thought", "span_parts": ("mate",)}
    np.testing.assert_allclose(classmates(normalize="sequences", **partial), [1.019049, 1.019049, 0.5, 0], atol=2e-6)
    np.testing.assert_allclose(classmates(normalize="sequences"), [1.019049, 1.019049, 1.019049, 0], atol=2e-6)
    np.testing.assert_allclose(classmates(normalize="none", **partial), [1.5, 1.5, 0.5, 0], atol=1e-6)


def test_gdpo_without_a_second_part_is_grpo(sequences):
    alone = GDPO(parts=("main",), normalize="none").advantages(sequences)
    np.testing.assert_allclose(alone.advantages, GRPO().advantages(sequences).advantages, rtol=1e-6)


def test_gdpo_refuses_names_that_do_not_exist(sequences):
    with pytest.raises(ValueError, match=r"gdpo\.GDPO\.parts"):
        GDPO(parts=("main", "taste")).advantages(sequences)
    with pytest.raises(ValueError, match=r"gdpo\.GDPO\.span"):
        GDPO(span="answer", span_parts=("style",)).advantages(sequences)
    with pytest.raises(ValueError, match=r"gdpo\.GDPO\.weights"):
        GDPO(parts=("main",), weights=(1.0, 2.0))


def test_missing_token_stats_are_refused_by_name(sequences):
    for algorithm, name, need in (
        (PPO(), "values", "critic"),
        (OTB(), "sum_p2", "sum_p2"),
        (GRPO(kl_coef=0.1), "ref_logprobs", "reference"),
    ):
        assert need in algorithm.needs
        with pytest.raises(ValueError, match=need):
            algorithm.advantages(replace(sequences, **{name: None}))
