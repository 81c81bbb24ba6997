"""CISPO: REINFORCE whose importance weight is clipped, so that no token loses its gradient.

    L = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi

MiniMax-M1, https://arxiv.org/abs/2506.13585. The paper tunes the upper bound alone; clip_low=None leaves the lower
one out.
"""

from dataclasses import dataclass

from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms import surrogate
from jaxrl_llm.algorithms.group_relative import GroupRelative


@dataclass(frozen=True, kw_only=True)
class CISPO(GroupRelative):
    """Clipped importance-sampling policy optimisation.

    Attributes:
      clip_low: the weight is at least 1 - clip_low; None for no lower bound.
      clip_high: the weight is at most 1 + clip_high.
    """

    clip_low: float | None = None
    clip_high: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        components.within(self, "(0, 1]", "clip_low")
        components.above(self, 0, "clip_high")

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.TokenMetrics]:
        return surrogate.clipped_weight(tokens, self.clip_low, self.clip_high)
