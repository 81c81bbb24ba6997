"""Surrogate policy losses of one micro-batch: per-token values to minimise, with per-token metrics.

l = log pi - log pi_old, clipped to +-20; rho = exp(l); A the advantage. Every stream of `Tokens` is finite outside
the mask.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

MetricStreams = dict[str, Array]


class Tokens(NamedTuple):
    """What a surrogate sees of a micro-batch; every stream is 0 outside the mask.

    Attributes:
      logprob: float32 [B, T] of the policy now; carries the gradient.
      old_logprobs: float32 [B, T] before the update.
      advantages: float32 [B, T].
      mask: bool [B, T].
      sequence: int32 [B, T] number of the sequence.
      sequences: number of sequences, static.
      aux: {name: [B, T]} what `prepare` left in `Credit.aux`.
    """

    logprob: Array
    old_logprobs: Array
    advantages: Array
    mask: Array
    sequence: Array
    sequences: int
    aux: dict[str, Array]

    @property
    def log_ratio(self) -> Array:
        """float32 [B, T]."""
        return jnp.clip(self.logprob - self.old_logprobs, -20.0, 20.0)


def clip(
    ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], low: float, high: float, dual: float | None = None
) -> tuple[Float[Array, "B T"], MetricStreams]:
    """PPO: max(-A rho, -A clip(rho, 1 - low, 1 + high)); with `dual`, at most -A dual where A < 0
    (https://arxiv.org/abs/1912.09729)."""
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - low, 1.0 + high)
    loss = jnp.maximum(plain, clipped)
    metrics = {"ratio/clip_fraction": clipped > plain}
    if dual is not None:
        bound = jnp.where(advantages < 0, -advantages * dual, jnp.inf)
        metrics["ratio/dual_clip_fraction"] = loss > bound
        loss = jnp.minimum(loss, bound)
    return loss, metrics


def check_clip(algorithm: object, low: float, high: float, dual: float | None = None) -> None:
    """Raises ValueError, naming the binding, where the bounds of a clipped ratio leave nothing to learn from."""
    kind = type(algorithm)
    binding = f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"
    if not 0 < low <= 1:
        raise ValueError(f"{binding}.clip_low must be in (0, 1] (got {low})")
    if not high > 0:
        raise ValueError(f"{binding}.clip_high must be > 0 (got {high})")
    if dual is not None and not dual > 1 + high:
        raise ValueError(f"{binding}.clip_dual must be > 1 + clip_high = {1 + high}, or None (got {dual})")


def reinforce(logprob: Float[Array, "B T"], advantages: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """-A log pi."""
    return -advantages * logprob
