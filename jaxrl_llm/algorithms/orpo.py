"""ORPO: supervised fine-tuning on the preferred answer with an odds-ratio penalty on the rejected one.

    L = -mean log pi(w) - beta log sigmoid(log odds(w) - log odds(l)),  odds = p / (1 - p),  log p = mean log pi

https://arxiv.org/abs/2403.07691 (lambda there is beta here); no reference policy.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.algorithms.preference import Answers, Pairwise


def log_odds(logprob: Array) -> Array:
    """Returns log(p / (1 - p)) of p = exp(logprob); logprob is capped at -1e-6, since the odds are infinite at 0."""
    logprob = jnp.minimum(logprob, -1e-6)
    return logprob - jnp.log(-jnp.expm1(logprob))


@dataclass(frozen=True, kw_only=True)
class ORPO(Pairwise):
    """Odds-ratio preference optimisation.

    Attributes:
      beta: weight of the odds-ratio term.
    """

    beta: float = 0.1

    refers: ClassVar[bool] = False

    def margin(self, chosen: Answers, rejected: Answers) -> Array:
        return log_odds(chosen.mean) - log_odds(rejected.mean)

    def pair_loss(self, chosen: Answers, rejected: Answers) -> Array:
        return -chosen.mean - self.beta * jax.nn.log_sigmoid(self.margin(chosen, rejected))
