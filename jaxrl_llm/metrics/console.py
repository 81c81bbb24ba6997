"""The console writer: shows a run's metrics with a progress bar on a terminal and as plain lines elsewhere.

The first part of a metric's name decides how it is shown: `eval/` results are always printed, `time/` seconds become shares
of the step, and `count/` values are printed where they are not 0, and summed over the run.
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jaxrl_llm import components

HELD_OUT = re.compile(r"eval/[^/]+/(greedy|sampled|accuracy)")
SHORTEST_S = 1.0  # a run of fewer seconds is not timed
SEVERAL = 20  # number of steps with a reward from which on the first and the last tenth are compared
FIRST_STEP = (
    "a healthy first step of reinforcement learning: a reward between its least and greatest value, entropy well above"
    " 0, a KL near 0 (the policy has hardly moved), a sampler/learner gap below 1e-3 in float32 or 5e-2 in bfloat16"
)
UNREWARDED = "every reward is invalid, so that nothing is learned: look at the first traceback above, and mend the reward or the service that it asks"

# Signs of a healthy first step of reinforcement learning: (metric, whether its value is healthy, what to do where it is not).
SIGNS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("reward/std", lambda x: x > 0, "all rewards are equal or invalid, so that nothing is learned: read the answers in rollouts.jsonl, and look at the "
     "prompt's template, RESPONSE_LIMIT and the reward"),
    ("entropy/mean", lambda x: x > 1e-3, "the policy hardly varies its answers: raise TEMPERATURE, or begin with another model"),
    ("kl/reference", lambda x: abs(x) < 0.1, "the policy is far from its reference, which it should hardly have left: is it the same model?"),
    ("gap/mean", lambda x: x < 5e-2, "sampler and learner disagree on the probabilities of tokens: try sources.PolicySource.compute_dtype = 'float32' to see whether it is rounding"),
    ("loss/total", math.isfinite, "the loss is not finite: lower LEARNING_RATE, and look at the rewards"),
)  # fmt: skip


def first_step(values: Mapping[str, float]) -> str:
    """Returns the message about the first step that samples: that it is healthy, or what is not and what to do."""
    invalid = sum(in_group(values, "count/invalid").values())
    bad = [UNREWARDED] if invalid and "reward/std" not in values else []  # only valid rewards have reward/std
    bad += [
        f"{name} is {short(values[name])}: {what}"
        for name, well, what in SIGNS
        if name in values and not well(values[name])
    ]
    return "\n".join(f"look at the first step: {line}" for line in bad[:2]) or FIRST_STEP


def short(value: float) -> str:
    """Formats a number in about five characters: 0.412, 1.2e-05, 15.3k, 2.1M, 87."""
    size = abs(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    for least, unit, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= least:
            return f"{value / unit:.3g}{suffix}"
    if size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.{3 if size < 10 else 1}f}"


def in_group(values: Mapping[str, float], group: str) -> dict[str, float]:
    """Returns the values whose names begin with `group/`, keyed by the rest of their names."""
    return {name.removeprefix(f"{group}/"): value for name, value in values.items() if name.startswith(f"{group}/")}


def time_split(step_s: float, parts: Mapping[str, float]) -> str:
    """Returns `2.00 s (sample 25%, update 70%)`: a step's seconds, and the shares of its parts (also given in seconds)."""
    shares = ", ".join(f"{name} {100 * value / step_s:.0f}%" for name, value in parts.items()) if step_s > 0 else ""
    return f"{step_s:.2f} s ({shares})" if shares else f"{step_s:.2f} s"


@dataclass(frozen=True, kw_only=True)
class Console:
    """Prints a line for each step: reward, entropy, KL, tokens a second, the split of its time, and counters.

    On a terminal a bar shows the last step; each evaluation gets a line of its own, and the end a summary.

    Attributes:
      every: steps between lines; a step with an evaluation always has one.
      bar: True for a progress bar, False for plain lines, None for a bar where standard error is a terminal.
      columns: (label, metric name) pairs that a line shows, in order; a metric that a step lacks is left out.
      times: parts of a step whose shares of its time are shown, in order.
    """

    every: int = 1
    bar: bool | None = None
    columns: tuple[tuple[str, str], ...] = (
        ("reward", "reward/mean"),
        ("unfiltered", "reward/unfiltered"),
        ("loss", "loss/total"),
        ("entropy", "entropy/mean"),
        ("kl", "kl/reference"),
        ("kl_old", "kl/k3_to_old"),
        ("gap", "gap/mean"),
        ("tok/s", "speed/tokens_per_s"),
        ("mfu", "speed/mfu"),
    )
    times: tuple[str, ...] = ("publish", "sample", "reward", "score", "update", "evaluate")

    def __post_init__(self) -> None:
        components.at_least(self, 1, "every")

    def open(self, run_dir: Path, resume_step: int | None, total_steps: int | None = None) -> "ConsoleWriter":
        """Starts printing; the bar, if any, starts at `resume_step` of `total_steps`."""
        bar = sys.stderr.isatty() if self.bar is None else self.bar
        return ConsoleWriter(self, bar, resume_step, total_steps)

    def line(self, values: Mapping[str, float]) -> str:
        """Returns the text of a step's line for its values."""
        parts = [f"{label} {short(values[name])}" for label, name in self.columns if name in values]
        measured = [name for name in values if name.startswith("eval/")]
        results = sorted(measured, key=lambda name: HELD_OUT.fullmatch(name) is None)  # before lengths and other values
        parts += [f"{name} {short(values[name])}" for name in results]
        if "time/step_s" in values:
            spent = {name: values[f"time/{name}_s"] for name in self.times if f"time/{name}_s" in values}
            parts.append(time_split(values["time/step_s"], spent))
        parts += [f"{name} {short(count)}" for name, count in in_group(values, "count").items() if count]
        return "  ".join(parts)


