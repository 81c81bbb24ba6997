"""EXO on pairs: the reverse KL divergence from the policy's own preference to the labels'.

    q = (sigmoid(m), sigmoid(-m)),  m = beta ((log pi(w) - log ref(w)) - (log pi(l) - log ref(l)))
    L = KL(q || (1 - eps, eps)),  eps = label_smoothing

https://arxiv.org/abs/2402.00856, equation 16. The divergence is infinite without label smoothing.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms.preference import Answers, Pairwise


@dataclass(frozen=True, kw_only=True)
class EXO(Pairwise):
    """Efficient exact optimisation of pairs.

    Attributes:
      label_smoothing: the probability that a label is flipped, > 0.
    """

    label_smoothing: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        components.within(self, "(0, 0.5)", "label_smoothing")

    def pair_loss(self, chosen: Answers, rejected: Answers) -> Array:
        margin, eps = self.margin(chosen, rejected), self.label_smoothing
        kept = jax.nn.sigmoid(margin) * (jax.nn.log_sigmoid(margin) - jnp.log1p(-eps))
        return kept + jax.nn.sigmoid(-margin) * (jax.nn.log_sigmoid(-margin) - jnp.log(eps))
