"""Number of classes of equal answers among a prompt's samples, as a DARLING reward partitions them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.eval.answered import Answered, value

CLASS = "log/class"


@dataclass(frozen=True, kw_only=True)
class Classes:
    """Counts the classes of a prompt's sampled responses; the evaluation's reward must be a darling.Darling.

    Responses outside all classes do not count: with `correct_only` of ByClasses, these are the wrong ones, and the
    result is the number of distinct right answers.
    """

    def measure(self, answered: Sequence[Answered]) -> Mapping[str, np.ndarray]:
        """Returns {"classes": one value per prompt}; NaN where no response was valid."""
        found = []
        for one in answered:
            classes = np.array([value(record, CLASS) for record in one.of("sampled")], np.float64)
            known = classes[~np.isnan(classes)]
            found.append(float(len(set(known[known >= 0]))) if len(known) else np.nan)
        return {"classes": np.array(found, np.float64)}
