"""GDPO: rewards of several parts, each compared within its group on its own, then summed and normalised over the batch.

    A_i = normalise(sum_k w_k g(r_ik)),  g(r) = r - mean_G r, divided by std_G r + 1e-6 with `std`

https://arxiv.org/abs/2601.05242. Normalising the parts one by one keeps their resolution, which the sum of rewards
loses. Over the batch, "tokens" whitens over all tokens (long responses count more), "sequences" takes the mean and
the standard deviation (n - 1) of the sequences, "none" does neither. With `span`, the parts named in `span_parts`
count for the tokens of that span alone: these tokens get the normalised sum of all parts, and all other tokens get the
sum of the other parts, not normalised.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms import advantages
from jaxrl_llm.algorithms.batch import Sequences
from jaxrl_llm.algorithms.grpo import GRPO, Estimate
from jaxrl_llm.algorithms.masked import masked_mean, masked_var, whiten


@dataclass(frozen=True, kw_only=True)
class GDPO(GRPO):
    """Group reward-decoupled normalisation policy optimisation.

    Attributes:
      parts: names of the reward's parts; empty for all.
      weights: weight of each part in `parts`; empty for 1.
      std: divide each part by its group's standard deviation (n - 1).
      normalize: what the sum is normalised over: "tokens", "sequences" or "none".
      span: token range that `span_parts` count for; empty for the whole response.
      span_parts: names of the parts that count for the span alone.
      nonnegative: names of the parts whose advantage counts only where it is above 0.
    """

    parts: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    normalize: Literal["tokens", "sequences", "none"] = "tokens"
    span: str = ""
    span_parts: tuple[str, ...] = ()
    nonnegative: tuple[str, ...] = ()
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights and len(self.weights) != len(self.parts):
            components.refuse(self, "weights", f"one number for each of parts={self.parts}, or empty")
        if bool(self.span) != bool(self.span_parts):
            components.refuse(self, "span_parts", f"given with `span` and only then (span={self.span!r})")
        if self.kl_coef > 0 and self.kl_in == "reward":
            components.refuse(self, "kl_in", "'loss': the divergence is no part of the reward")

    @property
    def reads(self) -> Mapping[str, Sequence[str]]:
        """The parts and the span that the settings name."""
        return {
            **super().reads,
            "parts": (*self.parts, *self.span_parts, *self.nonnegative),
            "spans": (self.span,) if self.span else (),
        }

    def estimate(self, sequences: Sequences, rewards: Array) -> Estimate:
        by_part = self._parts(sequences)
        total = sum(by_part.values(), start=jnp.zeros_like(sequences.reward))
        whole = self._normalized(total, sequences)
        if not self.span:
            return Estimate(whole)
        if self.span not in sequences.spans:
            raise ValueError(
                f"gdpo.GDPO.span must be one of {sorted(sequences.spans)}, which rollouts have (got {self.span!r})"
            )
        rest = total - sum((by_part[name] for name in self.span_parts), start=jnp.zeros_like(total))
        return Estimate(jnp.where(sequences.spans[self.span], whole, advantages.to_tokens(rest, sequences.learned)))

    def _parts(self, sequences: Sequences) -> dict[str, Array]:
        """Returns the weighted advantage of each part within its group, {name: [S]}."""
        names = self.parts or tuple(sequences.parts)
        if unknown := {*names, *self.span_parts, *self.nonnegative} - set(sequences.parts):
            raise ValueError(
                f"gdpo.GDPO.parts, .span_parts and .nonnegative must be among the reward's parts {sorted(sequences.parts)} "
                f"(got {sorted(unknown)})"
            )
        by_part = {}
        for name, weight in zip(names, self.weights or (1.0,) * len(names)):
            part = jnp.where(sequences.counted, sequences.parts[name], 0.0)
            stats = advantages.group_statistics(part, sequences.group, sequences.counted, sequences.groups)
            own = advantages.group_relative(part, stats, std=self.std, singleton=self.singleton)
            by_part[name] = weight * (jnp.maximum(own, 0.0) if name in self.nonnegative else own)
        return by_part

    def _normalized(self, total: Array, sequences: Sequences) -> Array:
        if self.normalize == "tokens":
            return whiten(advantages.to_tokens(total, sequences.learned), sequences.learned)
        if self.normalize == "sequences":
            deviation = jnp.sqrt(masked_var(total, sequences.counted, ddof=1))
            total = (total - masked_mean(total, sequences.counted)) / (deviation + 1e-6)
        return advantages.to_tokens(total, sequences.learned)
