"""What a gated delta rule's convolution (kernels/delta_inputs) keeps of a row, and the segments of padding."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


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
