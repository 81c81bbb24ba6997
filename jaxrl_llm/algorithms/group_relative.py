"""Policy gradients whose advantage compares a response with the others to the same prompt."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import bounds
from jaxrl_llm.algorithms import advantages
from jaxrl_llm.algorithms.advantages import Singleton
from jaxrl_llm.algorithms.policy_gradient import Estimate, PolicyGradient
from jaxrl_llm.batch import View


@dataclass(frozen=True, kw_only=True)
class Grouped(PolicyGradient):
    """A policy gradient that needs groups.

    Attributes:
      singleton: advantage of a group of one: 0 ("zero") or its reward ("raw").
    """

    singleton: Singleton = "zero"

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds.one_of(self, ("zero", "raw"), "singleton")

    @property
    def group_size_at_least(self) -> int:
        return 1 if self.singleton == "raw" else 2


@dataclass(frozen=True, kw_only=True)
class GroupRelative(Grouped):
    """GRPO's advantage, (r - mean_G r) / (std_G r + 1e-6), at every token (https://arxiv.org/abs/2402.03300).

    Attributes:
      std: divide by the group's standard deviation (n - 1).
    """

    std: bool = True

    def estimate(self, view: View, rewards: Array) -> Estimate:
        reward = jnp.sum(rewards, axis=1)
        stats = advantages.group_statistics(reward, view.group, view.counted, view.groups)
        credit = advantages.group_relative(reward, stats, std=self.std, singleton=self.singleton)
        return Estimate(advantages.to_tokens(credit, view.learned))