class Course:
    """The summary of the whole run: the steps, their seconds, the change of rewards and held-out results, and the difference between
    the sampler's and the learner's log-probs: the largest gap of a token, or, where no bit of any differed, the number of tokens
    compared."""

    def __init__(self, resume_step: int | None, total: str) -> None:
        self._resumed, self._total = resume_step is not None, total
        self._first: int | None = None
        self._last = 0
        self._seconds = 0.0
        self._rewards: list[float] = []
        self._held_out: dict[str, list[tuple[int, float]]] = {}
        self._gaps: Counter[str] = Counter()
        self._largest_gap, self._stale = 0.0, 0

    def take(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a step's metrics."""
        if any(not name.startswith("eval/") for name in values):
            self._first = step if self._first is None else self._first
            self._last = max(self._last, step)
            self._seconds += values.get("time/step_s", 0.0)
        if math.isfinite(reward := values.get("reward/mean", math.nan)):
            self._rewards.append(reward)
        self._gaps.update({name: int(values[name]) for name in ("gap/compared", "gap/differing") if name in values})
        self._largest_gap = max(self._largest_gap, values.get("gap/max", 0.0))
        self._stale = max(self._stale, int(values.get("staleness/max", 0)))
        for name, value in values.items():
            if HELD_OUT.fullmatch(name):
                self._held_out.setdefault(name, []).append((step, value))

    def parts(self) -> list[str]:
        """Returns the run's summary as a few phrases; none where no step was added."""
        if self._first is None:
            return []
        began = f"from step {self._first} " if self._resumed else ""
        spent = f" in {duration(self._seconds)}" if self._seconds >= SHORTEST_S else ""
        said = [f"trained {began}to step {self._last}{self._total}{spent}"]
        if len(self._rewards) >= SEVERAL:
            tenth = len(self._rewards) // 10
            first, last = self._rewards[:tenth], self._rewards[-tenth:]
            said.append(f"reward {short(sum(first) / tenth)} -> {short(sum(last) / tenth)}")
        if self._gaps["gap/differing"]:
            behind = f", of tokens up to {self._stale} versions old" if self._stale else ""
            said.append(f"largest gap between sampler and learner {short(self._largest_gap)}{behind}")
        elif self._gaps:
            said.append(f"tokens compared {self._gaps['gap/compared']}, differing 0")
        for name, found in self._held_out.items():
            if len(found) > 1:
                best_step, best = max(found, key=lambda pair: pair[1])
                more = f" (best {short(best)} at step {best_step})" if best > found[-1][1] else ""
                said.append(f"{name} {short(found[0][1])} -> {short(found[-1][1])}{more}")
        return said


def duration(seconds: float) -> str:
    """Formats seconds as `45 s`, `12 min` or `3 h 20 min`."""
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


class ConsoleWriter:
    """Prints the lines, and at the end the run's summary and the sums of the `count/` metrics."""

    def __init__(self, settings: Console, bar: bool, resume_step: int | None, total_steps: int | None) -> None:
        self._settings = settings
        self._total = f"/{total_steps}" if total_steps else ""
        self._counts: Counter[str] = Counter()
        self._explained = resume_step is not None
        self._course = Course(resume_step, self._total)
        self._bar: Progress | None = None
        if bar:
            parts = ("step {task.completed}" + self._total, "{task.description}")
            columns = (TextColumn(parts[0]), BarColumn(bar_width=20), TimeRemainingColumn(), TextColumn(parts[1]))
            self._bar = Progress(*columns, console=Terminal(file=sys.stderr, force_terminal=True))
            self._task = self._bar.add_task("", total=total_steps, completed=resume_step or 0)
            self._bar.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._counts.update({name: int(count) for name, count in in_group(values, "count").items()})
        self._course.take(step, values)
        line = self._settings.line(values)
        due = step % self._settings.every == 0
        if self._bar is not None and due:
            self._bar.update(self._task, completed=step, description=escape(line), refresh=True)
        if in_group(values, "eval") or (due and self._bar is None):
            self._print(f"step {step}{self._total}  {line}")
        if "reward/mean" in values and not self._explained:
            self._explained = True
            self._print(first_step(values))

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prints nothing, since rollouts are too long for the console."""

    def text(self, name: str, text: str) -> None:
        """Prints nothing, since documents are too long for the console."""

    def close(self) -> None:
        counted = ", ".join(f"{name} {count}" for name, count in self._counts.items() if count)
        lines = ["; ".join(self._course.parts()), f"counted: {counted or 'nothing'}"]
        for line in filter(None, lines):
            self._print(line)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)
