"""Bases of policy gradients that compare the rollouts of a group and are not GRPO: its advantages, for surrogates of their own."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.algorithms.advantages import Singleton
from jaxrl_llm.algorithms.batch import Sequences
from jaxrl_llm.algorithms.grpo import Estimate, PolicyGradient, relative


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
