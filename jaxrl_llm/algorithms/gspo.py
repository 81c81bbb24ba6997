"""GSPO: GRPO with one importance ratio per sequence, the geometric mean of its tokens' ratios.

    s_i = exp(mean_t l_t)        L_i = max(-A s_i, -A clip(s_i, 1 - clip_low, 1 + clip_high))

https://arxiv.org/abs/2507.18071. Each token carries the gradient of its own log-prob, which for equal advantages in a
sequence is the gradient of s_i (the paper's GSPO-token). Sequences weigh the same, as in the paper's objective; with
aggregation="seq-mean-token-sum" each weighs by its length, which is LUSPO (https://arxiv.org/abs/2602.05261).
"""

from dataclasses import dataclass

from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms import surrogate
from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.algorithms.masked import Aggregation


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """Group sequence policy optimisation.

    Attributes:
      aggregation: "seq-mean-token-mean", or "seq-mean-token-sum" for LUSPO.
      clip_low: how far below 1 the sequence's ratio still has a gradient.
      clip_high: how far above 1 the sequence's ratio still has a gradient.
    """

    aggregation: Aggregation = "seq-mean-token-mean"
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aggregation not in ("seq-mean-token-mean", "seq-mean-token-sum"):
            components.refuse(self, "aggregation", "'seq-mean-token-mean' (GSPO) or 'seq-mean-token-sum' (LUSPO)")

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.TokenMetrics]:
        ratio = surrogate.sequence_ratio(tokens)
        return surrogate.clip(ratio, tokens.advantages, self.clip_low, self.clip_high, self.clip_dual)
