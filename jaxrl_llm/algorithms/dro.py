"""DRO: policy gradient with a quadratic pull towards the policy that sampled.

    L = -(A log pi - beta / 2 l^2)

The token-wise form of https://arxiv.org/abs/2405.19107 with the group's mean as the value. The pull also acts where A
= 0.
"""

from dataclasses import dataclass

from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms import surrogate
from jaxrl_llm.algorithms.group_relative import GroupRelative


@dataclass(frozen=True, kw_only=True)
class DRO(GroupRelative):
    """Direct reward optimisation.

    Attributes:
      beta: weight of half the squared log-ratio.
    """

    beta: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0:
            components.refuse(self, "beta", "> 0: without the pull nothing holds the policy near the one that sampled")

    @property
    def silent(self) -> bool:
        """False, since the pull acts on every token."""
        return False

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.TokenMetrics]:
        return surrogate.quadratic(tokens, self.beta), {}
