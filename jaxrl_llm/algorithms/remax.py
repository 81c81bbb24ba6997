"""ReMax: REINFORCE whose baseline is the reward of the greedy response to the same prompt.

    A_t = sum_{s >= t} r_s - r(greedy)

https://arxiv.org/abs/2310.10505. The greedy response leaves statistics and loss; a prompt whose greedy reward could
not be had has no baseline, so its responses are not learned from. The greedy response is right more often than a sampled
one: most advantages are negative, which leaves the mean gradient as it is only for samples of the policy itself. So the paper
makes one update of a batch; with more (minibatches, epochs), what was sampled is pushed down without bound.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.algorithms import advantages, surrogate
from jaxrl_llm.algorithms.policy_gradient import Estimate, PolicyGradient
from jaxrl_llm.batch import View


@dataclass(frozen=True, kw_only=True)
class ReMax(PolicyGradient):
    """REINFORCE with a greedy baseline; it has no settings of its own."""

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"greedy"}

    def estimate(self, view: View, rewards: Array) -> Estimate:
        given = view.greedy & view.valid
        count = advantages.group_sum(jnp.ones_like(view.reward), view.group, given, view.groups)
        baseline = advantages.group_sum(view.reward, view.group, given, view.groups) / jnp.maximum(count, 1.0)
        returns = advantages.returns_to_go(rewards, view.learned)
        return Estimate(returns - advantages.to_tokens(baseline, view.learned), keep=count > 0)

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.MetricStreams]:
        return surrogate.reinforce(tokens.logprob, tokens.advantages), {}
