"""GRPO with a classmate: tokens of the thought get the advantage of all rewards, other tokens that of the main ones.

    A_t = g(r_main + r_classmate)  where t is in the thought,  g(r_main) elsewhere
    g(r) = r - mean_G r, divided by std_G r + 1e-6 with `std`

The "grpo_w_classmate" of github.com/Lorenayannnnn/classmate-cot-verl. The parts' sum enters the advantage, so that it has
a gradient wherever no clip is active (the original's vanilla_classmate loss multiplies the classmate's advantage by a
ratio that does not depend on the policy). Without `std` the algorithm is GDPO with normalize = "none" and the same span.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms.batch import Sequences
from jaxrl_llm.algorithms.grpo import GRPO, Estimate, relative


@dataclass(frozen=True, kw_only=True)
class GRPOWithClassmate(GRPO):
    """GRPO with further rewards that count for one span alone.

    Attributes:
      span: token range that all rewards count for.
      main_parts: names of the parts that count for all tokens, with weight 1.
    """

    span: str = "thought"
    main_parts: tuple[str, ...] = ("main",)
    std: bool = False
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.main_parts:
            components.refuse(self, "main_parts", "the names of one or more parts of the reward")
        if self.kl_coef > 0 and self.kl_in == "reward":
            components.refuse(self, "kl_in", "'loss': the divergence is no part of the reward")

    @property
    def reads(self) -> Mapping[str, Sequence[str]]:
        """The main parts and the span."""
        return {**super().reads, "parts": self.main_parts, "spans": (self.span,)}

    def estimate(self, sequences: Sequences, rewards: Array) -> Estimate:
        if self.span not in sequences.spans:
            raise ValueError(
                f"grpo_w_classmate.GRPOWithClassmate.span must be one of {sorted(sequences.spans)}, which rollouts have "
                f"(got {self.span!r}): set train.Stage.marker"
            )
        if unknown := set(self.main_parts) - set(sequences.parts):
            raise ValueError(
                f"grpo_w_classmate.GRPOWithClassmate.main_parts must be among the reward's parts {sorted(sequences.parts)} "
                f"(got {sorted(unknown)})"
            )
        main = sum((sequences.parts[name] for name in self.main_parts), start=jnp.zeros_like(sequences.reward))
        main = jnp.where(sequences.counted, main, 0.0)
        own = relative(main, sequences, std=self.std, singleton=self.singleton)
        return Estimate(jnp.where(sequences.spans[self.span], super().estimate(sequences, rewards).advantages, own))
