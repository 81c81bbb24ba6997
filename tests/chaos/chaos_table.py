"""What came of a fault: a row of the table."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Where and how a fault is tried.

    Attributes:
      folder: an empty folder.
      seed: of everything random.
      times: how often; the short version asks for few.
    """

    folder: Path
    seed: int
    times: int


@dataclass(kw_only=True)
class Row:
    """A row.

    Attributes:
      tried: times that the fault happened.
      outcome: what was seen, in words.
      into: samples, requests or calls that were asked for.
      out: of these, those that were answered or counted as failed.
      recovered_s: seconds until all was as before, each time.
    """

    tried: int
    outcome: str
    into: int = 0
    out: int = 0
    recovered_s: list[float] = field(default_factory=list)


Fault = Callable[[Trial], Row]


def line(name: str, row: Row) -> str:
    """A row as a line of a Markdown table."""
    times = sorted(row.recovered_s)
    span = f"{times[len(times) // 2]:.2f} s, at most {times[-1]:.2f} s" if times else "-"
    counts = f"{row.into} = {row.out}" if row.into else "-"
    return f"| {name} | {row.tried} | {row.outcome} | {counts} | {span} |"


def table(rows: Sequence[tuple[str, Row]]) -> str:
    head = "| fault | times | outcome | in = out | time to recover |\n|---|---|---|---|---|"
    return "\n".join([head, *(line(name, row) for name, row in rows)])


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin
