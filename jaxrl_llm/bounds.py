"""Fields of components that are out of bounds are refused, with the binding that sets them."""

from collections.abc import Collection
from typing import NoReturn


def refuse(component: object, name: str, allowed: str) -> NoReturn:
    """Raises ValueError that names the binding of the field `name`."""
    kind = type(component)
    binding = f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}.{name}"
    raise ValueError(f"{binding} must be {allowed} (got {getattr(component, name)!r})")


def at_least(component: object, least: float, *names: str) -> None:
    """Refuses fields below `least`; one that is None has no bound."""
    for name in names:
        value = getattr(component, name)
        if value is not None and not value >= least:
            refuse(component, name, f">= {least}")


def above(component: object, bound: float, *names: str) -> None:
    """Refuses fields that are not above `bound`; one that is None has no bound."""
    for name in names:
        value = getattr(component, name)
        if value is not None and not value > bound:
            refuse(component, name, f"> {bound}")


def within(component: object, interval: str, *names: str) -> None:
    """Refuses fields outside an interval, such as "(0, 1]"; one that is None has no bound."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    for name in names:
        value = getattr(component, name)
        inside = value is None or (low <= value <= high)
        if not inside or (value == low and interval[0] == "(") or (value == high and interval[-1] == ")"):
            refuse(component, name, f"in {interval}")


def one_of(component: object, allowed: Collection[object], *names: str) -> None:
    """Refuses fields that are none of `allowed`."""
    for name in names:
        if getattr(component, name) not in allowed:
            refuse(component, name, f"one of {tuple(allowed)}")


def listed(component: object, example: str, *names: str) -> None:
    """Refuses a text where a list of texts is meant: its letters would be taken for the texts."""
    for name in names:
        if isinstance(getattr(component, name), str):
            refuse(component, name, f"a list of texts, such as {example}, where one text needs its comma too")
