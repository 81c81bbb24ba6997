"""BCO on pairs: a classifier of preferred and rejected answers, whose logit is the implicit reward less a shift.

    L = -log sigmoid(r_w - delta) - log sigmoid(-(r_l - delta)),  r = beta (log pi - log ref) of an answer
    delta = (mean of r_w + mean of r_l) / 2

https://arxiv.org/abs/2404.04656. The paper keeps a running average of delta. Here it is that of the global batch under the
policy before the update, so that micro-batches do not matter and a resumed run has the same; in both, delta carries no gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.algorithms.batch import Advantages, MicroBatch, Sequences, given
from jaxrl_llm.algorithms.masked import masked_mean, masked_sum, sequence_mean
from jaxrl_llm.algorithms.preference import Answers, Pairwise


@dataclass(frozen=True, kw_only=True)
class BCO(Pairwise):
    """Binary classifier optimisation of pairs."""

    def advantages(self, sequences: Sequences) -> Advantages:
        """Assigns 1 to all tokens of complete pairs; "point" is delta / beta."""
        found = super().advantages(sequences)
        mask = found.loss_mask
        gain = masked_sum(sequences.old_logprobs - given(sequences.ref_logprobs, "reference"), mask, axis=1)
        point = masked_mean(gain, jnp.any(mask, axis=1))
        metrics = {**found.metrics, "bco/delta": self.beta * point}
        return replace(found, aux={"point": jnp.where(mask, point, 0.0)}, metrics=metrics)

    def answers(self, outputs: Mapping[str, Any], batch: MicroBatch) -> Answers:
        """Returns the answers, with log-ratios that are lower by delta / beta."""
        found = super().answers(outputs, batch)
        point = sequence_mean(batch.aux["point"], batch.sequence, batch.mask, batch.sequences)
        return found._replace(reference=found.reference + point)

    def pair_loss(self, chosen: Answers, rejected: Answers) -> Array:
        right = jax.nn.log_sigmoid(self.beta * chosen.log_ratio)
        return -right - jax.nn.log_sigmoid(-self.beta * rejected.log_ratio)
