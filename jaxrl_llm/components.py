"""Checks the fields of components, which are frozen dataclasses that gin builds, and finds the components that their fields hold."""

import contextlib
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, NoReturn, Protocol, get_args, get_origin, runtime_checkable

# Packages whose `__init__` re-exports classes, by which gin files name them.
FACES = ("jaxrl_llm.train", "jaxrl_llm.samplers.embedded", "jaxrl_llm.samplers.vllm")


def home(kind: Any) -> str:
    """Returns the module from which gin files import a component: the package of FACES that re-exports it, or else the one that defines it."""
    faces = [face for face in FACES if getattr(sys.modules.get(face), kind.__name__, None) is kind]
    return (faces or [kind.__module__])[0]


def selector(kind: Any) -> str:
    """Returns the name of a component in gin files, such as "train.Stage" or "grpo.GRPO"."""
    return f"{home(kind).rpartition('.')[2]}.{kind.__name__}"


def refuse(component: object, name: str, allowed: str) -> NoReturn:
    """Raises a ValueError that names the binding of the field `name`."""
    raise ValueError(f"{selector(type(component))}.{name} must be {allowed} (got {getattr(component, name)!r})")


def at_least(component: object, least: float, *names: str) -> None:
    """Refuses fields below `least`; a field that is None has no bound."""
    for name in names:
        value = getattr(component, name)
        if value is not None and not value >= least:
            refuse(component, name, f">= {least}")


def above(component: object, bound: float, *names: str) -> None:
    """Refuses fields that are not above `bound`; a field that is None has no bound."""
    for name in names:
        value = getattr(component, name)
        if value is not None and not value > bound:
            refuse(component, name, f"> {bound}")


def within(component: object, interval: str, *names: str) -> None:
    """Refuses fields outside an interval, such as "(0, 1]"; a field that is None has no bound."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    for name in names:
        value = getattr(component, name)
        inside = value is None or (low <= value <= high)
        if not inside or (value == low and interval[0] == "(") or (value == high and interval[-1] == ")"):
            refuse(component, name, f"in {interval}")


def one_of(component: object, allowed: Collection[object], *names: str) -> None:
    """Refuses fields whose values are not among `allowed`."""
    for name in names:
        if getattr(component, name) not in allowed:
            refuse(component, name, f"one of {tuple(allowed)}")


def choices(component: Any) -> None:
    """Refuses fields whose type is a Literal that does not include their values."""
    for field in fields(component):
        if get_origin(field.type) is Literal:
            one_of(component, get_args(field.type), field.name)


def listed(component: object, example: str, *names: str) -> None:
    """Refuses a string where a list of strings is meant, since its letters would be taken for the strings."""
    for name in names:
        if isinstance(getattr(component, name), str):
            refuse(component, name, f"a list of texts, such as {example}, where one text needs its comma too")


@runtime_checkable
class Closing(Protocol):
    """A component that holds processes or connections."""

    def close(self) -> None:
        """Ends the processes or connections; the component may be used again."""
        ...


def parts(root: object, kind: Any) -> Iterator[Any]:
    """Yields the instances of `kind` among `root` and its fields, outermost first; does not look inside those that it yields."""
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
    """Closes `root` and its parts that hold processes or connections; where one fails, the others are closed all the same.

    Parts whose `close` is a coroutine function belong to an event loop: the player of their rollouts closes them.
    """
    with contextlib.ExitStack() as closing:
        for part in parts(root, Closing):
            if not inspect.iscoroutinefunction(part.close):
                closing.callback(part.close)
