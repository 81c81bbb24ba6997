"""Off-policy correction: weights and rejections from the ratio of the learner's to the sampler's probabilities.

rho_t = pi_old(t) / pi_sampler(t), both before the update, so that neither carries a gradient. Token weights are
min(rho_t, ratio_max) (truncated importance sampling, https://fengyao.notion.site/off-policy-rl); "sequence" takes the
product and "geometric" the geometric mean over the sequence's tokens. Mode "mask" keeps rho inside [ratio_min,
ratio_max] and gives 0 outside (IcePop, https://arxiv.org/abs/2510.18855). Log-ratios are clipped to +-20.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax.lax import bitcast_convert_type, stop_gradient
from jaxtyping import Array, Bool, Float

from jaxrl_llm import components
from jaxrl_llm.algorithms.batch import MicroBatch, Term
from jaxrl_llm.algorithms.masked import masked_mean, masked_sum

Level = Literal["token", "sequence", "geometric"]

# Metrics that count tokens by their gap, |learner's log-prob - sampler's log-prob|, above so many nats.
GAP_SIZES = {f"gap/above_1e-{n}": 10.0**-n for n in (6, 5, 4, 3, 2, 1)}


def log_ratios(old: Float[Array, "S T"], sampler: Float[Array, "S T"], mask: Bool[Array, "S T"]) -> Float[Array, "S T"]:
    """Returns log rho on the mask, 0 elsewhere."""
    return jnp.where(mask, jnp.clip(jnp.where(mask, old - sampler, 0.0), -20.0, 20.0), 0.0)


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Importance weights of the tokens.

    Attributes:
      level: what one ratio covers: each "token", the "sequence" (product of its tokens') or their "geometric" mean.
      mode: "truncate" caps the weight at ratio_max; "mask" sets it to 0 outside [ratio_min, ratio_max].
      ratio_min: smallest ratio that mode "mask" keeps; mode "truncate" does not use it.
      ratio_max: largest weight, or largest ratio that is kept.
      normalize: divide the weights by their mean over the batch.
      veto: a sequence with a token whose ratio is below this gets the weight 0; 0 vetoes none.
    """

    level: Level = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    ratio_min: float = 0.0
    ratio_max: float = 2.0
    normalize: bool = False
    veto: float = 0.0

    def __post_init__(self) -> None:
        components.choices(self)
        components.within(self, f"[0, {self.ratio_max})", "ratio_min")
        components.within(self, "[0, 1)", "veto")

    def weights(
        self, log_ratio: Float[Array, "S T"], mask: Bool[Array, "S T"]
    ) -> tuple[Float[Array, "S T"], Mapping[str, Float[Array, ""]]]:
        """Returns the weights of the tokens, 0 outside the mask, and their statistics."""
        total = masked_sum(log_ratio, mask, axis=1)
        if self.level == "geometric":
            total = masked_mean(log_ratio, mask, axis=1)
        over = log_ratio if self.level == "token" else jnp.broadcast_to(total[:, None], log_ratio.shape)
        weight, changed = self.bounded(jnp.exp(jnp.clip(over, -20.0, 20.0)))
        if self.veto:
            vetoed = jnp.any(mask & (jnp.exp(log_ratio) < self.veto), axis=1, keepdims=True)
            weight, changed = jnp.where(vetoed, 0.0, weight), changed | vetoed
        mean = masked_mean(weight, mask)
        if self.normalize:
            weight = weight / jnp.maximum(mean, 1e-8)
        metrics = {
            "correction/weight_mean": mean,
            "correction/changed_fraction": masked_mean(changed.astype(jnp.float32), mask),
            "correction/effective_fraction": jnp.square(masked_mean(weight, mask))
            / jnp.maximum(masked_mean(jnp.square(weight), mask), 1e-8),
        }
        return jnp.where(mask, weight, 0.0), metrics

    def bounded(self, ratio: Float[Array, "..."]) -> tuple[Float[Array, "..."], Bool[Array, "..."]]:
        """Returns the weights of ratios, and which of them differ from the ratio itself."""
        above, below = ratio > self.ratio_max, ratio < self.ratio_min
        if self.mode == "mask":
            return jnp.where(above | below, 0.0, ratio), above | below
        return jnp.minimum(ratio, self.ratio_max), above

    @property
    def by_token(self) -> bool:
        """Whether a token's weight depends on its own ratio alone."""
        return self.level == "token" and not self.normalize and not self.veto


