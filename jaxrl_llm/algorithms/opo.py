"""OPO: strictly on-policy REINFORCE with the variance-minimising baseline for equal gradients of all tokens.

    A_i = r_i - sum_G (length r) / sum_G length

https://arxiv.org/abs/2505.23585.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.algorithms import advantages, surrogate
from jaxrl_llm.algorithms.batch import Sequences
from jaxrl_llm.algorithms.group_relative import Grouped
from jaxrl_llm.algorithms.grpo import Estimate


@dataclass(frozen=True, kw_only=True)
class OPO(Grouped):
    """On-policy RL with an optimal reward baseline; it has no settings of its own."""

    def estimate(self, sequences: Sequences, rewards: Array) -> Estimate:
        reward = jnp.sum(rewards, axis=1)
        length = jnp.sum(sequences.learned, axis=1, dtype=reward.dtype)
        advantage = advantages.length_weighted(reward, length, sequences.group, sequences.counted, sequences.groups)
        size = advantages.group_sum(jnp.ones_like(reward), sequences.group, sequences.counted, sequences.groups)
        advantage = advantages.settle_singletons(advantage, reward, size, self.singleton)
        return Estimate(advantages.to_tokens(advantage, sequences.learned))

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.TokenMetrics]:
        return surrogate.reinforce(tokens.logprob, tokens.advantages), {}
