"""The parts of a component: what its fields hold, what lists and mappings in them hold, and so on."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from jaxrl_llm.protocols import Closing


def parts(root: object, kind: Any) -> Iterator[Any]:
    """Those that are instances of `kind`, outermost first; what lies inside of one of them is its own affair."""
    if isinstance(root, kind):
        yield root
        return
    inner: Iterator[object] | Sequence[object] = ()
    if is_dataclass(root) and not isinstance(root, type):
        inner = (getattr(root, f.name, None) for f in fields(root) if not f.name.startswith("_"))
    elif isinstance(root, Mapping):
        inner = list(root.values())
    elif isinstance(root, Sequence) and not isinstance(root, str | bytes):
        inner = root
    for part in inner:
        yield from parts(part, kind)


def close(root: object) -> None:
    """Closes what `root` and its parts hold; where one fails, the others are closed all the same."""
    with contextlib.ExitStack() as closing:
        for part in parts(root, Closing):
            closing.callback(part.close)
