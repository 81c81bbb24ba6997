"""APO: anchored preference optimisation, which says which way each answer's own likelihood moves.

    r = beta (log pi - log ref) of an answer
    zero: 1 - sigmoid(r_w) + sigmoid(r_l)                raises the preferred answer and lowers the rejected one
    down: sigmoid(r_w) + 1 - sigmoid(r_w - r_l)          lowers both, the rejected one further

https://arxiv.org/abs/2408.06266, equations 7 and 8: "zero" where the preferred answers are better than the policy's own,
"down" where they are worse.
"""

from dataclasses import dataclass
from typing import Literal

import jax
from jax import Array

from jaxrl_llm.algorithms.preference import Answers, Pairwise


@dataclass(frozen=True, kw_only=True)
class APO(Pairwise):
    """Anchored preference optimisation.

    Attributes:
      form: "zero" or "down".
    """

    form: Literal["zero", "down"] = "zero"

    def pair_loss(self, chosen: Answers, rejected: Answers) -> Array:
        gains = self.beta * chosen.log_ratio, self.beta * rejected.log_ratio
        if self.form == "zero":
            return jax.nn.sigmoid(-gains[0]) + jax.nn.sigmoid(gains[1])
        return jax.nn.sigmoid(gains[0]) + jax.nn.sigmoid(-self.margin(chosen, rejected))
