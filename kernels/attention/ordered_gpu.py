"""Attention in one order on Hopper: one Triton program for packed rows, prompts and new tokens alike.

A program has QUERIES queries of one sequence (for a new token, the query heads that share a key head, repeated to that number), and
processes the sequence's keys in blocks of KEYS, counted from its first token, one after the other, with a running maximum m and sum of
e, e = exp(s - m). Tiles of packed rows count queries from the sequence's first token too, so that every query of a tile processes the
same blocks; a block of which a query sees nothing changes no bit of its sums. All three uses have the same sizes of tiles and blocks,
and so the same instructions.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.attention.api import Call
from jaxrl_llm.kernels.attention.cudnn import segment_table

QUERIES, KEYS = 64, 64
WARPS, STAGES = 4, 3
WIDTHS = (32, 64, 128, 256)
MASKED = -1e30
LOG2E = math.log2(math.e)


def unfit(dtype: str, width: int) -> str | None:
    """Returns the reason why the kernel cannot take heads of this width and dtype, or None."""
    if dtype != "bfloat16":
        return f"on GPUs its products are of bfloat16 (got {dtype}): set Policy's compute_dtype"
    return None if width in WIDTHS else f"heads must be one of {WIDTHS} wide (got {width})"


def packed(
    q: Float[Array, "B T H C"],
    k: Float[Array, "B T K C"],
    v: Float[Array, "B T K C"],
    segments: Int[Array, "B T"],
    call: Call,
    *,
    interpret: bool = False,
) -> Float[Array, "B T H C"]:
    """Computes attention as defined by `attention`."""
    assert call.max_segments is not None  # refused otherwise
    tiles = -(-call.queries // QUERIES) + min(call.max_segments, call.queries)
    run = pl.pallas_call(
        functools.partial(_packed_tile, call=call),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(call.heads, tiles, call.batch),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
    )
    out: jax.Array = run(_tiles(segments, call.max_segments, tiles), q, k, v)
    return jnp.where((segments > 0)[..., None, None], out, 0)


def _tiles(segments: Int[Array, "B T"], most: int, tiles: int) -> Int[Array, "B tiles 3"]:
    """Returns for each tile the first token of its sequence in the row, the sequence's length (0 for no sequence), and the tile's
    number in it."""
    offsets, lengths = segment_table(segments, most)
    offsets, lengths = offsets[:, : lengths.shape[1]], jnp.maximum(lengths, 0)
    count = -(-lengths // QUERIES)
    end = jnp.cumsum(count, axis=1)
    number = jnp.arange(tiles)
    owner = (number[None, :, None] >= end[:, None, :]).sum(axis=2)
    last = lengths.shape[1] - 1
    first, size, before = (
        jnp.take_along_axis(x, jnp.minimum(owner, last), axis=1) for x in (offsets, lengths, end - count)
    )
    return jnp.stack([first, jnp.where(owner <= last, size, 0), number - before], axis=2).astype(jnp.int32)


def _packed_tile(tiles: Any, q: Any, k: Any, v: Any, out: Any, *, call: Call) -> None:
    head, tile, row = (pl.program_id(i) for i in range(3))
    first, size, number = (tiles[row, tile, i] for i in range(3))

    @pl.when(size > 0)
    def _attend() -> None:
        at = jnp.minimum(number * QUERIES + jnp.arange(QUERIES), size - 1)
        place, kv = first + at, lax.div(head, call.heads // call.kv_heads)

        def block(r: Any) -> tuple[Any, Any]:
            there = first + jnp.minimum(r * KEYS + jnp.arange(KEYS), size - 1)
            return k[row, there, kv, :], v[row, there, kv, :]

        last = jnp.minimum((number + 1) * QUERIES, size) - 1
        sums = over_blocks(q[row, place, head, :], at, block, (number * QUERIES, last), call.window, call.scale)
        out[row, place, head, :] = sums.astype(out.dtype)


@functools.partial(jax.jit, static_argnames=("window", "interpret"))
def decoded(
    q: Float[Array, "S H C"],
    keys: Float[Array, "L S T K C"],
    values: Float[Array, "L S T K C"],
    layer: Int[Array, ""],
    positions: Int[Array, " S"],
    *,
    window: int | None,
    interpret: bool = False,
) -> Float[Array, "S H C"]:
    """Computes attention as defined by `decode_attention`."""
    slots, heads, width = q.shape
    kv_heads = keys.shape[3]
    grouped = q.reshape(slots, kv_heads, heads // kv_heads, width)
    out: jax.Array = pl.pallas_call(
        functools.partial(_slot_head, window=window),
        out_shape=jax.ShapeDtypeStruct(grouped.shape, q.dtype),
        grid=(slots, kv_heads),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
    )(layer.reshape(1), positions, grouped, keys, values)
    return out.reshape(q.shape)


def _slot_head(layer: Any, positions: Any, q: Any, keys: Any, values: Any, out: Any, *, window: int | None) -> None:
    slot, head, index = pl.program_id(0), pl.program_id(1), layer[0]
    rows = jnp.minimum(jnp.arange(QUERIES), q.shape[2] - 1)
    last = positions[slot]

    def block(r: Any) -> tuple[Any, Any]:
        there = jnp.minimum(r * KEYS + jnp.arange(KEYS), last)
        return keys[index, slot, there, head, :], values[index, slot, there, head, :]

    at = jnp.full(QUERIES, last, jnp.int32)
    sums = over_blocks(q[slot, head, rows, :], at, block, (last, last), window, q.shape[3] ** -0.5)
    out[slot, head, rows, :] = sums.astype(out.dtype)


def over_blocks(
    q: Float[Array, "Q C"],
    at: Int[Array, " Q"],
    block: Callable[[Any], tuple[Any, Any]],
    bounds: tuple[Any, Any],
    window: int | None,
    scale: float,
) -> Float[Array, "Q C"]:
    """Attends to the blocks of keys that any query sees, float32, in a Triton program.

    Args:
      q: queries of one sequence.
      at: the queries' positions in it.
      block: returns keys and values at the positions r KEYS to (r + 1) KEYS - 1; unseen ones may be any finite numbers.
      bounds: the least and the largest of the positions.
      window: as in `attention`.
      scale: factor of the scores.
    """

    def add(r: Any, sums: Any) -> Any:
        m, total, mixed = sums
        k, v = block(r)
        scores = lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32) * (scale * LOG2E)
        distance = at[:, None] - (r * KEYS + jnp.arange(KEYS))[None, :]
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        scores = jnp.where(seen, scores, MASKED)
        new = jnp.maximum(m, jnp.max(scores, axis=1))
        factor, e = jnp.exp2(m - new), jnp.where(seen, jnp.exp2(scores - new[:, None]), 0.0)
        product = lax.dot_general(e.astype(v.dtype), v, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return new, total * factor + jnp.sum(e, axis=1), mixed * factor[:, None] + product

    first = 0 if window is None else lax.div(jnp.maximum(bounds[0] + 1 - window, 0), KEYS)
    start = (jnp.full(len(q), MASKED), jnp.zeros(len(q)), jnp.zeros(q.shape))
    _, total, mixed = lax.fori_loop(first, lax.div(bounds[1], KEYS) + 1, add, start)
    return mixed / total[:, None]
