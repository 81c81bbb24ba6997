"""Graded responses as plain records, the form in which all measures of an evaluation read them.

A record is one response: id, kind ("greedy" or "sampled"), sample (its index in the group), prompt, reference, source,
response, finish, tokens, score (the reward's total, or null where invalid), scores (the reward's parts) and, where the
evaluation extracts one, answer (null where the response has none).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxrl_llm.experience import Group, Prompt, Rollout, Scores

Record = dict[str, Any]
Extract = Callable[[str], str | None]

KINDS = ("greedy", "sampled")


@dataclass(kw_only=True)
class Answered:
    """A prompt and the records of its responses; greedy ones come first."""

    prompt: Prompt
    records: Sequence[Record]

    def of(self, kind: str) -> list[Record]:
        """Returns the records of one kind."""
        return [record for record in self.records if record["kind"] == kind]

    @property
    def main(self) -> list[Record]:
        """The greedy records, or the sampled ones where there are no greedy ones."""
        return self.of("greedy") or self.of("sampled")


@runtime_checkable
class Measure(Protocol):
    """A family of metrics."""

    def measure(self, answered: Sequence[Answered]) -> Mapping[str, np.ndarray]:
        """Returns {metric: one value per prompt [N], NaN where a prompt has none, or a scalar of the set}."""
        ...


@runtime_checkable
class Report(Protocol):
    """A family of metrics that writes files or adds entries to the summary."""

    def report(self, answered: Sequence[Answered], folder: Path, model: str) -> Mapping[str, Any]:
        """Writes its files to `folder` and returns entries for summary.json; `model` is the name of the answering model."""
        ...


def records(
    rollouts: Sequence[Rollout], scores: Scores | None, kind: str, extract: Extract | None = None
) -> list[Record]:
    """Returns the records of one prompt's responses of one kind; `scores` is None where nothing is graded."""
    group = Group(rollouts=rollouts, scores=scores or Scores(parts={}, valid={}))
    totals = np.where(group.valid(), group.total(), np.nan) if scores else np.full(len(rollouts), np.nan)
    return [
        {
            "id": rollout.prompt.id,
            "kind": kind,
            "sample": i,
            "prompt": rollout.prompt.question,
            "reference": rollout.prompt.reference,
            "source": rollout.prompt.source,
            "response": rollout.text,
            "finish": rollout.finish,
            "tokens": len(rollout.tokens),
            **({"answer": extract(rollout.text)} if extract else {}),
            "score": _number(totals[i]),
            "scores": {n: _number(v[i]) if group.scores.valid[n][i] else None for n, v in group.scores.parts.items()},
        }
        for i, rollout in enumerate(rollouts)
    ]


def value(record: Record, part: str = "") -> float:
    """Returns a part of the reward by name, or the total for ""; NaN where it is invalid or was not graded.

    Raises:
      ValueError: the reward has no such part.
    """
    if part and part not in record["scores"]:
        raise ValueError(f"the reward has no part {part!r}: it gave {sorted(record['scores'])}")
    found = record["scores"][part] if part else record["score"]
    return math.nan if found is None else float(found)


def mean(values: Sequence[float]) -> float:
    """Returns the mean of the values that are not NaN; NaN where there are none."""
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


@dataclass(kw_only=True)
class Estimate:
    """The mean over prompts, half the width of its 95% interval, and the number of prompts with a value."""

    mean: float
    ci95: float
    n: int


def estimate(values: np.ndarray) -> Estimate:
    """Estimates the mean over prompts with a value, and 1.96 standard errors; a scalar or a single prompt has no interval."""
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    if not known.size:
        return Estimate(mean=math.nan, ci95=math.nan, n=0)
    spread = 1.96 * float(known.std(ddof=1)) / math.sqrt(known.size) if known.size > 1 else math.nan
    return Estimate(mean=float(known.mean()), ci95=spread, n=known.size)


def _number(x: float) -> float | None:
    return None if math.isnan(x) else float(x)
