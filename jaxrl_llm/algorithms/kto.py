"""KTO: each answer is desirable or not on its own, and is valued against a common reference point.

    L_w = desirable (1 - sigmoid(beta (h_w - z)));  L_l = undesirable (1 - sigmoid(beta (z - h_l)))
    h = log pi - log ref of the answer;  z = max(0, mean of h)

https://arxiv.org/abs/2402.01306. The paper estimates z = KL(pi || ref) on mismatched prompts and answers of the
batch, under the policy now. Here z is the mean of h over all answers of the global batch under the policy before the
update, so that it costs no further forward pass and micro-batches do not matter; in both, z carries no gradient.
Of n_w and n_l answers the paper wants desirable n_w between 1 and 4/3 times undesirable n_l (section 4.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm import components
from jaxrl_llm.algorithms.batch import Advantages, MicroBatch, Sequences, Term, given
from jaxrl_llm.algorithms.masked import masked_mean, masked_sum, sequence_mean
from jaxrl_llm.algorithms.preference import Preference, rejected_of


@dataclass(frozen=True, kw_only=True)
class KTO(Preference):
    """Kahneman-Tversky optimisation, of pairs or of responses with a label; "pairs/accuracy" is 0 where no response has a partner.

    Attributes:
      desirable: weight of the preferred answers.
      undesirable: weight of the rejected answers.
      balanced: weigh the side that has more answers in the global batch by the other's share of its number, so that both
        sides count as their weights say; nothing is learned where a side has none.
    """

    desirable: float = 1.0
    undesirable: float = 1.0
    balanced: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        components.at_least(self, 0, "desirable", "undesirable")

    @property
    def group_size_at_least(self) -> int:
        return 1

    def advantages(self, sequences: Sequences) -> Advantages:
        """Assigns its side's weight to all tokens of an answer; an answer needs no partner."""
        learned = sequences.learned & (sequences.side != 0)[:, None]
        log_ratio = masked_sum(sequences.old_logprobs - given(sequences.ref_logprobs, "reference"), learned, axis=1)
        answers, preferred = jnp.any(learned, axis=1), sequences.side > 0
        point = jnp.maximum(masked_mean(log_ratio, answers), 0.0)
        numbers = jnp.stack([jnp.sum(answers & preferred), jnp.sum(answers & ~preferred)]).astype(jnp.float32)
        weights = jnp.asarray([self.desirable, self.undesirable], jnp.float32)
        if self.balanced:
            weights *= jnp.min(numbers) / jnp.maximum(numbers, 1.0)
        weight = jnp.where(preferred, weights[0], weights[1])[:, None]
        return Advantages(
            advantages=jnp.where(learned, weight, 0.0),
            loss_mask=learned,
            aux={"point": jnp.where(learned, point, 0.0)},
            metrics={"kto/point": point, "kto/desirable": numbers[0], "kto/undesirable": numbers[1]},
        )

    def loss(self, outputs: Mapping[str, Any], batch: MicroBatch) -> tuple[dict[str, Term], dict[str, Term]]:
        answers = self.answers(outputs, batch)
        point = sequence_mean(batch.aux["point"], batch.sequence, batch.mask, batch.sequences)
        present, sign = answers.tokens > 0, batch.side.astype(jnp.float32)
        gain = jnp.where(present, answers.log_ratio - point, 0.0)
        weight = sequence_mean(batch.advantages, batch.sequence, batch.mask, batch.sequences)
        losses = weight * jax.nn.sigmoid(-self.beta * sign * gain)
        term = (jnp.sum(jnp.where(present, losses, 0.0)), "sequences")
        right = jnp.sum(jnp.where(present & (sign * gain > 0), 1.0, 0.0))
        pairing = rejected_of(batch.group, batch.side, present)
        right_order = pairing * (answers.log_ratio[:, None] > answers.log_ratio[None, :])
        held = jnp.where(batch.group[:, None] == batch.group[None, :], jnp.sum(pairing, axis=1), 0.0).sum(axis=1)
        apart = jnp.sum(right_order / jnp.maximum(held, 1.0)[:, None])  # a prompt counts 1, however many pairs it has
        metrics = {"kto/accuracy": (right, "sequences"), "pairs/accuracy": (apart, "pairs")}
        return {"policy": term}, {"loss/policy": term, **metrics}
