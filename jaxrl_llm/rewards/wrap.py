"""Turns a plain function (prompt, text) -> float into a reward; what the function cannot judge is invalid, not 0."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxrl_llm.experience import Prompt, Rollout, Scores

Judge = Callable[[Prompt, str], float]

_log = logging.getLogger(__name__)


class Failed(RuntimeError):
    """Raised for a response that could not be judged; its reward is invalid."""


@dataclass(frozen=True, kw_only=True)
class Wrap:
    """Uses a function of a prompt and a response's text as a reward.

    Attributes:
      function: (prompt, text) -> reward; an exception or a value that is not finite marks the rollout invalid.
      name: the part's name; empty takes the function's name.
    """

    needs_stats: ClassVar[bool] = False

    function: Judge
    name: str = ""

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns one part, float64 [G]."""
        del stats
        return judge_each(self.name or self.function.__name__, self.function, rollouts)


def judge_each(name: str, judge: Judge, rollouts: Sequence[Rollout]) -> Scores:
    """Returns one part [G] from a judge of single responses; a response that fails leaves the others' scores."""
    values: list[float | None] = []
    errors: list[Exception] = []
    for rollout in rollouts:
        try:
            values.append(float(judge(rollout.prompt, rollout.text)))
        except Exception as error:  # a verifier gets arbitrary text: any exception concerns this response alone
            values.append(None)
            errors.append(error)
    if errors:
        _log.warning("reward %r failed on %d of %d responses; first: %r", name, len(errors), len(rollouts), errors[0])
    return part(name, values)


async def judge_together(name: str, judgements: Sequence[Awaitable[float | None]]) -> Scores:
    """Returns one part [G] from judgements that run at the same time, one a response; None and `Failed` are invalid."""
    results = await asyncio.gather(*judgements, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    for failure in failures:
        if not isinstance(failure, Failed):
            raise failure
    if failures:
        _log.warning(
            "reward %r failed on %d of %d responses; first: %s", name, len(failures), len(results), failures[0]
        )
    return part(name, [None if isinstance(result, BaseException) else result for result in results])


def none_judged(name: str, rollouts: Sequence[Rollout], failure: Failed) -> Scores:
    """Returns one part [G] that is invalid for all rollouts, because the judge failed on the whole group."""
    _log.warning("reward %r failed on a whole group of %d: %s", name, len(rollouts), failure)
    return part(name, [None] * len(rollouts))


def part(name: str, values: Sequence[float | None]) -> Scores:
    """Returns scores of one part [G]; None and non-finite values are invalid."""
    valid = np.array([value is not None and math.isfinite(value) for value in values], bool)
    filled = [float(value) if ok and value is not None else 0.0 for value, ok in zip(values, valid)]
    return Scores(parts={name: np.array(filled, np.float64)}, valid={name: valid})
