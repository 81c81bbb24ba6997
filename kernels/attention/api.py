"""Computes attention over packed rows: one function with several backends; positions and segments give the mask.

Each device and dtype has a path whose memory grows with the tokens and not with their square: `cudnn` on Hopper and
later, `cudnn_segments` on Ampere and Ada, `splash` on TPUs, and `blocked` everywhere else and in float32; `reference`
takes the calls with few scores.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import dispatch

# Tried in this order; a backend is the module of that name, with `refusal(call)` and `attend(...)`.
BACKENDS = ("cudnn", "cudnn_segments", "splash", "reference", "blocked", "ordered")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class Call:
    """The static description of a call, by which a backend accepts or refuses it.

    Attributes:
      platform: platform on which the call runs, "cpu", "gpu" or "tpu".
      dtype: name of the dtype of queries, keys and values.
      batch: number of rows.
      queries: length of the queries' axis, tokens.
      keys: length of the keys' axis, tokens.
      heads: number of query heads.
      kv_heads: number of key and value heads.
      width: width of a head.
      window: a key this many positions behind the query, or more, is not seen; None sees all.
      scale: factor of the scores.
      max_segments: most segments of a row in packed self-attention; None makes no promise.
    """

    platform: str
    dtype: str
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    width: int
    window: int | None
    scale: float
    max_segments: int | None


def attention(
    q: Float[Array, "B T H C"],
    k: Float[Array, "B S K C"],
    v: Float[Array, "B S K C"],
    *,
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    q_segments: Int[Array, "B T"],
    k_segments: Int[Array, "B S"],
    window: int | None = None,
    scale: float | None = None,
    max_segments: int | None = None,
    backend: str | None = None,
) -> Float[Array, "B T H C"]:
    """Computes softmax attention where a query sees the keys of its own segment at positions up to its own.

    Args:
      q: queries; H is a multiple of K, and query head h reads key head h // (H // K).
      k: keys.
      v: values.
      q_positions: position of each query within its segment, tokens.
      k_positions: position of each key within its segment, tokens.
      q_segments: segment of each query; 0 is padding.
      k_segments: segment of each key; 0 is padding.
      window: a query sees keys with q_position - k_position < window; None sees all.
      scale: factor of the scores; None is C ** -0.5.
      max_segments: static bound on the segments of a row. It promises packed self-attention: the queries are the
        keys' tokens, segments are contiguous and positions count up by one within each; the packed backends need it.
      backend: one of BACKENDS, or None for the first that supports the call.

    Returns:
      [B, T, H, C] in the dtype of `q`; exact zeros where a query sees nothing.

    Raises:
      ValueError: shapes or dtypes that do not fit, a size that is not positive, an unknown backend, or a named
        backend that does not support the call.
    """
    _check_shapes(q, k, v, window, max_segments)
    _check_rows({"q_positions": q_positions, "q_segments": q_segments}, q.shape[:2])
    _check_rows({"k_positions": k_positions, "k_segments": k_segments}, k.shape[:2])
    call = Call(
        platform=dispatch.device().platform,
        dtype=q.dtype.name,
        batch=q.shape[0],
        queries=q.shape[1],
        keys=k.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        width=q.shape[3],
        window=window,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        max_segments=max_segments,
    )
    module = dispatch.choose("attention", BACKENDS, call, backend)
    out: jax.Array = module.attend(q, k, v, (q_positions, k_positions), (q_segments, k_segments), call)
    return out


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, max_segments: int | None) -> None:
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        shapes = f"{q.shape}, {k.shape}, {v.shape}"
        raise ValueError(
            f"q [B, T, H, C] and k, v [B, S, K, C] must share B and C, and k and v all axes (got {shapes})"
        )
    if q.size == 0 or k.size == 0:
        raise ValueError(f"attention needs at least one row, token and head (got q {q.shape}, k {k.shape})")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads cannot share {k.shape[2]} kv heads evenly: make heads a multiple of kv_heads"
        )
    if not q.dtype == k.dtype == v.dtype or jnp.dtype(q.dtype).name not in DTYPES:
        raise ValueError(f"q, k and v must share one dtype of {DTYPES} (got {q.dtype}, {k.dtype}, {v.dtype})")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, or None to see all (got {window})")
    if max_segments is not None and max_segments < 1:
        raise ValueError(f"max_segments must be at least 1, or None (got {max_segments})")


def _check_rows(arrays: dict[str, jax.Array], shape: tuple[int, ...]) -> None:
    for name, x in arrays.items():
        if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} must be integers {shape} (got {x.dtype} {x.shape})")
