"""Computes attention over packed rows in plain jnp, as the specification and as the backend of short rows.

    out_q = sum_k softmax_k(scale q.k) v_k  over the keys that `allowed` marks; 0 where it marks none.

Several copies of the scores, B H T S float32 values each, are held in memory, so calls with many scores are refused.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.kernels.attention.api import Call

# Finite, so that a row without allowed keys subtracts it from itself and stays free of NaN, also in the gradient.
MASKED = -1e30
MOST_SCORES = 64 * 2**20  # bytes


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    scores = 4 * call.batch * call.heads * call.queries * call.keys
    if scores > MOST_SCORES:
        return f"its scores would take {scores / 2**20:.0f} MiB, more than {MOST_SCORES // 2**20}"
    return None


def allowed(
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    q_segments: Int[Array, "B T"],
    k_segments: Int[Array, "B S"],
    window: int | None,
) -> Bool[Array, "B T S"]:
    """Returns True where a query sees a key: same non-zero segment, key not later, and within the window."""
    distance = q_positions[:, :, None] - k_positions[:, None, :]
    mask = (q_segments[:, :, None] == k_segments[:, None, :]) & (q_segments[:, :, None] != 0) & (distance >= 0)
    return mask if window is None else mask & (distance < window)


def attend(
    q: Float[Array, "B T H C"],
    k: Float[Array, "B S K C"],
    v: Float[Array, "B S K C"],
    positions: tuple[Int[Array, "B T"], Int[Array, "B S"]],
    segments: tuple[Int[Array, "B T"], Int[Array, "B S"]],
    call: Call,
) -> Float[Array, "B T H C"]:
    """Computes attention as the module defines it; softmax in float32, products in the dtype of `q` with float32 sums."""
    batch, length, heads, width = q.shape
    kv_heads = k.shape[2]
    mask = allowed(*positions, *segments, call.window)[:, None, None]  # [B, 1, 1, T, S]
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("btkgc,bskc->bkgts", grouped, k, preferred_element_type=jnp.float32) * call.scale
    scores = jnp.where(mask, scores, MASKED)
    weights = jnp.where(mask, jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("bkgts,bskc->btkgc", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)
