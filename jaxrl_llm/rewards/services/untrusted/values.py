"""Turns Python's plain values into JSON and back, for the pipe between a judge and the program that it asks (standard library only).

Plain values are copied: None, numbers, texts, bytes, ranges, slices, tuples, lists, dicts, sets, deques, dates, decimals and
fractions. Lists and the like keep their identity within a message, so that a program can change what it was given. Anything
else is sent by number, and stays on its own side. Nothing that is decoded can run.
"""

from __future__ import annotations

import _json
import os
import sys

TYPE_CHECKING = (
    False  # `typing`, `json` and what they import would be half of the time that a run's interpreter takes to start
)
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

LARGEST = 16 * 2**20  # bytes of a message
# Arguments that rebuild a value, by its class, which only a side that has such a value imports.
EXACT = {
    "fractions.Fraction": lambda v: [v.numerator, v.denominator],
    "decimal.Decimal": lambda v: [str(v)],
    "datetime.date": lambda v: [v.year, v.month, v.day],
    "datetime.time": lambda v: [v.hour, v.minute, v.second, v.microsecond],
    "datetime.datetime": lambda v: [v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond],
    "datetime.timedelta": lambda v: [v.days, v.seconds, v.microseconds],
}
SAME_AS_DICT = ("collections.OrderedDict", "collections.Counter", "collections.defaultdict")
BASES = (int, float, str, bytes, tuple, list, dict, set, frozenset)


def imported(name: str) -> Any:
    """Returns the class of that name."""
    import importlib

    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module), kind)


def name_of(kind: type) -> str:
    """Returns the name of a class of the standard library that is copied; empty for another one."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    known = name in EXACT or name in SAME_AS_DICT or name == "collections.deque"
    module = sys.modules.get(name.partition(".")[0])
    return name if known and getattr(module, kind.__qualname__, None) is kind else ""


class Encoder:
    """An encoder of the values of one message.

    Args:
      other: value -> JSON of one that is not plain; raises TypeError for one that cannot go.
      known: mutable values that both sides have already, by number.
    """

    def __init__(self, other: Callable[[Any], Any], known: Sequence[Any] = ()) -> None:
        self.other, self.kept = other, list(known)
        self.numbers = {id(value): number for number, value in enumerate(self.kept)}

    def encode(self, value: Any) -> Any:
        """Returns the JSON of a value."""
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            return value if -(2**63) < value < 2**63 else ["i", hex(value)]
        name = "" if kind.__module__ == "builtins" else name_of(kind)
        if kind in (list, dict, set, bytearray) or name in SAME_AS_DICT or name == "collections.deque":
            if id(value) in self.numbers:
                return ["@", self.numbers[id(value)]]
            self.numbers[id(value)] = number = len(self.kept)
            self.kept.append(value)
            return ["m", number, self.content(value)]
        if kind in (tuple, frozenset):
            return ["t" if kind is tuple else "f", [self.encode(item) for item in value]]
        if kind is bytes:
            return ["b", value.decode("latin-1")]
        if kind is complex:
            return ["c", value.real, value.imag]
        if kind in (range, slice):
            return ["r" if kind is range else "s", *(self.encode(p) for p in (value.start, value.stop, value.step))]
        if name and getattr(value, "tzinfo", None) is None:
            return ["x", name, [self.encode(part) for part in EXACT[name](value)]]
        return self.other(value)

    def content(self, value: Any) -> list[Any]:
        """Returns the present content of a mutable value, as JSON."""
        if isinstance(value, dict):
            return ["d", [[self.encode(k), self.encode(v)] for k, v in dict.items(value)]]
        if isinstance(value, bytearray):
            return ["a", value.decode("latin-1")]
        kind = "l" if isinstance(value, list) else "e" if isinstance(value, set) else "q"
        return [kind, [self.encode(item) for item in value]]


class Decoder:
    """A decoder of the values of one message; `other` takes (tag, the rest) of what is not plain, `known` is as the encoder's."""

    def __init__(self, other: Callable[[str, list[Any]], Any], known: Sequence[Any] = ()) -> None:
        self.other, self.kept = other, dict(enumerate(known))

    def decode(self, given: Any) -> Any:
        """Returns the value of some JSON; raises LookupError, TypeError or ValueError where it has none."""
        if not isinstance(given, list):
            if isinstance(given, dict):
                raise ValueError("no value is an object")
            return given
        tag, *rest = given
        if tag == "m":
            number, content = rest
            kinds = {"d": dict, "a": bytearray, "l": list, "e": set}
            made = (imported("collections.deque") if content[0] == "q" else kinds[content[0]])()
            self.kept[number] = made
            self.fill(made, content)
            return made
        if tag == "@":
            return self.kept[rest[0]]
        if tag in ("t", "f"):
            return (tuple if tag == "t" else frozenset)(self.decode(item) for item in rest[0])
        if tag == "i":
            return int(rest[0], 16)
        if tag == "b":
            return rest[0].encode("latin-1")
        if tag == "c":
            return complex(*rest)
        if tag in ("r", "s"):
            return (range if tag == "r" else slice)(*(self.decode(part) for part in rest))
        if tag == "x":
            if rest[0] not in EXACT:
                raise ValueError("a value of an unknown class")
            return imported(rest[0])(*(self.decode(part) for part in rest[1]))
        return self.other(tag, rest)

    def fill(self, made: Any, content: list[Any]) -> None:
        """Fills a mutable value with its content."""
        found = self.content(content)
        if isinstance(made, (dict, set)):
            made.clear()
            made.update(found)
        elif isinstance(made, (list, bytearray)):
            made[:] = found
        else:
            made.clear()
            made.extend(found)

    def content(self, content: list[Any]) -> Any:
        """Returns the decoded content of a mutable value."""
        kind, items = content
        if kind == "d":
            return [(self.decode(k), self.decode(v)) for k, v in items]
        return items.encode("latin-1") if kind == "a" else [self.decode(item) for item in items]


