"""Trains a reward model on preferences, so that the value r at the end of the preferred answer (w) exceeds that of the rejected one (l).

    L = -log sigmoid(r(w) - r(l)) + center_coef (r(w) + r(l))^2                         mean over pairs

The Bradley-Terry model as in https://arxiv.org/abs/1706.03741 and https://arxiv.org/abs/2203.02155; the second term keeps
rewards around 0, https://arxiv.org/abs/2312.09244. An answer's reward is the value at the last token of
its mask.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm import components
from jaxrl_llm.algorithms.advantages import on_last_token
from jaxrl_llm.algorithms.batch import Advantages, MicroBatch, Sequences, Term
from jaxrl_llm.algorithms.masked import sequence_sum
from jaxrl_llm.algorithms.objective import Objective
from jaxrl_llm.algorithms.preference import complete_pairs, rejected_of
from jaxrl_llm.protocols import Learns


@dataclass(frozen=True, kw_only=True)
class RewardModel(Objective):
    """Bradley-Terry training of a reward model; the policy stays as it is.

    Attributes:
      center_coef: weight of the squared sum of a pair's rewards, which keeps them around 0.
    """

    center_coef: float = 0.0
    learns_from: ClassVar[Learns] = "pairs"

    def __post_init__(self) -> None:
        components.at_least(self, 0, "center_coef")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"reward_model"})

    @property
    def group_size_at_least(self) -> int:
        return 2

    def advantages(self, sequences: Sequences) -> Advantages:
        """Assigns 1 to the last token of each answer of complete pairs, the only one that is learned from."""
        mask, dropped = complete_pairs(sequences)
        weight = on_last_token(jnp.ones(mask.shape[0], jnp.float32), mask)
        return Advantages(advantages=weight, loss_mask=weight > 0, metrics={"pairs/incomplete": dropped})

    def loss(self, outputs: Mapping[str, Any], batch: MicroBatch) -> tuple[dict[str, Term], dict[str, Term]]:
        total = lambda x: sequence_sum(x, batch.sequence, batch.mask, batch.sequences)  # noqa: E731
        value = outputs["reward_model"]["value"]
        chosen, present = total(value), total(jnp.ones_like(value)) > 0
        pairing = rejected_of(batch.group, batch.side, present)
        paired = jnp.any(pairing > 0, axis=1)
        rejected = jnp.dot(pairing, chosen, precision=jax.lax.Precision.HIGHEST)
        losses = -jax.nn.log_sigmoid(chosen - rejected) + self.center_coef * jnp.square(chosen + rejected)
        measured = {
            "loss/reward_model": losses,
            "pairs/accuracy": chosen > rejected,
            "pairs/margin": chosen - rejected,
            "pairs/chosen_reward": chosen,
            "pairs/rejected_reward": rejected,
        }
        metrics = {name: (jnp.sum(jnp.where(paired, x, 0.0)), "pairs") for name, x in measured.items()}
        return {"reward_model": metrics["loss/reward_model"]}, metrics
