"""GRPO for pass@k: only the group's best response has an advantage, by how far it beats the second best.

    A_best = (r_1st - r_2nd) / (std_G r + 1e-6), all others 0

An unbiased estimate of the gradient of the group's best reward (https://arxiv.org/abs/2503.19595). Ties give 0.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.algorithms import advantages
from jaxrl_llm.algorithms.batch import Sequences
from jaxrl_llm.algorithms.grpo import Clipped, Estimate


@dataclass(frozen=True, kw_only=True)
class GRPOPassK(Clipped):
    """GRPO with an advantage for the best response of a group alone.

    Attributes:
      std: divide by the group's standard deviation (n - 1).
    """

    std: bool = True

    @property
    def group_size_at_least(self) -> int:
        return 2

    def estimate(self, sequences: Sequences, rewards: Array) -> Estimate:
        reward = jnp.sum(rewards, axis=1)
        advantage = advantages.best_over_second(reward, sequences.group, sequences.counted, sequences.groups)
        if self.std:
            advantage /= (
                advantages.group_statistics(reward, sequences.group, sequences.counted, sequences.groups).std + 1e-6
            )
        return Estimate(advantages.to_tokens(advantage, sequences.learned))
