"""The memory layout of the keys and values of all layers, which is the one that the target device reads fastest.

    entries first   [L, S, T, K, C]   everywhere but on TPUs: a slot's new entry is contiguous
    heads first     [L, S, K, T, C]   on TPUs, where the last two axes form tiles: K alone often fills 2 of a tile's 8 rows

L layers, S slots, T entries of a slot, K key heads of width C.

Or slots share a pool of P pages of E entries each, in the same orders with P and E in the places of S and T, and a table [S, N] has the
numbers of each slot's pages: entry t of slot s is entry t % E of page table[s, t // E]. Prompts of a group then are held once, and a slot
takes only the pages that it fills.
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


def write_paged(
    pages: Float[Array, "L P *E_K C"],
    new: Float[Array, "S K C"],
    layer: Int[Array, ""],
    positions: Int[Array, " S"],
    table: Int[Array, "S N"],
) -> Float[Array, "L P *E_K C"]:
    """Writes one new entry per slot into the pages of the keys, or the values; those beyond the table are dropped."""
    size = pages.shape[entry_axis()]
    # Beyond the table: beyond the last page, which drops the entry.
    number = table.at[jax.numpy.arange(len(new)), positions // size].get(mode="fill", fill_value=pages.shape[1])
    where = (layer, number, slice(None), positions % size) if heads_first() else (layer, number, positions % size)
    return pages.at[where].set(new, mode="drop")


def of_layer(
    entries: Float[Array, "L S *T_K C"], layer: Int[Array, ""], table: Int[Array, "R N"] | None = None
) -> Float[Array, "R T K C"]:
    """Returns a copy of one layer's keys, or values, entries first; of pages, those of the rows of a table, one after the other."""
    own = lax.dynamic_index_in_dim(entries, layer, keepdims=False)
    own = own.swapaxes(1, 2) if heads_first() else own
    return own if table is None else own[table].reshape(len(table), -1, *own.shape[2:])


def gathered(pages: Float[Array, "L P *E_K C"], table: Int[Array, "R N"]) -> Float[Array, "L R *T_K C"]:
    """Returns the pages of the rows of a table as whole slots."""
    found = pages[:, table]
    if heads_first():
        found = found.swapaxes(2, 3)
    axis = entry_axis()
    return found.reshape(*found.shape[:axis], -1, *found.shape[axis + 2 :])


def parts(entries: Float[Array, "L R *T_K C"], size: int) -> Float[Array, "L M *E_K C"]:
    """Returns whole slots, of a multiple of `size` entries, as R x T/size pages of `size` entries, those of a slot one after the other."""
    axis = entry_axis()
    cut = entries.reshape(*entries.shape[:axis], -1, size, *entries.shape[axis + 1 :])
    if heads_first():
        cut = cut.swapaxes(2, 3)
    return cut.reshape(cut.shape[0], -1, *cut.shape[3:])
