"""Bases of policy gradients that compare the rollouts of a group and are not GRPO: its advantages, for surrogates of their own.

GRPO has these fields too and is no subclass, so that it is read with its two bases in one file; both call `relative` and `least_group`.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.algorithms.advantages import Singleton, least_group
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
        return least_group(self.singleton)


@dataclass(frozen=True, kw_only=True)
class GroupRelative(Grouped):
    """GRPO's advantage for algorithms with a surrogate that is not PPO's.

    Attributes:
      std: divide by the group's standard deviation (n - 1).
    """

    std: bool = True

    def estimate(self, sequences: Sequences, rewards: Array) -> Estimate:
        return Estimate(relative(jnp.sum(rewards, axis=1), sequences, std=self.std, singleton=self.singleton))
