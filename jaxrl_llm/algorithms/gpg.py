"""GPG: group policy gradient without ratio, clip or reference; batches with little signal are scaled up.

    A_i = alpha (r_i - mean_G r) / F,  alpha = sequences / sequences with a signal,  F = 1 or std_G r + 1e-6

https://arxiv.org/abs/2504.02546. A sequence has a signal where its group's rewards differ; signal="reward" counts
non-zero rewards instead.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.algorithms import advantages, surrogate
from jaxrl_llm.algorithms.batch import Sequences
from jaxrl_llm.algorithms.group_relative import Grouped
from jaxrl_llm.algorithms.grpo import Estimate


@dataclass(frozen=True, kw_only=True)
class GPG(Grouped):
    """Group policy gradient.

    Attributes:
      std: divide by the group's standard deviation (n - 1).
      signal: which sequences have a signal: those of a "group" whose rewards differ, or those whose "reward" is not zero.
    """

    std: bool = False
    signal: Literal["group", "reward"] = "group"

    def estimate(self, sequences: Sequences, rewards: Array) -> Estimate:
        reward = jnp.sum(rewards, axis=1)
        stats = advantages.group_statistics(reward, sequences.group, sequences.counted, sequences.groups)
        advantage = advantages.group_relative(reward, stats, std=self.std, singleton=self.singleton)
        differs = (stats.size > 1) & (stats.std > 0) if self.signal == "group" else reward != 0
        alpha = jnp.sum(sequences.counted, dtype=reward.dtype) / jnp.maximum(jnp.sum(sequences.counted & differs), 1)
        return Estimate(advantages.to_tokens(alpha * advantage, sequences.learned))

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.TokenMetrics]:
        return surrogate.reinforce(tokens.logprob, tokens.advantages), {}
