"""Checksums of the arrays of device trees, computed on the device; a checkpoint is compared with them when it is read.

The sum is that of published weights (publication.manifest): a flipped bit anywhere changes it, and sharded arrays are not gathered.
The storage below orbax (OCDBT) has checksums for its own records, but none for the values of arrays: a flipped bit in a data
file is restored without an error.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from jaxrl_llm.publication.manifest import digits, weights_of

_SUMS, _TEXT = "sums", "crc32"  # entries of a checkpoint's host state


class Damaged(ValueError):
    """A file of a checkpoint is not as it was written."""


def word_sum(x: Array) -> UInt32[Array, ""]:
    """The checksum of publication.manifest, on the device: it is a sum over elements, so the sums of shards add up."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    words = words if words.ndim else words[None]
    *outer, last = words.shape
    # Each row's number is computed from its indices: merging axes by a reshape would gather an array that is divided along one of them.
    rows = jnp.zeros(outer, jnp.uint32)
    for axis, size in enumerate(outer):
        rows = rows * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, tuple(outer), axis)
    by_column = weights_of(jnp.arange(last, dtype=jnp.uint32) * 2 + 1)
    return jnp.sum(words * weights_of(rows * 2)[..., None] * by_column, dtype=jnp.uint32)


@jax.jit
def _word_sums(leaves: Sequence[Array]) -> list[Array]:
    return [word_sum(x) for x in leaves]


def sums(trees: Any) -> dict[str, str]:
    """Returns {path: "dtype:checksum"} of every array; arrays in host memory travel to the device one at a time."""
    leaves = {jax.tree_util.keystr(path): jnp.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(trees)}
    here = {path: x for path, x in leaves.items() if x.sharding.memory_kind in (None, "device", "unpinned_host")}
    found = dict(zip(here, jax.device_get(_word_sums(list(here.values()))), strict=True))
    for path, x in leaves.items():
        if path not in here:
            found[path] = jax.device_get(_word_sums([jax.device_put(x, x.sharding.with_memory_kind("device"))]))[0]
    return {path: f"{x.dtype.name}:{digits(int(found[path]))}" for path, x in leaves.items()}


def check(trees: Any, written: Mapping[str, str], where: object, inside: str = "") -> None:
    """Compares arrays that were read with the sums taken when they were written; arrays read as another dtype are left out.

    Args:
      written: the sums, as `sums` returned them; empty for a checkpoint without sums.
      inside: the path of `trees` within the trees that were written.

    Raises:
      Damaged: some arrays differ; the message says how many and which is the first.
    """
    found = sums(trees) if written else {}
    wrong = []
    for path, text in found.items():
        want = written.get(f"{inside}{path}", "")
        if want.partition(":")[0] in ("", text.partition(":")[0]) and want != text:
            wrong.append(path)
    if wrong:
        raise Damaged(
            f"{len(wrong)} of {len(found)} arrays of {where} are not what was written, the first is {wrong[0]}"
        )


def signed(host: Mapping[str, Any], trees: Any) -> dict[str, Any]:
    """Returns the host's state with the checksums of the device's arrays, and a checksum of its own."""
    content = json.loads(json.dumps({**host, _SUMS: sums(trees)}))
    return {**content, _TEXT: _crc(content)}


def opened(content: Mapping[str, Any], where: object) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the host's state and the checksums of the device's arrays from what `signed` made; {} where it has no checksums.

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
