"""DPO: the policy's log-ratio to the reference is the reward of a Bradley-Terry model of the preferences.

    m = beta ((log pi(w) - log ref(w)) - (log pi(l) - log ref(l)))
    sigmoid: -(1 - eps) log sigmoid(m) - eps log sigmoid(-m)                        eps = label_smoothing
    robust:  (-(1 - eps) log sigmoid(m) + eps log sigmoid(-m)) / (1 - 2 eps)
    hinge:   max(0, 1 - m)

https://arxiv.org/abs/2305.18290; with eps > 0, cDPO (https://ericmitchell.ai/cdpo.pdf) or, unbiased under flipped
labels, robust DPO (https://arxiv.org/abs/2403.00409); hinge: the loss of SLiC-HF on the same margin
(https://arxiv.org/abs/2305.10425, https://arxiv.org/abs/2309.06657).
"""

from dataclasses import dataclass
from typing import Literal

import jax
from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms.preference import Answers, Pairwise


@dataclass(frozen=True, kw_only=True)
class DPO(Pairwise):
    """Direct preference optimisation.

    Attributes:
      form: "sigmoid", "robust" or "hinge".
      label_smoothing: the probability that a label is flipped.
    """

    form: Literal["sigmoid", "robust", "hinge"] = "sigmoid"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        components.within(self, "[0, 0.5)", "label_smoothing")
        if self.form == "hinge" and self.label_smoothing > 0:
            components.refuse(self, "label_smoothing", "0 with form 'hinge', which has no use for it")

    def pair_loss(self, chosen: Answers, rejected: Answers) -> Array:
        margin, eps = self.margin(chosen, rejected), self.label_smoothing
        if self.form == "hinge":
            return jax.nn.relu(1.0 - margin)
        kept, flipped = -(1.0 - eps) * jax.nn.log_sigmoid(margin), eps * jax.nn.log_sigmoid(-margin)
        return kept - flipped if self.form == "sigmoid" else (kept + flipped) / (1.0 - 2.0 * eps)
