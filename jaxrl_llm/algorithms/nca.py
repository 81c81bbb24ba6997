"""NCA on pairs: noise-contrastive estimation of each answer's own reward, which keeps the preferred answer likely.

    L = -log sigmoid(r_w) - (log sigmoid(-r_w) + log sigmoid(-r_l)) / 2,  r = beta (log pi - log ref) of an answer

https://arxiv.org/abs/2402.05369, for two answers of which the first is preferred with certainty.
"""

from dataclasses import dataclass

import jax
from jax import Array

from jaxrl_llm.algorithms.preference import Answers, Pairwise


@dataclass(frozen=True, kw_only=True)
class NCA(Pairwise):
    """Noise-contrastive alignment of pairs."""

    def pair_loss(self, chosen: Answers, rejected: Answers) -> Array:
        better, worse = self.beta * chosen.log_ratio, self.beta * rejected.log_ratio
        noise = jax.nn.log_sigmoid(-better) + jax.nn.log_sigmoid(-worse)
        return -jax.nn.log_sigmoid(better) - 0.5 * noise
