"""Reads metrics by step from a growing JSONL file, and reduces them to curves of few points."""

import contextlib
import json
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

POINTS = 400  # points of a curve on the page


class MetricLog:
    """The metrics of a metrics.jsonl file; `update` reads its new lines.

    Attributes:
      values: {metric: (steps, values)}.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._clear()

    def _clear(self) -> None:
        self.values: dict[str, tuple[array[float], array[float]]] = {}
        self._end, self._inode = 0, -1

    def update(self) -> None:
        """Reads complete new lines, without values that are not numbers and lines that are not JSON."""
        try:
            status = self.file.stat()
        except FileNotFoundError:
            return
        if status.st_ino != self._inode or status.st_size < self._end:
            self._clear()
            self._inode = status.st_ino
        with self.file.open("rb") as file:
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._end += len(line)
                with contextlib.suppress(
                    ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError
                ):
                    self._add(json.loads(line))

    def _add(self, row: Mapping[str, Any]) -> None:
        step = float(row["step"])
        for name, value in row.items():
            if name != "step":
                with contextlib.suppress(ValueError, TypeError, OverflowError):
                    number = float(value)
                    steps, values = self.values.setdefault(name, (array("d"), array("d")))
                    steps.append(step)
                    values.append(number)

    @property
    def step(self) -> int | None:
        """The last step of any metric; None without metrics."""
        return int(max(steps[-1] for steps, _ in self.values.values())) if self.values else None

    def last(self, name: str) -> float | None:
        """Returns the last finite value of a metric; None where it has none."""
        values = np.array(self.values[name][1]) if name in self.values else np.zeros(0)
        known = values[np.isfinite(values)]
        return float(known[-1]) if len(known) else None

    def total(self, name: str) -> float:
        """Returns the sum of a metric's finite values; 0 where it has none."""
        values = np.array(self.values[name][1]) if name in self.values else np.zeros(0)
        return float(values[np.isfinite(values)].sum())

    def curve(self, name: str, points: int = POINTS) -> tuple[list[float], list[float]]:
        """Returns at most `points` steps and values, averaged over neighbours where there are more; non-finite values are left out."""
        if name not in self.values:
            return [], []
        steps, values = (np.array(x) for x in self.values[name])
        known = np.isfinite(values)
        steps, values = steps[known], values[known]
        if len(steps) > points:
            edges = np.linspace(0, len(steps), points + 1).astype(int)[:-1]
            count = np.diff([*edges, len(steps)])
            steps, values = (np.add.reduceat(x, edges) / count for x in (steps, values))
        return steps.tolist(), values.tolist()
