"""SAPO: a smooth gate on the importance ratio in place of clipping.

    L = -A (4 / tau) sigmoid(tau (rho - 1)),  tau = tau_positive where A > 0, else tau_negative

https://arxiv.org/abs/2511.20347. The gate's slope is 1 on-policy and decays on both sides, faster for negative
advantages.
"""

from dataclasses import dataclass

from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms import surrogate
from jaxrl_llm.algorithms.group_relative import GroupRelative
from jaxrl_llm.algorithms.masked import Aggregation


@dataclass(frozen=True, kw_only=True)
class SAPO(GroupRelative):
    """Soft adaptive policy optimisation.

    Attributes:
      tau_positive: how fast the gradient fades with the ratio where the advantage is positive.
      tau_negative: the same where the advantage is not positive.
    """

    aggregation: Aggregation = "seq-mean-token-mean"
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        super().__post_init__()
        components.above(self, 0, "tau_positive", "tau_negative")

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.TokenMetrics]:
        return surrogate.soft_gate(tokens.ratio, tokens.advantages, self.tau_positive, self.tau_negative), {}
