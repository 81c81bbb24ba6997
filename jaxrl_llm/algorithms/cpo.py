"""CPO: DPO without a reference policy, held in place by imitation of the preferred answer.

    L = -log sigmoid(beta (log pi(w) - log pi(l))) - nll_coef x mean log pi(w)

https://arxiv.org/abs/2401.08417. The imitation term is the mean over an answer's tokens, so that answers weigh the
same.
"""

from dataclasses import dataclass

import jax
from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms.preference import Answers, Pairwise


@dataclass(frozen=True, kw_only=True)
class CPO(Pairwise):
    """Contrastive preference optimisation.

    Attributes:
      nll_coef: weight of the preferred answer's negative log-prob per token.
    """

    nll_coef: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        components.at_least(self, 0, "nll_coef")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def pair_loss(self, chosen: Answers, rejected: Answers) -> Array:
        return -jax.nn.log_sigmoid(self.margin(chosen, rejected)) - self.nll_coef * chosen.mean
