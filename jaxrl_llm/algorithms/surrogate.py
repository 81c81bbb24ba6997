"""Surrogate policy losses of one micro-batch: per-token values to minimise, with per-token metrics.

l = log pi - log pi_old, clipped to +-20; rho = exp(l); A the advantage; sg stops the gradient. Every array of
`Tokens` is finite outside the mask, and what is computed there is never used.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms.masked import sequence_mean, spread

TokenMetrics = dict[str, Array]


class Tokens(NamedTuple):
    """The inputs of a surrogate from one micro-batch; every array is 0 outside the mask.

    Attributes:
      logprob: float32 [B, T] log-probs of the policy now; they carry the gradient.
      old_logprobs: float32 [B, T] log-probs before the update.
      advantages: float32 [B, T].
      mask: bool [B, T].
      sequence: int32 [B, T] number of the sequence.
      sequences: number of sequences, static.
      aux: {name: [B, T]} the arrays that `prepare` put into `Advantages.aux`.
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
        """l = log pi - log pi_old, clipped to +-20, float32 [B, T]."""
        return jnp.clip(self.logprob - self.old_logprobs, -20.0, 20.0)

    @property
    def ratio(self) -> Array:
        """rho = exp(l), float32 [B, T]."""
        return jnp.exp(self.log_ratio)

    def mean(self, x: Array) -> Array:
        """Returns the mean of `x` over each token's sequence, [B, T]."""
        return spread(sequence_mean(x, self.sequence, self.mask, self.sequences), self.sequence, self.mask)


def clip(
    ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], low: float, high: float, dual: float | None = None
) -> tuple[Float[Array, "B T"], TokenMetrics]:
    """Returns PPO's loss, max(-A rho, -A clip(rho, 1 - low, 1 + high)); with `dual`, at most -A dual where A < 0.

    https://arxiv.org/abs/1707.06347; dual clip: https://arxiv.org/abs/1912.09729.
    """
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - low, 1.0 + high)
    loss = jnp.maximum(plain, clipped)
    metrics = {"ratio/clip_fraction": clipped > plain}
    if dual is not None:
        bound = jnp.where(advantages < 0, -advantages * dual, jnp.inf)
        metrics["ratio/dual_clip_fraction"] = loss > bound
        loss = jnp.minimum(loss, bound)
    return loss, metrics


def reinforce(logprob: Float[Array, "B T"], advantages: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns REINFORCE's loss, -A log pi."""
    return -advantages * logprob


def sequence_ratio(tokens: Tokens) -> Float[Array, "B T"]:
    """Returns GSPO's ratio: the geometric mean of the ratios of each token's sequence, with the token's own gradient; at most exp(10)."""
    mean = tokens.mean(tokens.log_ratio)
    return jnp.exp(jnp.minimum(tokens.logprob - stop_gradient(tokens.logprob) + stop_gradient(mean), 10.0))


def soft_gate(
    ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], tau_positive: float, tau_negative: float
) -> Float[Array, "B T"]:
    """Returns SAPO's loss, -A (4 / tau) sigmoid(tau (rho - 1)), with tau by the sign of A."""
    tau = jnp.where(advantages > 0, tau_positive, tau_negative)
    return -advantages * (4.0 / tau) * jax.nn.sigmoid(tau * (ratio - 1.0))


def clipped_weight(tokens: Tokens, low: float | None, high: float) -> tuple[Float[Array, "B T"], TokenMetrics]:
    """Returns CISPO's loss, -sg(clip(rho, 1 - low, 1 + high)) A log pi, without a lower bound where `low` is None."""
    ratio = tokens.ratio
    weight = jnp.clip(ratio, 0.0 if low is None else 1.0 - low, 1.0 + high)
    return -stop_gradient(weight) * tokens.advantages * tokens.logprob, {"ratio/clip_fraction": weight != ratio}


def geometric_mean(tokens: Tokens, low: float, high: float) -> tuple[Float[Array, "B T"], TokenMetrics]:
    """Returns GMPO's loss, -mean(A) exp(mean l~) over each token's sequence; l~ is l clipped to [-low, high] as PPO clips rho."""
    sign = jnp.where(tokens.advantages < 0, -1.0, 1.0)
    log_ratio = tokens.log_ratio
    kept = sign * jnp.minimum(sign * log_ratio, sign * jnp.clip(log_ratio, -low, high))
    loss = -tokens.mean(tokens.advantages) * jnp.exp(tokens.mean(kept))
    return loss, {"ratio/clip_fraction": kept != log_ratio}


def divergence_masked(
    tokens: Tokens, keep: Bool[Array, "B T"], ratio_max: float
) -> tuple[Float[Array, "B T"], TokenMetrics]:
    """Returns DPPO's loss, -A sg(min(rho, ratio_max)) log pi where `keep`, 0 elsewhere."""
    weight = stop_gradient(jnp.minimum(tokens.ratio, ratio_max))
    loss = -tokens.advantages * weight * tokens.logprob
    return jnp.where(keep, loss, 0.0), {"ratio/clip_fraction": ~keep}


def within_total_variation(tokens: Tokens, low: float, high: float) -> Bool[Array, "B T"]:
    """Returns where pi - pi_old is <= high (A > 0) or >= -low (elsewhere)."""
    gap = jnp.exp(tokens.logprob) - jnp.exp(tokens.old_logprobs)
    return jnp.where(tokens.advantages > 0, gap <= high, gap >= -low)


def within_binary_kl(tokens: Tokens, low: float, high: float) -> Bool[Array, "B T"]:
    """Returns where the KL of (this token, any other) is <= high (A > 0) or <= low (elsewhere), or pi moves back to pi_old."""
    new, old = jnp.exp(tokens.logprob), jnp.exp(tokens.old_logprobs)
    rest = (1.0 - old) * jnp.log((1.0 - old + 1e-8) / (1.0 - new + 1e-8))
    kl = old * (tokens.old_logprobs - tokens.logprob) + rest
    return jnp.where(tokens.advantages > 0, (kl <= high) | (new <= old), (kl <= low) | (new >= old))


def quadratic(tokens: Tokens, beta: float) -> Float[Array, "B T"]:
    """Returns DRO's loss, -(A log pi - beta / 2 l^2)."""
    return -(tokens.advantages * tokens.logprob - 0.5 * beta * jnp.square(tokens.log_ratio))
