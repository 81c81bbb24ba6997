"""Reward shaping and token selection that any policy gradient may add: over-long responses and high-entropy tokens."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm import components
from jaxrl_llm.algorithms.masked import masked_mean


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """A penalty or a mask for responses near the length limit, as in DAPO (https://arxiv.org/abs/2503.14476, section 3.4).

    "linear": a penalty that grows from 0 at (1 - buffer) max_length to `weight` at max_length and stays there beyond;
    "mask": responses that were cut off or have more than max_length tokens are left out of the loss, while their reward
    stays in the statistics. One that ends by itself at the limit is whole, and stays.

    Attributes:
      how: "linear" or "mask".
      max_length: largest number of tokens that the policy may choose in one response.
      buffer: share of max_length, at its end, over which the penalty grows.
      weight: largest penalty, in units of reward.
    """

    how: Literal["linear", "mask"] = "linear"
    max_length: int
    buffer: float = 0.2
    weight: float = 1.0

    def __post_init__(self) -> None:
        components.choices(self)
        components.at_least(self, 1, "max_length")
        components.within(self, "(0, 1]", "buffer")

    def penalty(self, mask: Bool[Array, "S T"]) -> Float[Array, " S"]:
        """Returns the number that is added to each reward, between -weight and 0."""
        length = jnp.sum(mask, axis=1, dtype=jnp.float32)
        excess = jnp.clip(1.0 + (length / self.max_length - 1.0) / self.buffer, 0.0, 1.0)
        return -self.weight * excess if self.how == "linear" else jnp.zeros_like(length)

    def keep(self, mask: Bool[Array, "S T"], truncated: Bool[Array, " S"]) -> Bool[Array, " S"]:
        """Returns which sequences stay in the loss; `truncated` marks those that were cut off."""
        return (self.how == "linear") | ~(truncated | (jnp.sum(mask, axis=1) > self.max_length))


def highest(x: Float[Array, "S T"], mask: Bool[Array, "S T"], share: float) -> Bool[Array, "S T"]:
    """Marks the `share` of the mask's tokens (rounded down, at least one) with the largest x; all that tie with the last are marked."""
    ranked = jnp.sort(jnp.where(mask, x, -jnp.inf).ravel(), descending=True)
    count = jnp.maximum(jnp.floor(share * jnp.sum(mask)).astype(jnp.int32), 1)
    return mask & (x >= ranked[count - 1])


def covariance(
    logprob: Float[Array, "S T"], advantages: Float[Array, "S T"], mask: Bool[Array, "S T"]
) -> Float[Array, "S T"]:
    """Returns (A - mean A)(log pi - mean log pi) of each token, with means over the mask; 0 outside it."""
    logprob, advantages = jnp.where(mask, logprob, 0.0), jnp.where(mask, advantages, 0.0)
    centered = (advantages - masked_mean(advantages, mask)) * (logprob - masked_mean(logprob, mask))
    return jnp.where(mask, centered, 0.0)


def draw(eligible: Bool[Array, "S T"], count: Int[Array, ""], *seeds: Float[Array, "S T"]) -> Bool[Array, "S T"]:
    """Marks `count` eligible tokens (all, if there are fewer), chosen by a hash of the bits that `seeds` have at each token."""
    bits = jnp.zeros(eligible.shape, jnp.uint32)
    for seed in seeds:
        word = jax.lax.bitcast_convert_type(seed.astype(jnp.float32), jnp.uint32)
        bits = (bits ^ word) * jnp.uint32(0x9E3779B1)
        bits = (bits ^ (bits >> 15)) * jnp.uint32(0x85EBCA77)
        bits = bits ^ (bits >> 13)
    ranked = jnp.sort(jnp.where(eligible, bits, jnp.uint32(0xFFFFFFFF)).ravel())
    return eligible & (bits <= ranked[count - 1])
