"""CPO: DPO without a reference policy, held in place by imitation of the preferred answer.

    m = beta (log pi(w) - log pi(l))
    L = -(1 - eps) log sigmoid(m) - eps log sigmoid(-m) - nll_coef x mean log pi(w),  eps = label_smoothing

https://arxiv.org/abs/2401.08417, whose eps is 0; with eps > 0 the labels are taken as cDPO takes them. The imitation term is the mean
over an answer's tokens, so that answers weigh the same.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms.preference import Answers, Pairwise


@dataclass(frozen=True, kw_only=True)
class CPO(Pairwise):
    """Contrastive preference optimisation.

    Attributes:
      nll_coef: weight of the preferred answer's negative log-prob per token.
      label_smoothing: the probability that a label is flipped.
    """

    nll_coef: float = 1.0
    label_smoothing: float = 0.0
    refers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        components.at_least(self, 0, "nll_coef")
        components.within(self, "[0, 0.5)", "label_smoothing")

    def pair_loss(self, chosen: Answers, rejected: Answers) -> Array:
        margin, eps = self.margin(chosen, rejected), self.label_smoothing
        preferred = -(1.0 - eps) * jax.nn.log_sigmoid(margin) - eps * jax.nn.log_sigmoid(-margin)
        return preferred - self.nll_coef * chosen.mean
