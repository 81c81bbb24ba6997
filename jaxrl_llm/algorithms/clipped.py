"""Policy gradients with PPO's clipped surrogate, token by token.

    L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), at most -A clip_dual where A < 0

https://arxiv.org/abs/1707.06347; the second bound is dual-clip PPO's, https://arxiv.org/abs/1912.09729.
"""

from dataclasses import dataclass

from jax import Array

from jaxrl_llm import bounds
from jaxrl_llm.algorithms import surrogate
from jaxrl_llm.algorithms.policy_gradient import PolicyGradient


@dataclass(frozen=True, kw_only=True)
class Clipped(PolicyGradient):
    """A policy gradient whose ratio has bounds.

    Attributes:
      clip_low: how far below 1 the ratio still has a gradient.
      clip_high: how far above 1 the ratio still has a gradient.
      clip_dual: largest ratio that counts where the advantage is negative; None for no limit.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds.within(self, "(0, 1]", "clip_low")
        bounds.above(self, 0, "clip_high")
        bounds.above(self, 1 + self.clip_high, "clip_dual")

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.MetricStreams]:
        return surrogate.clip(tokens.ratio, tokens.advantages, self.clip_low, self.clip_high, self.clip_dual)
