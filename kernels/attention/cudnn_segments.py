"""Computes attention over packed rows by cuDNN on Ampere and Ada GPUs, one segment of each row at a time.

cuDNN supports packed rows from Hopper on; before, it takes one sequence per row, with its length. Each turn moves the next segment of
every row to the row's beginning, attends there by JAX's public function, and moves the result back, so that memory grows with the
tokens alone; cuDNN skips the blocks beyond a segment's length. The backward pass recomputes each turn. A turn reads and writes whole
rows, so rows of many short segments are refused.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.attention import cudnn
from jaxrl_llm.kernels.attention.api import Call

RUNS_ON = cudnn.RUNS_ON
MOST_WIDTH = 128  # widest head before Hopper
LEAST_TOKENS = 128  # fewest tokens of a segment on average


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if reason := cudnn.unfit(call, MOST_WIDTH):
        return reason
    if call.max_segments is not None and call.max_segments * LEAST_TOKENS > max(call.queries, LEAST_TOKENS):
        most = call.queries // LEAST_TOKENS
        return (
            f"it takes one turn a segment, at most {most} of them in a row of {call.queries} (got {call.max_segments})"
        )
    return cudnn.absent((8, 0), "flash attention needs")


def attend(
    q: Float[Array, "B T H C"],
    k: Float[Array, "B S K C"],
    v: Float[Array, "B S K C"],
    positions: tuple[Int[Array, "B T"], Int[Array, "B S"]],
    segments: tuple[Int[Array, "B T"], Int[Array, "B S"]],
    call: Call,
    *,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B T H C"]:
    """Computes attention of packed rows; `positions`, which count up within each segment as `max_segments` promises, are not read.

    The segments of queries and keys are the same. `implementation` is that of JAX's attention: "xla" runs on a CPU, for tests.
    """
    assert call.max_segments is not None  # refused otherwise
    offsets, lengths = cudnn.segment_table(segments[0], call.max_segments)
    offsets, lengths = jnp.maximum(offsets[:, : call.max_segments], 0), jnp.maximum(lengths[:, : call.max_segments], 0)
    within = jnp.arange(call.queries)

    @jax.checkpoint
    def turn(arrays: tuple[jax.Array, ...], offset: jax.Array, length: jax.Array) -> jax.Array:
        """Returns the output [B, T, H, C] of one segment per row, and zeros elsewhere."""
        own = (within < length[:, None])[:, :, None, None]
        # Zeros beyond the segment keep values that cuDNN leaves unwritten there out of every gradient.
        moved = (jnp.where(own, _rolled(x, -offset), 0) for x in arrays)
        out = jax.nn.dot_product_attention(
            *moved,
            scale=call.scale,
            is_causal=True,
            query_seq_lengths=length,
            key_value_seq_lengths=length,
            local_window_size=None if call.window is None else (call.window - 1, 0),
            implementation=implementation,
        )
        return _rolled(jnp.where(own, out, 0), offset)

    def step(total: jax.Array, place: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + turn((q, k, v), *place), None  # each token has one segment, so nothing is rounded

    total, _ = jax.lax.scan(step, jnp.zeros_like(q), (offsets.T, lengths.T))
    return total


@partial(jax.vmap, in_axes=(0, 0))
def _rolled(x: Float[Array, "T heads C"], by: Int[Array, ""]) -> Float[Array, "T heads C"]:
    """Rotates each row by `by` tokens; the gradient is rotated back."""
    return jnp.roll(x, by, axis=0)
