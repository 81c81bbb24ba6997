"""The inputs of a gated delta rule by XLA, as the specification."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.delta_inputs.api import Call, Inputs

SMALL = 1e-6  # added to a squared length before its root


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    return None


def inputs(
    x: Float[Array, "B T channels"],
    taps: Float[Array, "channels taps"],
    segments: Int[Array, "B T"],
    before: Float[Array, "B reach channels"] | None,
    call: Call,
) -> Inputs:
    """Computes as defined by `delta_inputs`."""
    if before is None:
        before = jnp.zeros((len(x), taps.shape[1] - 1, x.shape[2]), x.dtype)
    flat = jax.nn.silu(convolved(x, taps, segments, before))
    key, heads = call.key_heads * call.key_width, (*x.shape[:2], -1)
    q, k = (_unit(part.reshape(*heads, call.key_width)) for part in (flat[..., :key], flat[..., key : 2 * key]))
    v = flat[..., 2 * key :].reshape(*heads, call.value_width)
    q, k, v = (part.astype(x.dtype) for part in (q * call.key_width**-0.5, k, v))
    return q, k, v


def convolved(
    x: Float[Array, "B T channels"],
    taps: Float[Array, "channels taps"],
    segments: Int[Array, "B T"],
    before: Float[Array, "B reach channels"],
) -> Float[Array, "B T channels"]:
    """Returns sum_j taps[:, j] x[t - taps + 1 + j] over tokens of t's segment, float32; `before` are the taps - 1 inputs of the first
    segment that precede the row, 0 where it begins there."""
    reach, length = taps.shape[-1] - 1, x.shape[1]
    whole = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    owners = jnp.concatenate([jnp.broadcast_to(segments[:, :1], (x.shape[0], reach)), segments], axis=1)
    total = jnp.zeros(x.shape, jnp.float32)
    for tap in range(reach + 1):
        inside = owners[:, tap : tap + length] == segments
        seen = jnp.where(inside[..., None], whole[:, tap : tap + length], 0).astype(jnp.float32)
        total = total + taps[:, tap].astype(jnp.float32) * seen
    return total


def _unit(x: Float[Array, "... d"]) -> Float[Array, "... d"]:
    """Scales `x` to length 1, or shorter where it is almost 0."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + SMALL)
