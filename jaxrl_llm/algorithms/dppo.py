"""DPPO: tokens leave the loss once their probability has moved too far, not their ratio.

    L = -A sg(min(rho, ratio_max)) log pi   where `keep`, else 0
    tv: keep where p - p_old <= high (A > 0) or >= -low (A <= 0)
    kl: keep where D <= high (A > 0) or <= low (A <= 0), or p moves back to p_old
        D = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)), p the probability of the token

https://arxiv.org/abs/2602.04879, the binary forms. PPO's bound on the ratio is loose for likely tokens and tight for rare
ones; a bound on the change of the distribution is neither. No gradient passes through the ratio.
"""

from dataclasses import dataclass
from typing import Literal

from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms import surrogate
from jaxrl_llm.algorithms.group_relative import GroupRelative


@dataclass(frozen=True, kw_only=True)
class DPPO(GroupRelative):
    """Divergence proximal policy optimisation.

    Attributes:
      divergence: "tv", total variation, or "kl".
      low: largest divergence that is learned from where the advantage is not positive, in probability or in nats.
      high: largest divergence that is learned from where the advantage is positive.
      ratio_max: cap of the importance ratio.
    """

    divergence: Literal["tv", "kl"] = "tv"
    low: float = 0.2
    high: float = 0.2
    ratio_max: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        components.above(self, 0, "low", "high", "ratio_max")

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.TokenMetrics]:
        within = surrogate.within_total_variation if self.divergence == "tv" else surrogate.within_binary_kl
        return surrogate.divergence_masked(tokens, within(tokens, self.low, self.high), self.ratio_max)
