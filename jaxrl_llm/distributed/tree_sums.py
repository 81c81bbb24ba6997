"""Computes checksums of the arrays of device trees, on the device; a checkpoint is compared with them when it is read.

The sum is that of published weights (publication.manifest): a flipped bit anywhere changes it, and sharded arrays are not gathered.
The storage below orbax (OCDBT) has checksums for its own records, but none for the values of arrays: a flipped bit in a data
file is restored without an error.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array, UInt32

from jaxrl_llm.publication.manifest import digits, weights_of

_SUMS, _TEXT = "sums", "crc32"  # entries of a checkpoint's host state
SIZES = "sizes"  # the entry with the own shapes of padded arrays

Shape = tuple[int, ...]
Sizes = Mapping[
    str, Shape
]  # {path of an array that a mesh stores padded with zeros (distributed/padding.py): its own shape}
NONE_FILLED: Sizes = MappingProxyType({})


class Damaged(ValueError):
    """Raised where a file of a checkpoint is not as it was written."""


def word_sum(x: Array, shape: Sequence[int] | None = None) -> UInt32[Array, ""]:
    """Returns the checksum of publication.manifest, computed on the device: it is a sum over elements, so the sums of shards add up.

    `shape` is the tensor's own where `x` is padded with zeros (distributed/padding.py), which change nothing; None where it is not.
    """
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    words = words if words.ndim else words[None]
    *outer, last = words.shape
    sizes = tuple(x.shape if shape is None else shape)
    # Each row's number is computed from its indices: merging axes by a reshape would gather an array that is sharded along one of them.
    rows = jnp.zeros(outer, jnp.uint32)
    for axis in range(len(outer)):
        rows = rows * np.uint32(sizes[axis]) + jax.lax.broadcasted_iota(jnp.uint32, tuple(outer), axis)
    by_column = weights_of(jnp.arange(last, dtype=jnp.uint32) * 2 + 1)
    return jnp.sum(words * weights_of(rows * 2)[..., None] * by_column, dtype=jnp.uint32)


@partial(jax.jit, static_argnames=("shapes",))
def _word_sums(leaves: Sequence[Array], shapes: tuple[Shape | None, ...]) -> list[Array]:
    return [word_sum(x, shape) for x, shape in zip(leaves, shapes, strict=True)]


def sums(trees: Any, sizes: Sizes = NONE_FILLED) -> dict[str, str]:
    """Returns {path: "dtype:checksum"} of every array; arrays in host memory move to the device one at a time.

    `sizes` has the own shapes of padded arrays.
    """
    leaves = {jax.tree_util.keystr(path): jnp.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(trees)}
    here = {path: x for path, x in leaves.items() if x.sharding.memory_kind in (None, "device", "unpinned_host")}
    found = dict(zip(here, jax.device_get(_word_sums(list(here.values()), tuple(map(sizes.get, here)))), strict=True))
    for path, x in leaves.items():
        if path not in here:
            moved = jax.device_put(x, x.sharding.with_memory_kind("device"))
            found[path] = jax.device_get(_word_sums([moved], (sizes.get(path),)))[0]
    return {path: f"{x.dtype.name}:{digits(int(found[path]))}" for path, x in leaves.items()}


def check(trees: Any, written: Mapping[str, str], where: object, inside: str = "", sizes: Sizes = NONE_FILLED) -> None:
    """Compares arrays that were read with the sums taken when they were written; arrays read as another dtype are left out.

    Args:
      written: the sums, as `sums` returned them; empty for a checkpoint without sums.
      inside: the path of `trees` within the trees that were written.
      sizes: the own shapes of padded arrays of `trees`.

    Raises:
      Damaged: some arrays differ; the message says how many and which is the first.
    """
    found = sums(trees, sizes) if written else {}
    wrong = []
    for path, text in found.items():
        want = written.get(f"{inside}{path}", "")
        if want.partition(":")[0] in ("", text.partition(":")[0]) and want != text:
            wrong.append(path)
    if wrong:
        raise Damaged(
            f"{len(wrong)} of {len(found)} arrays of {where} are not what was written, the first is {wrong[0]}"
        )


def signed(host: Mapping[str, Any], trees: Any, sizes: Sizes = NONE_FILLED) -> dict[str, Any]:
    """Returns the host's state with the checksums of the device's arrays, the own shapes of padded arrays, and a checksum of its own."""
    own = {SIZES: dict(sizes)} if sizes else {}
    content = json.loads(json.dumps({**host, **own, _SUMS: sums(trees, sizes)}))
    return {**content, _TEXT: _crc(content)}


def opened(content: Mapping[str, Any], where: object) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the host's state and the checksums of the device's arrays from the result of `signed`; {} where it has no checksums.

    Raises:
      Damaged: the host's state is not what was written.
    """
    host = {name: value for name, value in content.items() if name != _TEXT}
    if (_SUMS in content or _TEXT in content) and content.get(_TEXT) != _crc(host):
        raise Damaged(f"the host's state in {where} is not what was written")
    written = host.pop(_SUMS, {})
    return host, written


def _crc(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


# -- padded arrays -----------------------------------------------------------------------------------------------------


def filled_up(stored: Any, own: Any) -> dict[str, Shape]:
    """Returns {path: own shape} of the padded leaves of a tree as it is stored; `own` is the tree of own shapes."""
    leaves = zip(jax.tree_util.tree_leaves_with_path(stored), jax.tree.leaves(own), strict=True)
    return {jax.tree_util.keystr(path): tuple(n.shape) for (path, x), n in leaves if tuple(x.shape) != tuple(n.shape)}


def within(sizes: Mapping[str, Sequence[int]], path: str) -> Sizes:
    """Returns the sizes below a path, by their paths from there."""
    return {whole.removeprefix(path): tuple(size) for whole, size in sizes.items() if whole.startswith(path)}


def check_sizes(folder: Any, tree: Any, theirs: Sizes, own: Sizes, at: Sequence[str] = ()) -> None:
    """Compares the own shapes of the arrays of one item of a checkpoint with those of a tree, before orbax slices or pads them.

    Args:
      folder: folder of the item.
      tree: the shapes in which the arrays are to be stored here.
      theirs: the own shapes of arrays that are padded in the checkpoint, by their paths in `tree`.
      own: the own shapes of arrays that are padded here.
      at: path of `tree` in the item.

    Raises:
      ValueError: an array has another own shape; the message names it.
    """
    item = ocp.StandardCheckpointer().metadata(folder).item_metadata
    held = {_keys(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(item.tree)}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name, keys = jax.tree_util.keystr(path), (*at, *_keys(path))
        got, want = tuple(theirs.get(name, held[keys])), tuple(own.get(name, x.shape))
        if got != want:
            raise ValueError(f"{name} has shape {got} where the model has {want}")


def _keys(path: Sequence[Any]) -> tuple[str, ...]:
    """Returns the names along a path, by which orbax knows a leaf."""
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
