"""Computes attention over packed rows by cuDNN's flash attention, on Hopper and later, in bfloat16 and float16.

JAX's public attention takes one sequence per row, so this file calls the private function below it, which takes the offset and the length
of each segment. No other file does; VERSIONS are the versions whose signature was checked. The scores never reach memory: beyond its
inputs and outputs a call keeps B max_segments H T float32 sums. `cudnn_segments` serves GPUs before Hopper, on which cuDNN does not
support packed rows.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.attention.api import Call

RUNS_ON = ("gpu", "CUDA GPUs")
VERSIONS = ((0, 10), (0, 11))
MOST_WIDTH = 256
# The primitive that returns the output and its sums, as rematerialisation policies see it.
FORWARD = "dot_product_attention_fwd_wrapper"


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if reason := unfit(call, MOST_WIDTH):
        return reason
    if jax.__version_info__[:2] not in VERSIONS:
        return f"it relies on internals of jax {VERSIONS}, and this is {jax.__version__}"
    return absent((9, 0), "packed rows need")


def unfit(call: Call, most_width: int) -> str | None:
    """Returns why cuDNN cannot take packed rows of this dtype and shape, or None where it can."""
    if call.dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, not {call.dtype}: set Policy's compute_dtype"
    if call.max_segments is None or call.queries != call.keys:
        return "it takes packed rows whose queries are the keys' tokens, with max_segments given"
    if call.width % 8 or call.width > most_width:
        return f"heads must be a multiple of 8 and at most {most_width} wide (got {call.width})"
    return None


def absent(least: tuple[int, int], who: str) -> str | None:
    """Returns why the device has no cuDNN for `who`, which needs compute capability `least` or later, or None where it has."""
    found = dispatch.capability()
    if found is None:
        return "it runs on CUDA GPUs alone"
    if found < least:
        return f"{who} compute capability {least[0]}.{least[1]} or later (got {found[0]}.{found[1]})"
    if dispatch.foreign():
        return None
    from jax._src.lib import cuda_versions

    return "cuDNN is not installed" if cuda_versions is None else None


def attend(
    q: Float[Array, "B T H C"],
    k: Float[Array, "B S K C"],
    v: Float[Array, "B S K C"],
    positions: tuple[Int[Array, "B T"], Int[Array, "B S"]],
    segments: tuple[Int[Array, "B T"], Int[Array, "B S"]],
    call: Call,
) -> Float[Array, "B T H C"]:
    """Computes attention of packed rows; `positions` count up within each segment, as `max_segments` promises."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    assert call.max_segments is not None  # refused otherwise
    # cuDNN leaves its output at padding unwritten; selecting the inputs and the output excludes these values, also backward.
    used = (segments[0] != 0)[:, :, None, None]
    q, k, v = (jnp.where(used, x, 0) for x in (q, k, v))
    offsets, lengths = segment_table(segments[0], call.max_segments)
    run: Any = partial(dot_product_attention, scale=call.scale, mask_type=MaskType.PADDING_CAUSAL)
    out = run(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        qkv_layout="BTNH",
        sliding_window_length=call.window,
    )
    result: jax.Array = jnp.where(used, out, 0)
    return result


def segment_table(
    segments: Int[Array, "B T"], max_segments: int
) -> tuple[Int[Array, "B offsets"], Int[Array, "B segments"]]:
    """Returns (offsets [B, M + 1], lengths [B, M]) of the segments of each row in order, -1 where there are fewer than M.

    M is `max_segments`, but at least 2: with 1, cuDNN's interface ignores the offsets.
    """
    rows = segments.shape[0]
    count = max(max_segments, 2)
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
    starts = (segments != 0) & (segments != before)
    order = jnp.where(segments != 0, jnp.cumsum(starts, axis=1) - 1, count)  # number of a token's segment
    member = order[:, None, :] == jnp.arange(count)[None, :, None]  # [B, M, T]
    lengths = member.sum(axis=2, dtype=jnp.int32)
    present = lengths > 0
    offsets = jnp.where(present, jnp.argmax(member, axis=2), -1).astype(jnp.int32)
    offsets = jnp.concatenate([offsets, jnp.full((rows, 1), -1, jnp.int32)], axis=1)
    return offsets, jnp.where(present, lengths, -1)
