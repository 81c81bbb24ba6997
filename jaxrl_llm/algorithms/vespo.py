"""VESPO: REINFORCE weighted by a smooth function of the whole sequence's importance ratio, in place of clipping.

    W = prod_t pi(t) / pi_old(t) of a sequence        phi(W) = W^k exp(lambda (1 - W))        L = -sg(phi(W)) A log pi

https://arxiv.org/abs/2602.10693: phi is 1 on-policy, and falls to 0 on both sides, by the powers k and the rates lambda of the
advantage's sign. W is kept within 1e-8 and exp(20).
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient

from jaxrl_llm import components
from jaxrl_llm.algorithms import surrogate
from jaxrl_llm.algorithms.group_relative import GroupRelative
from jaxrl_llm.algorithms.masked import sequence_sum, spread

LOWEST, HIGHEST = -18.420680743952367, 20.0  # log W


@dataclass(frozen=True, kw_only=True)
class VESPO(GroupRelative):
    """Variational sequence-level soft policy optimisation.

    Attributes:
      power_positive: k where the advantage is not negative.
      power_negative: k where the advantage is negative.
      rate_positive: lambda where the advantage is not negative.
      rate_negative: lambda where the advantage is negative.
    """

    power_positive: float = 2.0
    power_negative: float = 3.0
    rate_positive: float = 3.0
    rate_negative: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        components.above(self, 0, "power_positive", "power_negative", "rate_positive", "rate_negative")

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.TokenMetrics]:
        total = sequence_sum(tokens.log_ratio, tokens.sequence, tokens.mask, tokens.sequences)
        log_ratio = spread(jnp.clip(total, LOWEST, HIGHEST), tokens.sequence, tokens.mask)
        positive = tokens.advantages >= 0
        power = jnp.where(positive, self.power_positive, self.power_negative)
        rate = jnp.where(positive, self.rate_positive, self.rate_negative)
        weight = stop_gradient(jnp.exp(power * log_ratio - rate * jnp.expm1(log_ratio)))
        return surrogate.reinforce(tokens.logprob, weight * tokens.advantages), {"ratio/weight": weight}
