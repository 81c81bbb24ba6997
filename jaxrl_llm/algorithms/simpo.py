"""SimPO: the average log-prob is the reward, with a target margin and no reference policy.

    L = -log sigmoid(beta (mean log pi(w) - mean log pi(l)) - gamma)

https://arxiv.org/abs/2405.14734.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms.preference import Answers, Pairwise


@dataclass(frozen=True, kw_only=True)
class SimPO(Pairwise):
    """Simple preference optimisation.

    Attributes:
      gamma: the margin that the preferred answer's reward should have.
    """

    beta: float = 2.0
    gamma: float = 1.0
    refers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        components.at_least(self, 0, "gamma")

    def margin(self, chosen: Answers, rejected: Answers) -> Array:
        return self.beta * (chosen.mean - rejected.mean)

    def pair_loss(self, chosen: Answers, rejected: Answers) -> Array:
        return -jax.nn.log_sigmoid(self.margin(chosen, rejected) - self.gamma)
