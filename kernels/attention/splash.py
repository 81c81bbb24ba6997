"""Attention over packed rows by JAX's splash attention on TPU. It is tested in interpret mode, and was not run on TPU hardware.

The causal or windowed mask is computed in the kernel and fully masked blocks are skipped; segments mask the rest.
Blocks of 512 tokens (or fewer, where those do not divide the row) stay in VMEM.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.attention.api import Call

RUNS_ON = ("tpu", "TPUs")
# The name of its output and sums in rematerialisation policies.
RESIDUAL = "splash_attention_residual"
BLOCKS = (512, 256, 128)
LANES = 128


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if call.max_segments is None or call.queries != call.keys:
        return "it takes packed rows whose queries are the keys' tokens, with max_segments given"
    if call.queries % LANES:
        return f"rows must be a multiple of {LANES} tokens (got {call.queries}): set the length of a packed row"
    if call.width % 64:
        return f"heads must be a multiple of 64 wide (got {call.width})"
    return None


def attend(
    q: Float[Array, "B T H C"],
    k: Float[Array, "B S K C"],
    v: Float[Array, "B S K C"],
    positions: tuple[Int[Array, "B T"], Int[Array, "B S"]],
    segments: tuple[Int[Array, "B T"], Int[Array, "B S"]],
    call: Call,
    *,
    interpret: bool = False,
) -> Float[Array, "B T H C"]:
    """Computes attention of packed rows; `positions`, which count up within each segment as `max_segments` promises, are not read.

    The segments of queries and keys are the same. `interpret` runs the kernel on a CPU.
    """
    length, heads = q.shape[1], q.shape[2]
    block = next(size for size in BLOCKS if length % size == 0)
    square = (length, length)
    one = masks.CausalMask(square) if call.window is None else masks.LocalMask(square, (call.window - 1, 0), 0)
    sizes = kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    make = partial(
        kernel.make_splash_mha,
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=RESIDUAL,
        interpret=interpret,
    )
    run = make(masks.MultiHeadMask([one] * heads))

    def of_row(q: jax.Array, k: jax.Array, v: jax.Array, row: jax.Array) -> jax.Array:
        out: jax.Array = run(q, k, v, segment_ids=kernel.SegmentIds(row, row))
        return out

    q, k, v = (x.swapaxes(1, 2) for x in ((q * call.scale).astype(q.dtype), k, v))
    out = jax.vmap(of_row)(q, k, v, segments[0].astype(jnp.int32)).swapaxes(1, 2)
    # In the kernel padding attends to padding; its output is dropped, and thereby its share of every gradient.
    result: jax.Array = jnp.where((segments[0] != 0)[:, :, None, None], out, 0).astype(v.dtype)
    return result
