"""Decode attention on NVIDIA GPUs: a Pallas kernel, compiled by Triton, that reads each filled entry of the cache once.

Grid: one program per slot and key head, for all query heads that share it (padded to the 16 rows of a tensor-core product). It iterates
over the entries that the query sees in blocks of BLOCK with a running maximum m and sum of e, e = exp(s - m), rescaled when m grows
(https://arxiv.org/abs/1805.02867). Rows and entries beyond the last repeat it: loads stay within the arrays, repeated rows store the
same values as the last one, and repeated entries weigh 0. It reads the filled keys and values once. Of a cache of pages, a block lies
within one page, whose number it reads from the table.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.decode_attention.api import Call
from jaxrl_llm.kernels.decode_attention.reference import MASKED

RUNS_ON = ("gpu", "NVIDIA GPUs")
BLOCK = 64
WARPS = 4
STAGES = 3
LEAST_ROWS = 16


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if dispatch.capability() is None:
        return "it runs on NVIDIA GPUs (this is another GPU)"
    if call.dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, not {call.dtype}: set Policy's compute_dtype"
    if call.page is not None and call.page % BLOCK:
        return f"pages must be of a multiple of {BLOCK} entries (got {call.page})"
    if call.width not in (32, 64, 128, 256):
        return f"heads must be 32, 64, 128 or 256 wide (got {call.width})"
    return None


def attend(
    q: Float[Array, "S H C"],
    keys: Float[Array, "L P T K C"],
    values: Float[Array, "L P T K C"],
    layer: Int[Array, ""],
    positions: Int[Array, " S"],
    call: Call,
    table: Int[Array, "S N"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "S H C"]:
    """Computes attention as defined by `decode_attention`; softmax in float32, products in the dtype of `q` with float32 sums."""
    slots, width, group = len(q), call.width, call.heads // call.kv_heads
    grouped = q.reshape(slots, call.kv_heads, group, width)
    out: jax.Array = pl.pallas_call(
        functools.partial(_slot_head, call=call, group=group),
        out_shape=jax.ShapeDtypeStruct(grouped.shape, q.dtype),
        grid=(slots, call.kv_heads),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
    )(layer.reshape(1), positions, grouped, keys, values, *([] if table is None else [table]))
    return out.reshape(q.shape)


def _slot_head(layer: Any, positions: Any, q: Any, keys: Any, values: Any, *rest: Any, call: Call, group: int) -> None:
    *table, out = rest
    slot, head, index = pl.program_id(0), pl.program_id(1), layer[0]
    rows = jnp.minimum(jnp.arange(max(LEAST_ROWS, pl.next_power_of_2(group))), group - 1)
    last = positions[slot]
    first = 0 if call.window is None else jnp.maximum(last + 1 - call.window, 0)
    queries = q[slot, head, rows, :]
    scale = call.width**-0.5

    def add(block: Any, sums: Any) -> Any:
        m, total, mixed = sums
        entries = block * BLOCK + jnp.arange(BLOCK)
        there = jnp.minimum(entries, last)
        own = slot if call.page is None else table[0][slot, block * BLOCK // call.page]
        there = there if call.page is None else there % call.page
        k, v = (x[index, own, there, head, :].astype(q.dtype) for x in (keys, values))
        scores = lax.dot_general(queries, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32) * scale
        scores = jnp.where((entries <= last) & (entries >= first), scores, MASKED)
        new = jnp.maximum(m, jnp.max(scores, axis=1))
        factor, e = jnp.exp(m - new), jnp.exp(scores - new[:, None])
        product = lax.dot_general(e.astype(v.dtype), v, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return new, total * factor + jnp.sum(e, axis=1), mixed * factor[:, None] + product

    # The first block that is read has a seen entry, so that its maximum is above MASKED.
    start = (jnp.full(len(rows), MASKED), jnp.zeros(len(rows)), jnp.zeros((len(rows), call.width)))
    _, total, mixed = lax.fori_loop(first // BLOCK, last // BLOCK + 1, add, start)
    out[slot, head, rows, :] = (mixed / total[:, None]).astype(out.dtype)
