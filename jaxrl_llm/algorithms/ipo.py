"""IPO: the log-ratio margin is regressed to a fixed gap, so that certain preferences do not push it to infinity.

    L = (h - 1 / (2 beta))^2,  h = (log pi(w) - log ref(w)) - (log pi(l) - log ref(l))

https://arxiv.org/abs/2310.12036. Log-probs are averaged over an answer's tokens, as its authors advise for language
models; length_average=False is the paper's equation.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.algorithms.preference import Answers, Pairwise


@dataclass(frozen=True, kw_only=True)
class IPO(Pairwise):
    """Identity preference optimisation.

    Attributes:
      length_average: average log-probs over the tokens of an answer instead of summing them.
    """

    length_average: bool = True

    def margin(self, chosen: Answers, rejected: Answers) -> Array:
        gains = (
            x.log_ratio / jnp.maximum(x.tokens, 1.0) if self.length_average else x.log_ratio for x in (chosen, rejected)
        )
        return next(gains) - next(gains)

    def pair_loss(self, chosen: Answers, rejected: Answers) -> Array:
        return jnp.square(self.margin(chosen, rejected) - 1.0 / (2.0 * self.beta))
