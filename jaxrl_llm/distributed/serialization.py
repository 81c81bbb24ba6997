"""Serialises host values, for exchange between the processes of a run and for checkpoints: JSON followed by raw arrays, and no pickle.

A message is the header's length (8 bytes, little endian), the header (JSON) and the bytes of all arrays and long texts, each at a
multiple of 8 bytes. An object that occurs several times, such as the prompt of a group, is written once. A large message is never
whole in memory beside its value: its pieces are views of the value's arrays, and arrays read from a writable buffer are views of it.
msgpack has no such references and no arrays over 4 GiB, so that it could replace only the smaller part of this module.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from jaxrl_llm.experience import Branch, Completion, Group, Prompt, Rollout, Scores, Turn

_TYPES = {kind.__name__: kind for kind in (Completion, Prompt, Turn, Branch, Rollout, Group, Scores)}
_LENGTH = 8  # bytes
_ALIGN = 8  # bytes: arrays begin at multiples of it; in a message without this entry they follow each other
_LONG = 1024  # characters: texts of at least this length are written beside the header, whose JSON would escape them
_DEFERRED = "deferred"  # the key of a deferred value's number in the result of `split`


@dataclass(frozen=True, eq=False)
class Deferred:
    """A large part of a JSON-like value, which is made only when the value is written.

    Attributes:
      make: returns a value that `packed` takes.
    """

    make: Callable[[], Any]


def split(value: Any) -> tuple[Any, bytes]:
    """Makes the deferred parts of a value; returns the JSON-like rest and the bytes of these parts."""
    parts: list[Any] = []

    def numbered(part: Any) -> dict[str, int]:
        if not isinstance(part, Deferred):
            raise TypeError(
                f"a value of {type(part).__name__} is neither JSON-like nor deferred (got {str(part)[:80]!r})"
            )
        parts.append(part.make())
        return {_DEFERRED: len(parts) - 1}

    rest = json.loads(json.dumps(value, default=numbered))
    return rest, packed(parts)


def whole(rest: Any, data: bytes) -> Any:
    """Returns the value that `split` divided, with its parts in place."""
    parts = unpacked(data)

    def placed(node: Any) -> Any:
        if isinstance(node, list):
            return [placed(x) for x in node]
        if not isinstance(node, dict):
            return node
        return parts[node[_DEFERRED]] if node.keys() == {_DEFERRED} else {name: placed(x) for name, x in node.items()}

    return placed(rest)


def packed(value: Any) -> bytes:
    """Serialises a value made of None, numbers, strings, lists, mappings with string keys, arrays and experience.

    Raises:
      TypeError: the value holds anything else.
    """
    return b"".join(pieces(value))


def pieces(value: Any) -> list[bytes | memoryview]:
    """Returns the message of `packed` in consecutive parts; those of large arrays are views of them. Raises as `packed` does."""
    message = _Message()
    root = message.add(value)
    content = {"root": root, "objects": message.objects, "arrays": message.arrays, "align": _ALIGN}
    header = json.dumps(content).encode()
    found: list[bytes | memoryview] = [len(header).to_bytes(_LENGTH, "little"), header]
    end = _LENGTH + len(header)
    for blob in message.blobs:
        found += [bytes(-end % _ALIGN), blob]
        end += -end % _ALIGN + len(blob)
    return found


def unpacked(data: bytes | memoryview) -> Any:
    """Returns the value that `packed` wrote; tuples become lists but in rollouts, and NumPy's numbers become Python's.

    Arrays are views of `data` where it is writable, and copies otherwise.
    """
    data = memoryview(data)  # its slices are no copies
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    header = json.loads(bytes(data[_LENGTH:end]))
    align = header.get("align", 1)
    arrays = []
    for dtype, shape in header["arrays"]:
        end += -end % align
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        array = np.frombuffer(data[end : end + size], dtype).reshape(shape)
        arrays.append(array.copy() if data.readonly else array)
        end += size
    objects: list[Any] = []

    def read(node: Any) -> Any:
        if isinstance(node, list):
            return [read(x) for x in node]
        if not isinstance(node, dict):
            return node
        if "array" in node:
            return arrays[node["array"]]
        if "text" in node:
            return bytes(arrays[node["text"]]).decode(errors="surrogatepass")
        if "object" in node:
            return objects[node["object"]]
        return {name: read(x) for name, x in node["map"].items()}

    for name, parts in header["objects"]:
        found = {part: read(x) for part, x in parts.items()}
        if name in ("Branch", "Rollout"):
            found = {part: tuple(x) if isinstance(x, list) else x for part, x in found.items()}
        objects.append(_TYPES[name](**found))
    return read(header["root"])


class _Message:
    """A message under construction: the fields of each of its objects, and its arrays."""

    def __init__(self) -> None:
        self.objects: list[tuple[str, dict[str, Any]]] = []
        self.arrays: list[tuple[str, list[int]]] = []
        self.blobs: list[memoryview] = []
        self._known: dict[int, int] = {}

    def add(self, value: Any) -> Any:
        """Adds `value` to the message and returns its entry in the header."""
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, str) and len(value) >= _LONG:
            return {"text": self._array(np.frombuffer(value.encode(errors="surrogatepass"), np.uint8))}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            return [self.add(x) for x in value]
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return {"map": {name: self.add(x) for name, x in value.items()}}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return {"array": self._array(value)}
        if type(value).__name__ in _TYPES:
            return {"object": self._object(value)}
        raise TypeError(
            f"a value of {type(value).__name__} does not travel between processes (got {str(value)[:80]!r})"
        )

    def _array(self, value: np.ndarray) -> int:
        self.arrays.append((value.dtype.str, list(value.shape)))
        self.blobs.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return len(self.arrays) - 1

    def _object(self, value: Any) -> int:
        if id(value) not in self._known:
            parts = {part.name: self.add(getattr(value, part.name)) for part in fields(value)}
            self.objects.append((type(value).__name__, parts))
            self._known[id(value)] = len(self.objects) - 1
        return self._known[id(value)]
