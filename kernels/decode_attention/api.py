"""Computes attention of one new token per slot over the cache of its layer, read in place: one function with several backends."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.decode_attention import cache

# Tried in this order; a backend is the module of that name, with `refusal(call)` and `attend(...)`, or `step(...)` for those that also
# write.
BACKENDS = ("triton", "mosaic_tpu", "reference", "ordered")
WRITING = ("mosaic_tpu",)
READING = tuple(name for name in BACKENDS if name not in WRITING)
# Dtypes of a cache besides that of the queries.
NARROW = ("float8_e4m3fn",)


@dataclass(frozen=True, kw_only=True)
class Call:
    """The static description of a call, by which a backend accepts or refuses it.

    Attributes:
      platform: platform on which the call runs, "cpu", "gpu" or "tpu".
      dtype: name of the dtype of the queries.
      cache_dtype: name of the dtype of keys and values.
      heads: number of query heads.
      kv_heads: number of key and value heads.
      width: width of a head.
      length: entries of a slot's cache, tokens.
      window: entries this many positions behind the query, or more, are not seen; None sees all.
      page: entries of a page, where slots share pages; None where each has its own entries.
    """

    platform: str
    dtype: str
    cache_dtype: str
    heads: int
    kv_heads: int
    width: int
    length: int
    window: int | None
    page: int | None = None


def decode_attention(
    q: Float[Array, "S H C"],
    keys: Float[Array, "L P *T_K C"],
    values: Float[Array, "L P *T_K C"],
    layer: Int[Array, ""],
    positions: Int[Array, " S"],
    *,
    table: Int[Array, "S N"] | None = None,
    window: int | None = None,
    backend: str | None = None,
) -> Float[Array, "S H C"]:
    """Computes softmax attention of each slot's query over the entries 0..position of its cache, scores scaled by C ** -0.5.

    Args:
      q: one query per slot; H is a multiple of K, and query head h reads key head h // (H // K).
      keys: the cache's keys of all layers in the order of `cache.axes()`, those of the new token among them; in the dtype of `q` or in
        one of 8 bits, which is converted to that of `q` as it is read.
      values: the cache's values.
      layer: number of the layer that is read, in 0..L-1.
      positions: position of each query, tokens; at least 0. Beyond the cache's last entry, that one is the last seen.
      table: numbers of each slot's pages, in 0..P-1, where `keys` and `values` are P pages (`cache`); None where each slot has its own
        entries.
      window: a query sees entries with position - entry < window; None sees all.
      backend: one of READING, or None for the first that supports the call.

    Returns:
      [S, H, C] in the dtype of `q`.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown backend, or a named backend that does not support the call.
    """
    call = _call(q, keys, values, window, table)
    module = dispatch.choose("decode_attention", READING, call, backend)
    return _attended(module, q, (keys, values), layer, positions, call, table)


def decode_step(
    q: Float[Array, "S H C"],
    new: tuple[Float[Array, "S K C"], Float[Array, "S K C"]],
    cached: tuple[Float[Array, "L P *T_K C"], Float[Array, "L P *T_K C"]],
    layer: Int[Array, ""],
    positions: Int[Array, " S"],
    *,
    table: Int[Array, "S N"] | None = None,
    window: int | None = None,
    backend: str | None = None,
) -> tuple[Float[Array, "S H C"], tuple[Float[Array, "L P *T_K C"], Float[Array, "L P *T_K C"]]]:
    """Writes the keys and values of each slot's new token at its position, and attends as `decode_attention` does.

    Args:
      q: one query per slot.
      new: keys and values of the new tokens, in the cache's dtype; a position beyond the end is not written.
      cached: keys and values of all layers; donated arrays are written in place.
      layer: number of the layer that is written and read.
      positions: positions of the new tokens.
      table: as in `decode_attention`; no two slots may write to one entry that is read.
      window: as in `decode_attention`.
      backend: one of BACKENDS, or None for the first that supports the call.

    Returns:
      [S, H, C] in the dtype of `q`, and keys and values.

    Raises:
      ValueError: as for `decode_attention`, or new entries do not fit the cache.
    """
    call = _call(q, *cached, window, table)
    shape = (q.shape[0], call.kv_heads, call.width)
    if any((x.shape, x.dtype) != (shape, cached[0].dtype) for x in new):
        found = ", ".join(f"{x.dtype} {x.shape}" for x in new)
        raise ValueError(f"new keys and values must be {call.cache_dtype} {shape}, as the cache's (got {found})")
    module = dispatch.choose("decode_attention", BACKENDS, call, backend)
    layer, positions = jnp.asarray(layer, jnp.int32), positions.astype(jnp.int32)
    if module.__name__.rpartition(".")[2] in WRITING:
        out, cached = module.step(q, new, cached, layer, positions, call)
        return out, cached
    if table is None:
        keys, values = (cache.write(x, n[:, None], layer, positions[:, None]) for x, n in zip(cached, new))
    else:
        keys, values = (cache.write_paged(x, n, layer, positions, table) for x, n in zip(cached, new))
    return _attended(module, q, (keys, values), layer, positions, call, table), (keys, values)


def _attended(
    module: Any, q: jax.Array, cached: Any, layer: jax.Array, positions: jax.Array, call: Call, table: jax.Array | None
) -> jax.Array:
    last = jnp.clip(positions, 0, call.length - 1).astype(jnp.int32)
    pages = {} if table is None else {"table": table.astype(jnp.int32)}
    out: jax.Array = module.attend(q, *cached, jnp.asarray(layer, jnp.int32), last, call, **pages)
    return out


def _call(q: jax.Array, keys: jax.Array, values: jax.Array, window: int | None, table: jax.Array | None = None) -> Call:
    """Checks the arguments of a call and returns its description."""
    order = ("L", "S", "K", "T", "C") if cache.heads_first() else ("L", "S", "T", "K", "C")
    rows = keys.shape[1:2] if table is None else table.shape[:1]
    if keys.ndim != 5 or keys.shape != values.shape or (*rows, keys.shape[4]) != (q.shape[0], q.shape[2]):
        paged = "" if table is None else f", table {table.shape}"
        raise ValueError(
            f"q [S, H, C] and cache [{', '.join(order)}] must fit (got {q.shape}, {keys.shape}, {values.shape}{paged})"
        )
    sizes = dict(zip(order, keys.shape))
    if q.shape[1] % sizes["K"]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {sizes['K']} kv heads evenly")
    if keys.dtype != values.dtype or keys.dtype not in (q.dtype, *NARROW):
        found = f"{q.dtype}, {keys.dtype}, {values.dtype}"
        raise ValueError(f"queries and cache must share one dtype, or the cache be of {NARROW} (got {found})")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, or None to see all (got {window})")
    return Call(
        platform=dispatch.device().platform,
        dtype=q.dtype.name,
        cache_dtype=keys.dtype.name,
        heads=q.shape[1],
        kv_heads=sizes["K"],
        width=q.shape[2],
        length=sizes["T"] * (1 if table is None else table.shape[1]),
        window=window,
        page=None if table is None else sizes["T"],
    )
