"""Trains a classifier that says whether two texts are of one class, by the binary cross-entropy of the value at the pair's last token.

    L = -w_1 y log sigmoid(v) - w_0 (1 - y) log(1 - sigmoid(v)),    w_k = 1 / (2 share_k)        mean over pairs

DARLING's partition classifier (arXiv 2509.02534) has two outputs and a softmax; one output v, their difference, is the same
model. The weights are the paper's N / N_k times a factor that makes their mean 1.
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
from jaxrl_llm.protocols import Learns


@dataclass(frozen=True, kw_only=True)
class PairClassifier(Objective):
    """Trains the reward model's network as a classifier; the policy stays as it is.

    Attributes:
      similar_share: share of the training pairs that are of the same class; 0.5 weighs both kinds alike.
    """

    similar_share: float = 0.5
    learns_from: ClassVar[Learns] = "pairs"

    def __post_init__(self) -> None:
        components.within(self, "(0, 1)", "similar_share")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"reward_model"})

    def advantages(self, sequences: Sequences) -> Advantages:
        """Assigns 1 to the last token of every labelled pair, the only one that is learned from."""
        labelled = sequences.learned & (sequences.side != 0)[:, None]
        weight = on_last_token(jnp.ones(labelled.shape[0], jnp.float32), labelled)
        return Advantages(advantages=weight, loss_mask=weight > 0)

    def loss(self, outputs: Mapping[str, Any], batch: MicroBatch) -> tuple[dict[str, Term], dict[str, Term]]:
        total = lambda x: sequence_sum(x, batch.sequence, batch.mask, batch.sequences)  # noqa: E731
        value = outputs["reward_model"]["value"]
        score, present = total(value), total(jnp.ones_like(value)) > 0
        similar = batch.side > 0
        weight = jnp.where(similar, 0.5 / self.similar_share, 0.5 / (1.0 - self.similar_share))
        losses = -weight * jax.nn.log_sigmoid(jnp.where(similar, score, -score))
        measured = {
            "loss/reward_model": losses,
            "pairs/accuracy": (score > 0) == similar,
            "pairs/similar": similar,
            "pairs/similar_found": (score > 0) & similar,
            "pairs/similar_said": score > 0,
        }
        metrics = {name: (jnp.sum(jnp.where(present, x, 0.0)), "sequences") for name, x in measured.items()}
        return {"reward_model": metrics["loss/reward_model"]}, metrics
