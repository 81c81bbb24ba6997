"""The memory layout of the keys and values of all layers, which is the one that the target device reads fastest.

    entries first   [L, S, T, K, C]   everywhere but on TPUs: a slot's new entry is contiguous
    heads first     [L, S, K, T, C]   on TPUs, where the last two axes form tiles: K alone often fills 2 of a tile's 8 rows

L layers, S slots, T entries of a slot, K key heads of width C.
"""

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import dispatch

ENTRIES_FIRST = ("layers", "batch", None, "kv_heads", "head_width")
HEADS_FIRST = ("layers", "batch", "kv_heads", None, "head_width")
PAGE = 128  # entries that the TPU kernel copies at once


def heads_first() -> bool:
    """Returns True where heads come before entries in the caches of the target device."""
    return dispatch.device().platform == "tpu"


def axes() -> tuple[str | None, ...]:
    """Returns the logical axes of keys, or values, of all layers."""
    return HEADS_FIRST if heads_first() else ENTRIES_FIRST


def entry_axis() -> int:
    """Returns the axis of the entries of a slot."""
    return axes().index(None)


def page() -> int:
    """Returns the number of entries of which a slot's cache should be a multiple, so that the fastest backend can take it."""
    return PAGE if heads_first() else 1


def shape(layers: int, slots: int, length: int, kv_heads: int, width: int) -> tuple[int, int, int, int, int]:
    """Returns the shape of the keys, or the values, of all layers."""
    return (layers, slots, kv_heads, length, width) if heads_first() else (layers, slots, length, kv_heads, width)


def write(
    entries: Float[Array, "L S *T_K C"],
    new: Float[Array, "S N K C"],
    layer: Int[Array, ""],
    positions: Int[Array, "S N"],
    *,
    fresh: bool = False,
) -> Float[Array, "L S *T_K C"]:
    """Writes N new entries per slot into the keys, or the values, at their positions; those beyond the end are dropped.

    It is a scatter of the new entries alone, which XLA carries out in place. TPU's compiler changes the whole cache's layout for a
    scatter; where the cache is `fresh`, that is, positions count up from 0, the entries are written as one slice there.
    """
    if heads_first() and fresh:
        return entries.at[layer, :, :, : new.shape[1]].set(new[:, : entries.shape[3]].swapaxes(1, 2))
    slots = jax.numpy.arange(len(new))[:, None]
    where = (layer, slots, slice(None), positions) if heads_first() else (layer, slots, positions)
    return entries.at[where].set(new, mode="drop")


def of_layer(entries: Float[Array, "L S *T_K C"], layer: Int[Array, ""]) -> Float[Array, "S T K C"]:
    """Returns a copy of one layer's keys, or values, entries first."""
    own = lax.dynamic_index_in_dim(entries, layer, keepdims=False)
    return own.swapaxes(1, 2) if heads_first() else own
