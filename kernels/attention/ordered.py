"""Attention whose result for a token has the same bits in every packing: blocks of keys begin with their sequence.

A query processes the keys of its sequence in blocks of KEYS, counted from the sequence's first token, one block after the other; the
products of a block have one shape whatever is packed, prefilled or decoded together. A block of which a query sees nothing changes no
bit of its sums. This file serves CPUs, and `ordered_gpu` Hopper GPUs. The gradient is computed by the device's own choice of backends.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.attention.api import Call, attention
from jaxrl_llm.kernels.ordered import arithmetic
from jaxrl_llm.kernels.ordered.arithmetic import ONES, exp, pin, rounded

KEYS = 16  # keys of a block, and queries of a tile
MASKED = -1e30

Block = tuple[Float[Array, "N S K C"], Float[Array, "N S K C"]]


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if call.max_segments is None or call.queries != call.keys:
        return "it needs packed rows, whose sequences are no more than max_segments"
    return arithmetic.refusal(call.platform) or (
        gpu().unfit(call.dtype, call.width) if call.platform == "gpu" else None
    )


def gpu() -> ModuleType:
    """Returns the module of Hopper's kernel."""
    from jaxrl_llm.kernels.attention import ordered_gpu

    return ordered_gpu


def attend(
    q: Float[Array, "B T H C"],
    k: Float[Array, "B T K C"],
    v: Float[Array, "B T K C"],
    positions: tuple[Int[Array, "B T"], Int[Array, "B T"]],
    segments: tuple[Int[Array, "B T"], Int[Array, "B T"]],
    call: Call,
) -> Float[Array, "B T H C"]:
    """Computes attention as defined in `reference`, with float32 sums."""
    out: jax.Array = _attend(call, q, k, v, positions[0], segments[0])
    return out


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, q: Any, k: Any, v: Any, positions: Any, segments: Any) -> jax.Array:
    if call.platform == "gpu":
        out: jax.Array = gpu().packed(q, k, v, segments, call)
        return out
    return _packed(q, k, v, positions, segments, call)


def _forward(call: Call, q: Any, k: Any, v: Any, positions: Any, segments: Any) -> tuple[jax.Array, Any]:
    return _attend(call, q, k, v, positions, segments), (q, k, v, positions, segments)


def _backward(call: Call, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    *arrays, positions, segments = saved
    places = {"q_positions": positions, "k_positions": positions, "q_segments": segments, "k_segments": segments}
    more: dict[str, Any] = {"window": call.window, "scale": call.scale, "max_segments": call.max_segments}
    with dispatch.ordering(False):
        _, pulled = jax.vjp(lambda q, k, v: attention(q, k, v, **places, **more), *arrays)
        return (*pulled(g), None, None)


_attend.defvjp(_forward, _backward)


def _packed(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, segments: jax.Array, call: Call
) -> jax.Array:
    """Computes attention of rows, whose sequences are moved to positions that are multiples of KEYS and back."""
    assert call.max_segments is not None  # by `refusal`
    rows, length = positions.shape
    blocks = -(-length // KEYS) + min(call.max_segments, length)
    used = segments > 0
    # Sequence number j that begins at s is placed at s rounded up plus j blocks, so that no two overlap.
    number = jnp.cumsum(used & (positions == 0), axis=1) - 1
    first = -(-(jnp.arange(length) - positions) // KEYS) + number  # the first block of the token's sequence
    place = jnp.where(used, first * KEYS + positions, blocks * KEYS)
    row = jnp.arange(rows)[:, None]

    def spread(x: jax.Array) -> jax.Array:
        """Spreads [B, T, heads, C] to [B, blocks, KEYS, heads, C], with zeros between sequences."""
        out = jnp.zeros((rows, blocks * KEYS, *x.shape[2:]), x.dtype).at[row, place].set(x, mode="drop")
        return out.reshape(rows, blocks, KEYS, *x.shape[2:])

    own = jnp.broadcast_to(jnp.arange(blocks), (rows, blocks))
    firsts = own.at[row, place // KEYS].set(first, mode="drop")
    keys, values = spread(k), spread(v)

    def block(r: jax.Array) -> Block:
        index = jnp.minimum(firsts + r, blocks - 1)
        return _joined(keys[row, index]), _joined(values[row, index])

    at = ((own - firsts)[..., None] * KEYS + jnp.arange(KEYS)).reshape(-1, KEYS)
    out = over_blocks(_joined(spread(q)), at, block, jnp.max(own - firsts) + 1, call.window, call.scale)
    out = out.reshape(rows, blocks * KEYS, *q.shape[2:])[row, jnp.minimum(place, blocks * KEYS - 1)]
    return rounded(jnp.where(used[..., None, None], out, 0.0), q.dtype)


def _joined(x: jax.Array) -> jax.Array:
    """Reshapes [B, blocks, ...] to [B blocks, ...]."""
    return x.reshape(-1, *x.shape[2:])


def over_blocks(
    q: Float[Array, "N Q H C"],
    positions: Int[Array, "N Q"],
    block: Callable[[Any], Block],
    count: Int[Array, ""],
    window: int | None,
    scale: float,
) -> Float[Array, "N Q H C"]:
    """Attends to blocks of keys, one after the other; the result is float32, with zeros where nothing is seen.

    Args:
      q: tiles of queries of one sequence each.
      positions: positions of the queries in their sequences.
      block: returns keys and values at the positions r KEYS to (r + 1) KEYS - 1 of each tile's sequence; unseen ones may be any finite
        numbers.
      count: number of blocks that any query sees.
      window: as in `attention`.
      scale: factor of the scores.
    """
    tiles, queries, heads, width = q.shape
    kv_heads = block(jnp.int32(0))[0].shape[2]
    group = heads // kv_heads
    lines = q.astype(jnp.float32).reshape(tiles, queries, kv_heads, group, width).swapaxes(1, 2)
    lines = lines.reshape(tiles, kv_heads, queries * group, width)
    at = jnp.repeat(positions, group, axis=1)[:, None, :, None]

    def add(r: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        maximum, sums = carry
        k, v = (x.astype(jnp.float32).swapaxes(1, 2) for x in block(r))
        v = jnp.concatenate([v, jnp.ones((*v.shape[:-1], ONES))], axis=-1)  # the sum of the ones is the weights' total
        scores = pin(_products(lines, k, 3) * scale)
        seen = _seen(at, r, window)
        scores = jnp.where(seen, scores, MASKED)
        new = jnp.maximum(maximum, scores.max(axis=-1, keepdims=True))
        weights = jnp.where(seen, exp(scores - new), 0.0)
        return new, pin(sums * exp(maximum - new)) + _products(weights, v, 2)

    zeros = (jnp.full((*lines.shape[:3], 1), MASKED), jnp.zeros((*lines.shape[:3], width + ONES)))
    _, sums = lax.fori_loop(0, count, add, zeros)
    total = sums[..., width:][..., :1]
    out = sums[..., :width] / jnp.where(total > 0, total, 1.0)
    return out.reshape(tiles, kv_heads, queries, group, width).swapaxes(1, 2).reshape(q.shape)


def _seen(at: Int[Array, "N 1 Q 1"], r: Any, window: int | None) -> Bool[Array, "N 1 Q S"]:
    distance = at - (r * KEYS + jnp.arange(KEYS))
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _products(x: Float[Array, "N K Q S"], y: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Contracts the last axis of `x` with an axis of `y`, tile by tile and head by head."""
    return lax.dot_general(x, y, (((3,), (axis,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