def based(value: Any) -> Any:
    """Returns the plain value that an instance of a class derived from a plain one holds, whatever the class makes of it; else None."""
    kind: Any = next((kind for kind in BASES if isinstance(value, kind) and type(value) is not kind), None)
    if kind is None or isinstance(value, bool):
        return None
    if kind in (int, float, str):
        return kind.__add__(value, kind())
    return dict(dict.items(value)) if kind is dict else kind(kind.__iter__(value))


class _Json:
    """The settings by which the compiled half of `json` reads."""

    strict, object_hook, object_pairs_hook, parse_float, parse_int = True, None, None, float, int
    parse_constant = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}.__getitem__


def _unknown(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} is no JSON")


_READ: Any = _json.make_scanner(_Json)  # type: ignore[arg-type]
_WRITE: Any = _json.make_encoder(None, _unknown, _json.encode_basestring_ascii, None, ":", ",", False, False, True)


def read(text: str) -> Any:
    """Returns the value of a JSON text; raises ValueError where it is none, RecursionError where it is too deep."""
    try:
        return _READ(text, 0)[0]
    except StopIteration:
        raise ValueError("no JSON") from None


def write(value: Any) -> str:
    """Returns the JSON text of a value."""
    return "".join(_WRITE(value, 0))


class Line:
    """A channel of messages, a line of JSON each, on two descriptors."""

    def __init__(self, reads: int, writes: int) -> None:
        self.source, self.sink = os.fdopen(reads, "rb", 1 << 16), writes

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; raises ValueError for one that is too long."""
        text = write(message).encode() + b"\n"
        if len(text) > LARGEST:
            raise ValueError(f"a value of more than {LARGEST} bytes")
        view = memoryview(text)
        while view:
            view = view[os.write(self.sink, view) :]

    def receive(self) -> dict[str, Any]:
        """Returns the next message; raises EOFError at the end, ValueError for an invalid one."""
        text = self.source.readline(LARGEST + 1)
        if not text.endswith(b"\n"):
            raise ValueError("a message that is too long") if len(text) > LARGEST else EOFError("the program has ended")
        found = read(text.decode())
        if not isinstance(found, dict):
            raise ValueError("a message that is no object")
        return found
