"""Computes attention of one new token a slot over the cache of its layer, read in place: one function has several backends."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import dispatch

# Tried in this order; a backend is the module of that name, with `refusal(call)` and `attend(...)`.
BACKENDS = ("triton", "reference")
# Dtypes of a cache beside that of the queries.
NARROW = ("float8_e4m3fn",)


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a backend may look at to accept or refuse a call: all static.

    Attributes:
      platform: "cpu", "gpu" or "tpu", where the call will run.
      dtype: name of the dtype of the queries.
      cache_dtype: name of the dtype of keys and values.
      heads: query heads.
      kv_heads: key and value heads.
      width: width of a head.
      length: entries of a slot's cache, tokens.
      window: entries this many positions behind the query, or more, are not seen; None sees all.
    """

    platform: str
    dtype: str
    cache_dtype: str
    heads: int
    kv_heads: int
    width: int
    length: int
    window: int | None


def decode_attention(
    q: Float[Array, "S H C"],
    keys: Float[Array, "L S T K C"],
    values: Float[Array, "L S T K C"],
    layer: Int[Array, ""],
    positions: Int[Array, " S"],
    *,
    window: int | None = None,
    backend: str | None = None,
) -> Float[Array, "S H C"]:
    """Computes softmax attention of each slot's query over the entries 0..position of its cache, scores scaled by C ** -0.5.

    Args:
      q: a query a slot; H is a multiple of K, and query head h reads key head h // (H // K).
      keys: the cache's keys of all layers, those of the new token among them; in the dtype of `q` or one of 8 bits, which is
        brought to that of `q` as it is read.
      values: the cache's values.
      layer: which layer is read, in 0..L-1.
      positions: position of each query, tokens; at least 0. Beyond the cache's last entry, that one is the last seen.
      window: sees entries with position - entry < window; None sees all.
      backend: one of BACKENDS, or None for the first that supports the call.

    Returns:
      [S, H, C] in the dtype of `q`.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown backend, or a named backend that does not support the call.
    """
    if keys.shape != values.shape or keys.shape[1] != q.shape[0] or keys.shape[4] != q.shape[2]:
        raise ValueError(
            f"q [S, H, C] and cache [L, S, T, K, C] must fit (got {q.shape}, {keys.shape}, {values.shape})"
        )
    if q.shape[1] % keys.shape[3]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {keys.shape[3]} kv heads evenly")
    if keys.dtype != values.dtype or keys.dtype not in (q.dtype, *NARROW):
        found = f"{q.dtype}, {keys.dtype}, {values.dtype}"
        raise ValueError(f"queries and cache must share one dtype, or the cache be of {NARROW} (got {found})")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, or None to see all (got {window})")
    call = Call(
        platform=dispatch.device().platform,
        dtype=q.dtype.name,
        cache_dtype=keys.dtype.name,
        heads=q.shape[1],
        kv_heads=keys.shape[3],
        width=q.shape[2],
        length=keys.shape[2],
        window=window,
    )
    module = dispatch.choose("decode_attention", BACKENDS, call, backend)
    last = jnp.clip(positions, 0, keys.shape[2] - 1).astype(jnp.int32)
    out: jax.Array = module.attend(q, keys, values, jnp.asarray(layer, jnp.int32), last, call)
    return out
