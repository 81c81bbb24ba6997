"""Expert iteration: supervised fine-tuning on the policy's own samples that were good enough.

    L = -log pi(response)  over the responses with reward >= threshold

https://arxiv.org/abs/1705.08439, https://arxiv.org/abs/2203.14465. All kept responses weigh the same; the others
are left out of the loss.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp

from jaxrl_llm.algorithms.batch import Advantages, Sequences
from jaxrl_llm.algorithms.masked import masked_mean
from jaxrl_llm.algorithms.sft import SFT
from jaxrl_llm.protocols import Learns


@dataclass(frozen=True, kw_only=True)
class ExpertIteration(SFT):
    """Imitation of the policy's best samples.

    Attributes:
      threshold: smallest reward of a response that is imitated.
    """

    threshold: float = 1.0

    learns_from: ClassVar[Learns] = "samples"

    def advantages(self, sequences: Sequences) -> Advantages:
        """Assigns 1 to the tokens of good responses; only these are learned from."""
        good = sequences.counted & (sequences.reward >= self.threshold)
        assigned = super().advantages(replace(sequences, valid=good))
        kept = masked_mean(good.astype(jnp.float32), sequences.counted)
        return replace(assigned, metrics={**assigned.metrics, "expert/kept_fraction": kept})
