"""GKD: the policy's whole next-token distribution is pulled towards the teacher's, at every token of its own samples or of demonstrations.

    L = D(teacher, pi),  D = KL(teacher || pi) with mixture 0, KL(pi || teacher) with 1, and between them
    D = b KL(teacher || m) + (1 - b) KL(pi || m),  m = b teacher + (1 - b) pi,  b = mixture

https://arxiv.org/abs/2306.13649, equation 1. As in the paper, a token's effect on later ones has no gradient. The learner
computes the divergence, in tiles of tokens; the samples are those of the policy before the step, whose drift is not corrected.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from jaxrl_llm import components
from jaxrl_llm.algorithms.batch import Advantages, MicroBatch, Sequences, Term
from jaxrl_llm.algorithms.masked import Aggregation, aggregate, masked_mean, masked_sum
from jaxrl_llm.algorithms.objective import Objective
from jaxrl_llm.protocols import Learns


@dataclass(frozen=True, kw_only=True)
class GKD(Objective):
    """Generalised knowledge distillation.

    Attributes:
      mixture: 0 for the forward KL divergence, 1 for the reverse one, between them for the generalised Jensen-Shannon divergence.
      answers_of: "policy" learns on the policy's own samples, whose rewards are logged and not learned from, "data" on demonstrations.
      aggregation: what the divergence is averaged over, as in `PolicyGradient`, without "constant".
    """

    mixture: float = 0.5
    answers_of: Literal["policy", "data"] = "policy"
    aggregation: Aggregation = "token-mean"

    def __post_init__(self) -> None:
        components.choices(self)
        components.within(self, "[0, 1]", "mixture")
        if self.aggregation == "constant":
            components.refuse(self, "aggregation", "one that has no constant length")

    @property
    def learns_from(self) -> Learns:
        return "samples" if self.answers_of == "policy" else "demonstrations"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"teacher_divergence"})

    def advantages(self, sequences: Sequences) -> Advantages:
        """Assigns 1 to all learned tokens."""
        learned = sequences.learned
        reward = masked_mean(sequences.reward, sequences.counted)
        metrics = {"reward/mean": reward} if self.answers_of == "policy" else {}
        return Advantages(advantages=learned.astype(jnp.float32), loss_mask=learned, metrics=metrics)

    def loss(self, outputs: Mapping[str, Any], batch: MicroBatch) -> tuple[dict[str, Term], dict[str, Term]]:
        divergence = jnp.where(batch.mask, outputs["policy"]["teacher_divergence"], 0.0)
        term = aggregate(divergence, batch.mask, batch.sequence, batch.sequences, self.aggregation)
        metrics = {"loss/policy": term, "distill/divergence": (masked_sum(divergence, batch.mask), "tokens")}
        if "entropy" in outputs["policy"]:
            entropy = jnp.where(batch.mask, outputs["policy"]["entropy"], 0.0)
            metrics["entropy"] = (masked_sum(entropy, batch.mask), "tokens")
        return {"policy": term}, metrics
