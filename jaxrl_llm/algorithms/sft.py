"""Supervised fine-tuning: the negative log-prob of demonstrated responses, -log pi(response | prompt), over the mask."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxrl_llm import components
from jaxrl_llm.algorithms.batch import Advantages, MicroBatch, Sequences, Term
from jaxrl_llm.algorithms.masked import Aggregation, aggregate, masked_sum
from jaxrl_llm.algorithms.objective import Objective
from jaxrl_llm.protocols import Learns


@dataclass(frozen=True, kw_only=True)
class SFT(Objective):
    """Imitation of demonstrations.

    Attributes:
      aggregation: what the loss is averaged over: "token-mean", "token-sum", "seq-mean-token-sum",
        "seq-mean-token-mean" or "constant" (sum divided by sequences x constant_length).
      constant_length: tokens a sequence counts as under aggregation "constant".
    """

    aggregation: Aggregation = "token-mean"
    constant_length: int = 1024
    learns_from: ClassVar[Learns] = "demonstrations"

    def __post_init__(self) -> None:
        components.choices(self)
        components.at_least(self, 1, "constant_length")

    @property
    def constant(self) -> float:
        """The number that a sequence adds to the count "constant"."""
        return float(self.constant_length)

    def advantages(self, sequences: Sequences) -> Advantages:
        """Assigns 1 to all tokens."""
        return Advantages(advantages=sequences.learned.astype(jnp.float32), loss_mask=sequences.learned)

    def loss(self, outputs: Mapping[str, Any], batch: MicroBatch) -> tuple[dict[str, Term], dict[str, Term]]:
        policy, mask = outputs["policy"], batch.mask
        logprob = jnp.where(mask, policy["logprob"], 0.0)
        losses = -logprob * jnp.where(mask, batch.advantages, 0.0)
        term = aggregate(losses, mask, batch.sequence, batch.sequences, self.aggregation)
        metrics = {"loss/policy": term, "logprob": (masked_sum(logprob, mask), "tokens")}
        if "entropy" in policy:
            metrics["entropy"] = (masked_sum(policy["entropy"], mask), "tokens")
        return {"policy": term}, metrics
