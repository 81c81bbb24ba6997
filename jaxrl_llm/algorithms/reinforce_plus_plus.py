"""REINFORCE++: returns to go, whitened over the global batch, with PPO's clip and no critic.

    A_t = whiten(sum_{s >= t} gamma^(s - t) r_s)

https://arxiv.org/abs/2501.03262. The divergence from the reference enters the reward of each token (kl_in="reward").
With `baseline`, A = whiten(r_i - mean_G r), the paper's form for groups. Whitening is by the mean and standard
deviation (n - 1) of all tokens.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms import advantages
from jaxrl_llm.algorithms.batch import Sequences
from jaxrl_llm.algorithms.divergence import Estimator
from jaxrl_llm.algorithms.group_relative import Grouped
from jaxrl_llm.algorithms.grpo import Clipped, Estimate, relative
from jaxrl_llm.algorithms.masked import whiten


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(Grouped, Clipped):
    """REINFORCE with batch-normalised returns.

    Attributes:
      baseline: subtract the group's mean reward; otherwise groups play no part and `singleton` is not used.
      gamma: discount per token of the returns to go; without a baseline only.
    """

    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: Estimator = "k1"
    baseline: bool = False
    gamma: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        components.within(self, "(0, 1]", "gamma")

    @property
    def group_size_at_least(self) -> int:
        return super().group_size_at_least if self.baseline else 1

    def estimate(self, sequences: Sequences, rewards: Array) -> Estimate:
        if self.baseline:
            returns = relative(jnp.sum(rewards, axis=1), sequences, std=False, singleton=self.singleton)
        else:
            returns = advantages.returns_to_go(rewards, sequences.learned, self.gamma)
        return Estimate(whiten(returns, sequences.learned))
