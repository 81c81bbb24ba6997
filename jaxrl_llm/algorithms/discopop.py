"""DiscoPOP: DPO's logistic loss and an exponential one, blended by the margin itself; a language model proposed it.

    m = beta ((log pi(w) - log ref(w)) - (log pi(l) - log ref(l)))
    L = (1 - s) (-log sigmoid(m)) + s exp(-m),  s = sigmoid(m / tau)

https://arxiv.org/abs/2406.08414, equation 5. The loss is not convex: it falls again where m is negative and small.
Where m = 0, as of every pair of a policy that is its reference, its slope is (1 - ln 2) / (4 tau) - 3 / 4: while tau is below 0.102 the margin of
such a pair falls.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms.preference import Answers, Pairwise


@dataclass(frozen=True, kw_only=True)
class DiscoPOP(Pairwise):
    """Discovered preference optimisation.

    Attributes:
      tau: margin over which the blend turns from the logistic to the exponential loss.
    """

    beta: float = 0.05
    tau: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        components.within(self, "(0, 1]", "tau")

    def pair_loss(self, chosen: Answers, rejected: Answers) -> Array:
        margin = self.margin(chosen, rejected)
        # Both factors of the exponential are in one exponent: alone, exp(-m) overflows where its share is 0.
        exponential = jnp.exp(jax.nn.log_sigmoid(margin / self.tau) - margin)
        return exponential - jax.nn.sigmoid(-margin / self.tau) * jax.nn.log_sigmoid(margin)
