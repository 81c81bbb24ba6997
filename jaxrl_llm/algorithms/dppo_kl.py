"""DPPO with binary KL: tokens leave the loss once their probability has moved too far, not their ratio.

    L = -A sg(min(rho, ratio_max)) log pi   where D <= high (A > 0) or <= low (A <= 0), or pi moves back to pi_old,
    else 0 D = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)), p the probability of the token

https://arxiv.org/abs/2602.04879, the binary KL form.
"""

from dataclasses import dataclass

from jax import Array

from jaxrl_llm.algorithms import surrogate
from jaxrl_llm.algorithms.group_relative import GroupRelative


@dataclass(frozen=True, kw_only=True)
class DPPOKL(GroupRelative):
    """Divergence proximal policy optimisation, by binary KL.

    Attributes:
      low: largest divergence that is learned from where the advantage is not positive, in nats.
      high: largest divergence that is learned from where the advantage is positive, in nats.
      ratio_max: cap of the importance ratio.
    """

    low: float = 0.05
    high: float = 0.05
    ratio_max: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("low", "high", "ratio_max"):
            if not getattr(self, name) > 0:
                self._refuse(name, "> 0")

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.MetricStreams]:
        keep = surrogate.within_binary_kl(tokens, self.low, self.high)
        return surrogate.divergence_masked(tokens, keep, self.ratio_max)
