"""On-policy distillation: the policy's own samples, where a token's advantage is how much likelier the teacher finds it.

    A_t = log teacher(t) - log pi_old(t);  L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))

This is the policy gradient of the reverse KL divergence from the teacher, token by token, where later
tokens do not count (https://arxiv.org/abs/2306.13649, https://thinkingmachines.ai/blog/on-policy-distillation). Rewards
are logged and not learned from. A is clipped to +-20.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms.batch import Sequences, given
from jaxrl_llm.algorithms.grpo import Clipped, Estimate


@dataclass(frozen=True, kw_only=True)
class Distill(Clipped):
    """Reverse-KL distillation of a teacher."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_coef > 0 and self.kl_in == "reward":
            components.refuse(self, "kl_in", "'loss': rewards are not learned from")

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"teacher"}

    def estimate(self, sequences: Sequences, rewards: Array) -> Estimate:
        mask = sequences.learned
        teacher = jnp.where(mask, given(sequences.teacher_logprobs, "teacher"), 0.0)
        return Estimate(jnp.clip(teacher - jnp.where(mask, sequences.old_logprobs, 0.0), -20.0, 20.0))
