"""Turns a plain function (prompt, text) -> float into a reward; what the function cannot judge is invalid, not 0."""

import asyncio
import logging
import math
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from jaxrl_llm.experience import Prompt, Rollout, Scores

Judge = Callable[[Prompt, str], float]

_log = logging.getLogger(__name__)
_failures: Counter[tuple[str, type[BaseException]]] = Counter()  # by reward and type of exception, in this process


class Failed(RuntimeError):
    """Raised for a response that could not be judged; its reward is invalid."""


class PlainReward:
    """A reward that needs no token stats."""

    needs_stats: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Wrap(PlainReward):
    """Uses a function of a prompt and a response's text as a reward.

    Attributes:
      function: (prompt, text) -> reward; an exception or a value that is not finite marks the rollout invalid.
      name: the part's name; empty takes the function's name.
    """

    function: Judge
    name: str = ""

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns one part, float64 [G]."""
        del stats
        return judge_each(self.name or self.function.__name__, self.function, rollouts)


def judge_each(name: str, judge: Judge, rollouts: Sequence[Rollout]) -> Scores:
    """Returns one part [G] from a judge of single responses; a response that fails leaves the others' scores."""
    values: list[float | None] = []
    failures: list[tuple[BaseException, Rollout]] = []
    for rollout in rollouts:
        try:
            values.append(float(judge(rollout.prompt, rollout.text)))
        except Exception as error:  # a verifier gets arbitrary text: any exception concerns this response alone
            values.append(None)
            failures.append((error, rollout))
    report(name, failures, f"{len(failures)} of {len(rollouts)} responses")
    return part(name, values)


async def judge_together(
    name: str, judgements: Sequence[Awaitable[float | None]], rollouts: Sequence[Rollout] = ()
) -> Scores:
    """Returns one part [G] from judgements that run at the same time, one a response; None and `Failed` are invalid.

    Args:
      rollouts: the rollouts that are judged, for the log; empty where the caller does not have them.
    """
    results = await asyncio.gather(*judgements, return_exceptions=True)
    judged: Sequence[Rollout | None] = rollouts or [None] * len(results)
    failures = [(result, rollout) for result, rollout in zip(results, judged) if isinstance(result, BaseException)]
    for failure, _ in failures:
        if not isinstance(failure, Failed):
            raise failure
    report(name, failures, f"{len(failures)} of {len(results)} responses")
    return part(name, [None if isinstance(result, BaseException) else result for result in results])


def none_judged(name: str, rollouts: Sequence[Rollout], failure: Exception) -> Scores:
    """Returns one part [G] that is invalid for all rollouts, because the judge failed on the whole group."""
    report(name, [(failure, next(iter(rollouts), None))], f"a whole group of {len(rollouts)}")
    return part(name, [None] * len(rollouts))


def report(name: str, failures: Sequence[tuple[BaseException, Rollout | None]], extent: str) -> None:
    """Logs a reward's failures: the first of each kind with its traceback, prompt and response, then one line for all.

    A kind is the reward and the type of the exception. The line gives the first exception's message, the line of code that
    raised it, and how often the reward has failed in this process.

    Args:
      failures: exceptions and the rollouts that they concern.
      extent: what the reward failed on, such as "3 of 8 responses".
    """
    for error, rollout in failures:
        _failures[name, type(error)] += 1
        if _failures[name, type(error)] == 1:
            shown = (
                "a response" if rollout is None else f"prompt {rollout.prompt.id!r}, response {_short(rollout.text)!r}"
            )
            kind = type(error).__name__
            _log.warning(
                "reward %r raised its first %s, on %s; later ones are counted", name, kind, shown, exc_info=error
            )
    if failures:
        total = sum(count for (own, _), count in _failures.items() if own == name)
        first = _message(failures[0][0])
        _log.warning("reward %r failed on %s (failure %d of this process); first: %s", name, extent, total, first)


def _message(error: BaseException) -> str:
    """Returns an exception's type, message and the line that raised it: there may be no message."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return "".join(traceback.format_exception_only(error)).strip() + place


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-100:]}"


def part(name: str, values: Sequence[float | None]) -> Scores:
    """Returns scores of one part [G]; None and non-finite values are invalid."""
    valid = np.array([value is not None and math.isfinite(value) for value in values], bool)
    filled = [float(value) if ok and value is not None else 0.0 for value, ok in zip(values, valid)]
    return Scores(parts={name: np.array(filled, np.float64)}, valid={name: valid})
