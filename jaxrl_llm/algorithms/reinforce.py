"""REINFORCE on group-relative advantages: the plain log-prob gradient, or the unclipped importance ratio.

    L = -A log pi   (objective "logprob")        L = -A rho   (objective "ratio")

Williams, 1992, https://doi.org/10.1007/BF00992696. On-policy both have the same gradient.
"""

from dataclasses import dataclass
from typing import Literal

from jax import Array

from jaxrl_llm.algorithms import surrogate
from jaxrl_llm.algorithms.group_relative import GroupRelative


@dataclass(frozen=True, kw_only=True)
class Reinforce(GroupRelative):
    """Policy gradient without a trust region.

    Attributes:
      objective: "logprob", or the importance "ratio" to the policy before the update.
    """

    std: bool = False
    objective: Literal["logprob", "ratio"] = "logprob"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective not in ("logprob", "ratio"):
            self._refuse("objective", "'logprob' or 'ratio'")

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.MetricStreams]:
        if self.objective == "ratio":
            return -tokens.advantages * tokens.ratio, {}
        return surrogate.reinforce(tokens.logprob, tokens.advantages), {}
