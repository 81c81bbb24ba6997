"""The causal convolution before a gated delta rule (kernels/delta_rule), and the treatment of padding and segments in both."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def convolved(
    x: Float[Array, "B T channels"],
    weights: Float[Array, "channels taps"],
    segments: Int[Array, "B T"],
    before: Float[Array, "B reach channels"],
) -> Float[Array, "B T channels"]:
    """Returns sum_j weights[:, j] x[t - taps + 1 + j] over tokens of t's segment, float32; `before` are the taps - 1 inputs of the first
    segment that precede the row, 0 where it begins there."""
    reach, length = weights.shape[-1] - 1, x.shape[1]
    whole = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    owners = jnp.concatenate([jnp.broadcast_to(segments[:, :1], (x.shape[0], reach)), segments], axis=1)
    total = jnp.zeros(x.shape, jnp.float32)
    for tap in range(reach + 1):
        inside = owners[:, tap : tap + length] == segments
        seen = jnp.where(inside[..., None], whole[:, tap : tap + length], 0).astype(jnp.float32)
        total = total + weights[:, tap].astype(jnp.float32) * seen
    return total


def last_inputs(
    x: Float[Array, "B T channels"], valid: Bool[Array, "B T"], before: Float[Array, "B reach channels"]
) -> Float[Array, "B reach channels"]:
    """Returns the last inputs of the convolution up to each row's last valid token, as many as `before` holds; valid tokens come first."""
    whole = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    places = jnp.sum(valid.astype(jnp.int32), axis=1, keepdims=True) + jnp.arange(before.shape[1])
    return jnp.take_along_axis(whole, places[..., None], axis=1)


def continued(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the segments, where padding, 0, takes the segment before it."""
    return jax.lax.associative_scan(lambda left, right: jnp.where(right > 0, right, left), segments, axis=1)
