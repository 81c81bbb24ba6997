"""The reward from the learner's statistics: TokenBuncher's on its sources, and the adaptive attack's bonus."""

import asyncio

import numpy as np
import pytest
from builders import make_prompt, make_rollout

from jaxrl_llm.learner.score import means_of_rollouts
from jaxrl_llm.rewards.entropy import Entropy
from jaxrl_llm.rewards.weighted import Weighted
from jaxrl_llm.rewards.wrap import Wrap


def group(source="a", count=2):
    return [make_rollout(make_prompt("p", source=source), [1, 2, 3]) for _ in range(count)]


def scored(reward, stats, source="a"):
    scores = asyncio.run(reward.score(group(source), {n: np.array(x, float) for n, x in stats.items()}))
    return scores.parts["entropy"].tolist()


def test_it_is_minus_the_mean_entropy_of_the_response():
    uniform = np.log(11.0)  # the entropy of 11 equal logits
    assert scored(Entropy(), {"entropy": [uniform, 0.0]}) == [-uniform, 0.0]


def test_the_mean_is_over_the_tokens_that_the_policy_chose():
    from builders import make_group

    rollouts = [make_rollout(make_prompt(), [1, 2, 3], mask=[1, 0, 1]), make_rollout(make_prompt(), [1], mask=[0])]
    (stats,) = means_of_rollouts([make_group(rollouts, {})], {"entropy": np.array([[1.0, 9.0, 2.0], [5.0, 0, 0]])})
    assert stats["entropy"].tolist() == [1.5, 0.0]  # and nothing is divided by 0


def test_other_sources_are_held_to_the_reference():
    reward = Entropy(sources=("a*",), kl_sources=("b",))
    assert reward.needs == {"reference"} and Entropy().needs == frozenset()
    stats = {"entropy": [1.0, 2.0], "old_logprobs": [-1.0, -3.0], "ref_logprobs": [-1.5, -2.0]}
    assert scored(reward, stats, "a1") == [-1.0, -2.0]
    assert scored(reward, stats, "b") == [-0.5, 1.0]
    with pytest.raises(ValueError, match="no rule for the source 'c'"):
        scored(reward, stats, "c")


def test_the_adaptive_attack_adds_at_most_three_nats():
    bonus = Entropy(coefficient=1.0, maximum=3.0)
    reward = Weighted(parts={"harm": Wrap(function=lambda prompt, text: 0.5, name="x"), "entropy": bonus})
    assert reward.needs_stats
    scores = asyncio.run(reward.score(group(), {"entropy": np.array([4.2, 1.0])}))
    assert (scores.parts["harm"] + scores.parts["entropy"]).tolist() == [3.5, 1.5]


def test_it_says_what_it_lacks():
    with pytest.raises(ValueError, match="needs the learner's entropy"):
        asyncio.run(Entropy().score(group()))
    with pytest.raises(ValueError, match="coefficient other than 0"):
        Entropy(coefficient=0.0)
