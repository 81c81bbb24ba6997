"""Decode attention with the same bits as the packed rows' attention, by blocks of keys from a slot's first entry and equally large
tiles of queries."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.attention import ordered as packed
from jaxrl_llm.kernels.decode_attention import cache
from jaxrl_llm.kernels.decode_attention.api import Call
from jaxrl_llm.kernels.ordered import arithmetic


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if call.page is not None:
        return "its cache holds whole slots, not pages"
    if call.cache_dtype != call.dtype:
        return f"its cache holds what the learner attends to, {call.dtype} (got {call.cache_dtype})"
    return arithmetic.refusal(call.platform) or (
        packed.gpu().unfit(call.dtype, call.width) if call.platform == "gpu" else None
    )


def attend(
    q: Float[Array, "S H C"],
    keys: Float[Array, "L S *T_K C"],
    values: Float[Array, "L S *T_K C"],
    layer: Int[Array, ""],
    positions: Int[Array, " S"],
    call: Call,
) -> Float[Array, "S H C"]:
    """Computes attention as defined by `decode_attention`, with float32 sums; on CPUs the other queries of a slot's tile are zeros."""
    if call.platform == "gpu":
        found: jax.Array = packed.gpu().decoded(q, keys, values, layer, positions, window=call.window)
        return found
    k, v = (cache.of_layer(x, layer) for x in (keys, values))
    tile = jnp.pad(q[:, None], ((0, 0), (0, packed.KEYS - 1), (0, 0), (0, 0)))
    at = jnp.broadcast_to(positions[:, None], tile.shape[:2])

    def block(r: jax.Array) -> packed.Block:
        entries = jnp.minimum(r * packed.KEYS + jnp.arange(packed.KEYS), call.length - 1)
        return k[:, entries], v[:, entries]

    count = jnp.max(positions) // packed.KEYS + 1
    out = packed.over_blocks(tile, at, block, count, call.window, call.width**-0.5)[:, 0]
    return arithmetic.rounded(out, q.dtype)
