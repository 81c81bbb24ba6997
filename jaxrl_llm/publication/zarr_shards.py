"""The objects of a tensor in the layout of zarr 3, of which every host of a learner writes its own (NumPy only).

NAME/zarr.json describes the tensor, NAME/c/i/j is the shard of one of the learner's devices. A shard consists of pieces, so small that
a sampler's rank that needs a half, a quarter or an eighth of the tensor along any axis reads only the bytes of that part; the pieces'
places come first in the shard (zarr's codec `sharding_indexed`). The last shard of an axis is as long as the others, and may extend
beyond the tensor.
"""

import json
import math
from collections.abc import Iterable, Sequence

import numpy as np

from jaxrl_llm.publication.manifest import WEIGHTS

_PARTS = (8, 4, 2)  # numbers of parts in which ranks may divide an axis of a tensor
_MOST_PIECES = 16  # most pieces of a shard along an axis
_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


def pieces(shape: Sequence[int], shard: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the pieces of a tensor's shards, which divides `shard`."""
    found = []
    for n, length in zip(shape, shard, strict=True):
        parts = next((ways for ways in _PARTS if n % ways == 0), 1)
        piece = math.gcd(length, n // parts)
        found.append(piece if length <= _MOST_PIECES * piece else length)
    return tuple(found)


def array_key(tensor: str) -> str:
    """Returns the key of the object that describes a tensor."""
    return f"{WEIGHTS}/{tensor}/zarr.json"


def array_text(shape: Sequence[int], shard: Sequence[int], dtype: str) -> bytes:
    """Returns the description of a tensor in shards of the shape `shard`."""
    inner = {
        "chunk_shape": list(pieces(shape, shard)), "codecs": [_BYTES], "index_codecs": [_BYTES], "index_location": "start",
    }  # fmt: skip
    content = {
        "zarr_format": 3, "node_type": "array", "shape": list(shape), "data_type": dtype, "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shard)}},
        "chunk_key_encoding": {"name": "default"}, "codecs": [{"name": "sharding_indexed", "configuration": inner}],
    }  # fmt: skip
    return json.dumps(content).encode()


def shard_key(tensor: str, index: Sequence[slice], shard: Sequence[int]) -> str:
    """Returns the key of the shard that begins at `index`."""
    places = ((part.start or 0) // length for part, length in zip(index, shard, strict=True))
    return "/".join([WEIGHTS, tensor, "c", *map(str, places)])


def encoded(part: np.ndarray, piece: Sequence[int]) -> bytes:
    """Encodes the content of a shard: the offset and length of each piece, then the pieces in the order of their places."""
    counts = [n // length for n, length in zip(part.shape, piece, strict=True)]
    apart = part.reshape([n for pair in zip(counts, piece) for n in pair])
    apart = apart.transpose([*range(0, apart.ndim, 2), *range(1, apart.ndim, 2)])
    number, size = math.prod(counts), math.prod(piece) * part.dtype.itemsize
    index = np.empty((number, 2), "<u8")
    index[:, 0] = index.nbytes + size * np.arange(number)
    index[:, 1] = size
    return index.tobytes() + apart.tobytes()


def tree_text(tensors: Iterable[str]) -> bytes:
    """Returns the list of a version's tensors in orbax's form; dots divide the keys of a name."""
    keys = {name: [{"key": key, "key_type": 2} for key in name.split(".")] for name in tensors}
    tree = {name: {"key_metadata": path} for name, path in keys.items()}
    return json.dumps({"use_zarr3": True, "tree_metadata": tree}).encode()
