"""Progress lines and throughput of a long evaluation."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jaxrl_llm.eval.answered import Record


@dataclass(kw_only=True)
class Progress:
    """Counts responses and prints a line at intervals.

    Attributes:
      name: the evaluation's name.
      total: number of responses at the end.
      every_s: least seconds between lines; the last response always gets one.
      groups: groups of an earlier start, which count for the mean score but not for the speed.
    """

    name: str
    total: int
    every_s: float
    groups: Iterable[Sequence[Record]] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        self.done, self._tokens, self._score, self._graded = 0, 0, 0.0, 0
        for group in self.groups:
            self._count(group)
        self._before, self._tokens = self.done, 0
        self._started = self._shown = self._last = time.perf_counter()

    def add(self, group: Sequence[Record]) -> None:
        """Counts a group of responses."""
        self._count(group)
        self._last = time.perf_counter()
        if self._last - self._shown >= self.every_s or self.done == self.total:
            self._shown = self._last
            print(self.line(), flush=True)

    def line(self) -> str:
        """Returns a line with the number of responses, the mean score, the speed and the remaining time."""
        speed = self.throughput()
        rate = speed["responses_per_s"]
        left = f", {(self.total - self.done) / rate:.0f} s left" if rate and self.done < self.total else ""
        score = f", score {self._score / self._graded:.3f}" if self._graded else ""
        return f"{self.name} {self.done}/{self.total}{score}, {rate:.3g} responses/s, {speed['tokens_per_s']:.4g} tokens/s{left}"

    def throughput(self) -> dict[str, float]:
        """Returns the responses, tokens, seconds and both rates of this start, without the groups of earlier starts."""
        seconds, responses = self._last - self._started, self.done - self._before
        return {
            "responses": float(responses),
            "tokens": float(self._tokens),
            "seconds": seconds,
            "responses_per_s": responses / seconds if seconds else 0.0,
            "tokens_per_s": self._tokens / seconds if seconds else 0.0,
        }

    def _count(self, group: Sequence[Record]) -> None:
        self.done += len(group)
        self._tokens += sum(record["tokens"] for record in group)
        known = [s for record in group if (s := record["score"]) is not None and math.isfinite(s)]
        self._score += sum(known)
        self._graded += len(known)
