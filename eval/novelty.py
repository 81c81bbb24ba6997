"""NoveltyBench (arXiv 2504.05228): the number of classes of equivalent answers among k generations, and their utility.

    partition: in order, a generation without a class opens one; every later one without a class that equals it joins it
    distinct_k = number of classes
    utility_patience = sum_i p^(i-1) u_i [i opens a class] / sum_i p^(i-1)      p = 0.8, u_i in 1..10
    utility_flat = sum_i u_i [i opens a class] / k                              DARLING's copy (arXiv 2509.02534)

The two utilities are not comparable. "distinct" in partitions.jsonl is the number of classes; the authors' files hold
the greatest class index, which is one less.
"""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.eval.answered import Answered, mean, value
from jaxrl_llm.eval.ngrams import words
from jaxrl_llm.eval.results import write_whole
from jaxrl_llm.rewards.partition import short_texts_equal

Similar = Callable[[str, str], bool]


def partition(texts: Sequence[str], similar: Similar) -> list[int]:
    """Returns the class of each text, numbered in order of appearance; a text is compared with the first one of each class."""
    classes: list[int | None] = [None] * len(texts)
    opened = 0
    for i, text in enumerate(texts):
        if classes[i] is None:
            classes[i] = opened
            for j in range(i + 1, len(texts)):
                if classes[j] is None and similar(text, texts[j]):
                    classes[j] = opened
            opened += 1
    return [c for c in classes if c is not None]


def firsts(classes: Sequence[int]) -> list[bool]:
    """Returns True where a class appears for the first time."""
    return [c not in classes[:i] for i, c in enumerate(classes)]


def utility_patience(classes: Sequence[int], utilities: Sequence[float], patience: float = 0.8) -> float:
    """Returns the utility for a reader who continues to the next generation with probability `patience`."""
    weights = patience ** np.arange(len(classes))
    return float(np.sum(weights * np.asarray(utilities) * firsts(classes)) / weights.sum())


def utility_flat(classes: Sequence[int], utilities: Sequence[float]) -> float:
    """Returns the sum of the utilities of the classes' first generations, divided by the number of generations."""
    return float(np.sum(np.asarray(utilities) * firsts(classes)) / len(classes))


def rouge1(a: str, b: str) -> float:
    """Returns the F1 of the words that two texts share, counted with multiplicity; 0 where one has none."""
    first, second = Counter(words(a)), Counter(words(b))
    shared, total = (first & second).total(), first.total() + second.total()
    return 2 * shared / total if total else 0.0


def rouge1_similar(a: str, b: str, *, threshold: float = 0.458) -> bool:
    """Returns whether two texts are equivalent, without a model: by the rule for short texts, else by ROUGE-1 F1 above `threshold`.

    Args:
      threshold: NoveltyBench's threshold for ROUGE-1. Its main predicate is a classifier, which can also serve as `Novelty.similar`.
    """
    short = short_texts_equal(a, b)
    return rouge1(a, b) > threshold if short is None else short


@dataclass(frozen=True, kw_only=True)
class Novelty:
    """Measures distinct and, where a reward gives quality, quality, utility_patience and utility_flat of the sampled answers.

    It writes generations.jsonl, partitions.jsonl and, with quality, scores.jsonl.

    Attributes:
      similar: function that says whether two texts are equivalent.
      part: name of the reward's part that is the quality; empty takes the total.
      cut_points: maps raw quality to the utility 1 + the number of cut points below it; empty keeps the quality unchanged.
        Skywork-Reward-Gemma-2-27B-v0.2 has (-7.719, -6.281, -6.0, -5.719, -5.5, -5.0, -4.375, -3.438, -2.047).
      patience: probability with which a reader looks at the next generation.
    """

    similar: Similar = rouge1_similar
    part: str = ""
    cut_points: Sequence[float] = ()
    patience: float = 0.8

    def __post_init__(self) -> None:
        components.within(self, "(0, 1]", "patience")
        if list(self.cut_points) != sorted(self.cut_points):
            raise ValueError(f"novelty.Novelty.cut_points must rise (got {list(self.cut_points)})")

    def measure(self, answered: Sequence[Answered]) -> Mapping[str, np.ndarray]:
        """Returns one value per prompt."""
        return self._metrics([self._row(one) for one in answered])

    def report(self, answered: Sequence[Answered], folder: Path, model: str) -> Mapping[str, Any]:
        """Writes NoveltyBench's files.

        Returns:
          {"novelty": mean and variance of each metric, and the histogram of distinct}.
        """
        keys = ("id", "prompt", "model", "generations")
        rows = [{"model": model, **self._row(one)} for one in answered]
        _write(folder / "generations.jsonl", rows, keys)
        _write(folder / "partitions.jsonl", rows, (*keys, "partition", "distinct"))
        if all("utility" in row for row in rows):
            scored = ("generation_scores", "partition_scores", "quality", "utility")
            _write(folder / "scores.jsonl", rows, (*keys, "partition", "distinct", *scored))
        metrics = self._metrics(rows)
        found: dict[str, Any] = {f"mean_{name}": float(np.mean(values)) for name, values in metrics.items()}
        found |= {f"var_{name}": float(np.var(values)) for name, values in metrics.items()}
        counts = Counter(row["distinct"] for row in rows)
        return {"novelty": found | {"distinct_histogram": {str(n): counts[n] for n in sorted(counts)}}}

    def _row(self, one: Answered) -> dict[str, Any]:
        samples = one.of("sampled")
        if not samples:
            raise ValueError("novelty needs sampled answers: set Evaluation.samples (10 in NoveltyBench)")
        texts = [record["response"] for record in samples]
        classes = partition(texts, self.similar)
        row = {
            "id": one.prompt.id, "prompt": samples[0]["prompt"], "generations": texts, "partition": classes,
            "distinct": len(set(classes)),
        }  # fmt: skip
        raw = [value(record, self.part) for record in samples]
        if np.isnan(raw).any():
            return row
        cuts = self.cut_points
        utilities = [float(bisect_left(cuts, x) + 1) if cuts else x for x in raw]
        return row | {
            "generation_scores": utilities,
            "partition_scores": [u for u, first in zip(utilities, firsts(classes), strict=True) if first],
            "quality": mean(utilities),
            "utility": utility_patience(classes, utilities, self.patience),
            "utility_flat": utility_flat(classes, utilities),
        }

    def _metrics(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        found = {"distinct": np.array([row["distinct"] for row in rows], np.float64)}
        names = {"quality": "quality", "utility_patience": "utility", "utility_flat": "utility_flat"}
        if any("utility" in row for row in rows):
            found |= {name: np.array([row.get(key, np.nan) for row in rows]) for name, key in names.items()}
        return found


def _write(file: Path, rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
    write_whole(file, "".join(json.dumps({k: row[k] for k in keys}, ensure_ascii=False) + "\n" for row in rows))
