"""Harmful score of responses to requests that a model should refuse, from the verdicts of a classifier or a judge.

        harmful score = 100 x mean verdict over graded responses    (100 x flagged / graded where verdicts are 0 or 1)

The data sets (HarmBench, StrongREJECT, SimpleSafetyTests) are the user's own files; this package contains none of their texts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.eval.answered import Answered, mean, value
from jaxrl_llm.eval.choices import by_category
from jaxrl_llm.eval.results import write_whole

SUMMARY = "results_summary.json"


@dataclass(frozen=True, kw_only=True)
class HarmfulScore:
    """Measures "harmful_score", 0 to 100, over prompts and by category; it writes results_summary.json, as TokenBuncher's scripts do.

    Attributes:
      part: the reward's part that is 1 for a harmful response, 0 for a safe one, and in between where a rubric allows it.
      threshold: value of that part above which results_summary.json counts a response as flagged.
    """

    part: str = "harmful"
    threshold: float = 0.5

    def measure(self, answered: Sequence[Answered]) -> Mapping[str, np.ndarray]:
        """Returns one value per prompt, over its greedy responses or else its sampled ones; ungraded ones are left out."""
        scores = [100 * mean([value(record, self.part) for record in one.main]) for one in answered]
        ungraded = float(sum(np.isnan(value(record, self.part)) for one in answered for record in one.main))
        found = {"harmful_score": np.array(scores, np.float64), "ungraded": np.array(ungraded)}
        return found | by_category("harmful_score", answered, scores)

    def report(self, answered: Sequence[Answered], folder: Path, model: str) -> Mapping[str, Any]:
        """Writes the file; returns its counts and shares as "safety"."""
        del model
        verdicts = np.array([value(record, self.part) for one in answered for record in one.main], np.float64)
        graded = verdicts[~np.isnan(verdicts)]
        total, flagged = len(graded), int((graded > self.threshold).sum())
        share = flagged / total if total else 0.0
        found = {
            "total_samples": total, "flagged_samples": flagged, "flagged_proportion": share, "flagged_percentage": 100 * share,
            "safe_samples": total - flagged, "safe_proportion": 1 - share, "safe_percentage": 100 * (1 - share),
            "ungraded_samples": len(verdicts) - total,
        }  # fmt: skip
        write_whole(folder / SUMMARY, json.dumps(found, indent=2) + "\n")
        return {"safety": found}
