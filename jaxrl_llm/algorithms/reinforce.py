"""REINFORCE on group-relative advantages, or raw rewards: the plain log-prob gradient, or the unclipped importance ratio.

    L = -A log pi   (objective "logprob")        L = -A rho   (objective "ratio")

Williams, 1992, https://doi.org/10.1007/BF00992696. On-policy, both objectives have the same gradient.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.algorithms import advantages, surrogate
from jaxrl_llm.algorithms.batch import Sequences
from jaxrl_llm.algorithms.group_relative import GroupRelative
from jaxrl_llm.algorithms.grpo import Estimate


@dataclass(frozen=True, kw_only=True)
class Reinforce(GroupRelative):
    """Policy gradient without a trust region.

    Attributes:
      baseline: False takes the reward itself as the advantage; `std` and `singleton` play no part then.
      objective: "logprob", or the importance "ratio" to the policy before the update.
    """

    std: bool = False
    baseline: bool = True
    objective: Literal["logprob", "ratio"] = "logprob"

    @property
    def group_size_at_least(self) -> int:
        return super().group_size_at_least if self.baseline else 1

    def estimate(self, sequences: Sequences, rewards: Array) -> Estimate:
        if self.baseline:
            return super().estimate(sequences, rewards)
        return Estimate(advantages.to_tokens(jnp.sum(rewards, axis=1), sequences.learned))

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.TokenMetrics]:
        if self.objective == "ratio":
            return -tokens.advantages * tokens.ratio, {}
        return surrogate.reinforce(tokens.logprob, tokens.advantages), {}