def at_update(
    batch: MicroBatch, policy: Mapping[str, Array], correction: Correction | None
) -> tuple[MicroBatch, dict[str, Term]]:
    """Returns the micro-batch of a step's only update, with the old log-probs of this very pass and the weights that follow from them.

    Args:
      batch: the micro-batch.
      policy: {"logprob": [B, T], "entropy": [B, T]} of the pass.
      correction: weighs tokens by their own ratio (`Correction.by_token`); None leaves the weights 1.

    Returns:
      The micro-batch, and sums for the metrics that a scoring pass would give.
    """
    mask, old = batch.mask, stop_gradient(policy["logprob"])
    log_ratio = log_ratios(old, batch.sampler_logprobs, mask)
    measured = {"gap/mean": jnp.abs(log_ratio), "gap/k3": jnp.expm1(log_ratio) - log_ratio, "logprob/mean": old}
    if "entropy" in policy:
        measured["entropy/mean"] = stop_gradient(policy["entropy"])
    weights = batch.weights
    if correction is not None:
        weights, changed = correction.bounded(jnp.exp(log_ratio))
        measured |= {"correction/weight_mean": weights, "correction/changed_fraction": changed}
    sums = {name: (masked_sum(jnp.asarray(x, jnp.float32), mask), "read") for name, x in measured.items()}
    bits = [bitcast_convert_type(jnp.asarray(x, jnp.float32), jnp.int32) for x in (old, batch.sampler_logprobs)]
    counted = {"gap/compared": mask, "gap/differing": bits[0] != bits[1]}
    counted |= {name: jnp.abs(log_ratio) > size for name, size in GAP_SIZES.items()}
    sums |= {name: (masked_sum(x.astype(jnp.float32), mask), "one") for name, x in counted.items()}
    return batch.replace(old_logprobs=old, weights=weights), sums


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """Leaves tokens or sequences out of the loss where old and sampler probabilities differ too much.

    With x = -log rho: k1 = x, k2 = x^2 / 2, k3 = exp(-x) + x - 1. k1 has a sign and is bounded by the ratio; k2 and
    k3 have none and are bounded by the divergence.

    Attributes:
      statistic: "k1", "k2" or "k3".
      level: "token", or the sequence's "sum", "mean" or "max" ("max" for k2 and k3 only).
      ratio_min: smallest exp(-k1) that is kept, for k1 alone.
      ratio_max: largest exp(-k1) that is kept, for k1 alone.
      divergence_max: largest k2 or k3 that is kept, in nats.
    """

    statistic: Literal["k1", "k2", "k3"] = "k1"
    level: Literal["token", "sum", "mean", "max"] = "token"
    ratio_min: float = 0.5
    ratio_max: float = 2.0
    divergence_max: float = 0.5

    def __post_init__(self) -> None:
        components.choices(self)
        if self.statistic == "k1" and self.level == "max":
            raise ValueError(
                "Rejection.level='max' needs a statistic without sign: set correction.Rejection.statistic to k2 or k3"
            )
        components.within(self, f"[0, {self.ratio_max})", "ratio_min")
        components.above(self, 0, "divergence_max")

    def keep(self, log_ratio: Float[Array, "S T"], mask: Bool[Array, "S T"]) -> Bool[Array, "S T"]:
        """Returns which tokens of the mask stay in the loss."""
        k = {"k1": -log_ratio, "k2": 0.5 * jnp.square(log_ratio), "k3": jnp.expm1(log_ratio) - log_ratio}[
            self.statistic
        ]
        k = jnp.where(mask, k, 0.0)
        if self.level == "max":
            k = jnp.max(k, axis=1, keepdims=True)
        elif self.level != "token":
            k = (masked_sum if self.level == "sum" else masked_mean)(k, mask, axis=1)[:, None]
        if self.statistic == "k1":
            ratio = jnp.exp(jnp.clip(-k, -20.0, 20.0))
            return mask & (ratio >= self.ratio_min) & (ratio <= self.ratio_max)
        return mask & (k <= self.divergence_max)
