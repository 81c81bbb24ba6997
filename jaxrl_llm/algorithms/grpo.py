"""GRPO: advantages are relative to the other responses to the same prompt, with PPO's clipped surrogate and no critic.

    A_i = (r_i - mean_G r) / (std_G r + 1e-6)        L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))

DeepSeekMath, https://arxiv.org/abs/2402.03300. Dr. GRPO (https://arxiv.org/abs/2503.20783) is the case std=False with
aggregation="constant"; DAPO (https://arxiv.org/abs/2503.14476) is the case clip_high > clip_low with
aggregation="token-mean" and an over-long penalty. The standard deviation uses n - 1. Unlike the first
paper, the defaults average over tokens, clip higher above 1 than below it, and use no reference policy; gin/algorithms has
each paper's own settings.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.algorithms import advantages
from jaxrl_llm.algorithms.advantages import Singleton
from jaxrl_llm.algorithms.batch import Sequences
from jaxrl_llm.algorithms.policy_gradient import Clipped, Estimate, PolicyGradient


def relative(reward: Array, sequences: Sequences, *, std: bool, singleton: Singleton) -> Array:
    """Returns GRPO's advantage A_i of the float32 [S] rewards at every learned token, [S, T]."""
    stats = advantages.group_statistics(reward, sequences.group, sequences.counted, sequences.groups)
    return advantages.to_tokens(
        advantages.group_relative(reward, stats, std=std, singleton=singleton), sequences.learned
    )


@dataclass(frozen=True, kw_only=True)
class GRPO(Clipped):
    """Group-relative policy optimisation.

    Attributes:
      std: divide by the group's standard deviation (n - 1).
      singleton: advantage of a group of one: 0 ("zero") or its reward ("raw").
    """

    std: bool = True
    singleton: Singleton = "zero"
    clip_high: float = 0.28

    @property
    def group_size_at_least(self) -> int:
        return 1 if self.singleton == "raw" else 2

    def estimate(self, sequences: Sequences, rewards: Array) -> Estimate:
        return Estimate(relative(jnp.sum(rewards, axis=1), sequences, std=self.std, singleton=self.singleton))


@dataclass(frozen=True, kw_only=True)
class Grouped(PolicyGradient):
    """A policy gradient that compares the rollouts of a group, and is not GRPO.

    Attributes:
      singleton: advantage of a group of one: 0 ("zero") or its reward ("raw").
    """

    singleton: Singleton = "zero"

    @property
    def group_size_at_least(self) -> int:
        return 1 if self.singleton == "raw" else 2


@dataclass(frozen=True, kw_only=True)
class GroupRelative(Grouped):
    """GRPO's advantage for algorithms with a surrogate that is not PPO's.

    Attributes:
      std: divide by the group's standard deviation (n - 1).
    """

    std: bool = True

    def estimate(self, sequences: Sequences, rewards: Array) -> Estimate:
        return Estimate(relative(jnp.sum(rewards, axis=1), sequences, std=self.std, singleton=self.singleton))
