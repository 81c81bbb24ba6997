"""RLOO: REINFORCE with the mean reward of the other responses as baseline.

    A_i = r_i - mean_{j != i} r_j = n / (n - 1) (r_i - mean_G r)

Back to basics, https://arxiv.org/abs/2402.14740. The ratio is clipped as in PPO, which changes nothing with one
update per batch.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.algorithms import advantages
from jaxrl_llm.algorithms.batch import Sequences
from jaxrl_llm.algorithms.group_relative import Grouped
from jaxrl_llm.algorithms.grpo import Clipped, Estimate


@dataclass(frozen=True, kw_only=True)
class RLOO(Grouped, Clipped):
    """REINFORCE, leave one out."""

    def estimate(self, sequences: Sequences, rewards: Array) -> Estimate:
        reward = jnp.sum(rewards, axis=1)
        stats = advantages.group_statistics(reward, sequences.group, sequences.counted, sequences.groups)
        return Estimate(
            advantages.to_tokens(advantages.leave_one_out(reward, stats, self.singleton), sequences.learned)
        )
