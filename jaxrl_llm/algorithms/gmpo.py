"""GMPO: the geometric mean of a sequence's clipped ratios, robust to single tokens.

    L_i = -A_i exp(mean_t l~_t),  l~ = l clipped to [-clip_low, clip_high] in the direction of A

https://arxiv.org/abs/2507.20673. Clipping acts on log-ratios. Sequences weigh the same over the global batch,
whatever the micro-batches; A_i is the mean advantage of the sequence's tokens, and importance weights average over
them too.
"""

from dataclasses import dataclass

from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms import surrogate
from jaxrl_llm.algorithms.group_relative import GroupRelative
from jaxrl_llm.algorithms.masked import Aggregation


@dataclass(frozen=True, kw_only=True)
class GMPO(GroupRelative):
    """Geometric-mean policy optimisation.

    Attributes:
      clip_low: how far below 0 the log-ratio still has a gradient, in nats.
      clip_high: how far above 0 the log-ratio still has a gradient, in nats.
    """

    aggregation: Aggregation = "seq-mean-token-mean"
    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        components.above(self, 0, "clip_low", "clip_high")
        if self.aggregation != "seq-mean-token-mean":
            components.refuse(self, "aggregation", "'seq-mean-token-mean', the mean of a sequence's one loss")

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.TokenMetrics]:
        return surrogate.geometric_mean(tokens, self.clip_low, self.clip_high)
