"""ReMax: REINFORCE whose baseline is the reward of the greedy response to the same prompt.

    A_t = sum_{s >= t} r_s - r(greedy)

https://arxiv.org/abs/2310.10505. The greedy response is left out of statistics and loss; a prompt whose greedy reward
could not be computed has no baseline, so its responses are not learned from. The greedy response is right more often than a
sampled one, so most advantages are negative; this leaves the mean gradient unbiased only for samples of the current policy.
The paper therefore makes one update per batch; with more (minibatches, epochs), the log-probs of the samples fall without
bound.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.algorithms import advantages, surrogate
from jaxrl_llm.algorithms.batch import Sequences
from jaxrl_llm.algorithms.grpo import Estimate, PolicyGradient


@dataclass(frozen=True, kw_only=True)
class ReMax(PolicyGradient):
    """REINFORCE with a greedy baseline; it has no settings of its own."""

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"greedy"}

    def estimate(self, sequences: Sequences, rewards: Array) -> Estimate:
        given = sequences.greedy & sequences.valid
        count = advantages.group_sum(jnp.ones_like(sequences.reward), sequences.group, given, sequences.groups)
        baseline = advantages.group_sum(sequences.reward, sequences.group, given, sequences.groups) / jnp.maximum(
            count, 1.0
        )
        returns = advantages.returns_to_go(rewards, sequences.learned)
        return Estimate(returns - advantages.to_tokens(baseline, sequences.learned), keep=count > 0)

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.TokenMetrics]:
        return surrogate.reinforce(tokens.logprob, tokens.advantages), {}
