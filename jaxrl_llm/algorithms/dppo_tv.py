"""DPPO with total variation: tokens leave the loss once their probability has moved too far, not their ratio.

    L = -A sg(min(rho, ratio_max)) log pi   where pi - pi_old <= high (A > 0) or >= -low (A <= 0), else 0

https://arxiv.org/abs/2602.04879, the binary total-variation form. PPO's bound on the ratio is loose for likely tokens
and tight for rare ones; a bound on the change of probability is neither. No gradient passes through the ratio.
"""

from dataclasses import dataclass

from jax import Array

from jaxrl_llm.algorithms import surrogate
from jaxrl_llm.algorithms.group_relative import GroupRelative


@dataclass(frozen=True, kw_only=True)
class DPPOTV(GroupRelative):
    """Divergence proximal policy optimisation, by total variation.

    Attributes:
      low: largest divergence that is learned from where the advantage is not positive, in probability.
      high: largest divergence that is learned from where the advantage is positive, in probability.
      ratio_max: cap of the importance ratio.
    """

    low: float = 0.2
    high: float = 0.2
    ratio_max: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("low", "high", "ratio_max"):
            if not getattr(self, name) > 0:
                self._refuse(name, "> 0")

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.MetricStreams]:
        keep = surrogate.within_total_variation(tokens, self.low, self.high)
        return surrogate.divergence_masked(tokens, keep, self.ratio_max)
