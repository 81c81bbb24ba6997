"""RLOO: REINFORCE with the mean reward of the other responses as baseline.

    A_i = r_i - mean_{j != i} r_j = n / (n - 1) (r_i - mean_G r)

Back to basics, https://arxiv.org/abs/2402.14740. The ratio is clipped as in PPO, which changes nothing with one
update a batch.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.algorithms import advantages, surrogate
from jaxrl_llm.algorithms.group_relative import Grouped
from jaxrl_llm.algorithms.policy_gradient import Estimate
from jaxrl_llm.batch import View


@dataclass(frozen=True, kw_only=True)
class RLOO(Grouped):
    """REINFORCE, leave one out.

    Attributes:
      clip_low: how far below 1 the ratio still has a gradient.
      clip_high: how far above 1 the ratio still has a gradient.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        surrogate.check_clip(self, self.clip_low, self.clip_high)

    def estimate(self, view: View, rewards: Array) -> Estimate:
        reward = jnp.sum(rewards, axis=1)
        stats = advantages.group_statistics(reward, view.group, view.counted, view.groups)
        return Estimate(advantages.to_tokens(advantages.leave_one_out(reward, stats, self.singleton), view.learned))

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.MetricStreams]:
        return surrogate.clip(tokens.ratio, tokens.advantages, self.clip_low, self.clip_high)
