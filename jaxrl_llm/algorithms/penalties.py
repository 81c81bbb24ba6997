"""Reward shaping and token selection that any policy gradient may add: over-long responses and high-entropy tokens."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """What becomes of responses near the length limit, in DAPO's two ways (https://arxiv.org/abs/2503.14476, section
    3.4).

    "linear": a penalty that grows from 0 at max_length - buffer to `weight` at max_length and stays there beyond;
    "mask": responses of max_length tokens or more were cut off and leave the loss, with their reward kept in the
    statistics.

    Attributes:
      how: "linear" or "mask".
      max_length: most tokens the policy may choose in one response.
      buffer: tokens before max_length over which the penalty grows.
      weight: largest penalty, in units of reward.
    """

    how: Literal["linear", "mask"] = "linear"
    max_length: int
    buffer: int = 1
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.how not in ("linear", "mask"):
            raise ValueError(f"penalties.Overlong.how must be 'linear' or 'mask' (got {self.how!r})")
        if not 1 <= self.buffer <= self.max_length:
            raise ValueError(
                f"penalties.Overlong.buffer must be between 1 and max_length={self.max_length} (got {self.buffer})"
            )

    def penalty(self, mask: Bool[Array, "S T"]) -> Float[Array, " S"]:
        """What is added to the rewards: between -weight and 0."""
        length = jnp.sum(mask, axis=1, dtype=jnp.float32)
        excess = jnp.clip((length - (self.max_length - self.buffer)) / self.buffer, 0.0, 1.0)
        return -self.weight * excess if self.how == "linear" else jnp.zeros_like(length)

    def keep(self, mask: Bool[Array, "S T"]) -> Bool[Array, " S"]:
        """The sequences that stay in the loss."""
        return (self.how == "linear") | (jnp.sum(mask, axis=1) < self.max_length)


def high_entropy(entropy: Float[Array, "S T"], mask: Bool[Array, "S T"], share: float) -> Bool[Array, "S T"]:
    """The `share` of the mask's tokens with the highest entropy, at least one token
    (https://arxiv.org/abs/2506.01939)."""
    return highest(entropy, mask, share)


def highest(x: Float[Array, "S T"], mask: Bool[Array, "S T"], share: float) -> Bool[Array, "S T"]:
    """The `share` of the mask's tokens, rounded down and at least one, with the largest x; ties with the last are all
    in."""
    ranked = jnp.sort(jnp.where(mask, x, -jnp.inf).ravel(), descending=True)
    count = jnp.maximum(jnp.floor(share * jnp.sum(mask)).astype(jnp.int32), 1)
    return mask & (x >= ranked[count - 1])
