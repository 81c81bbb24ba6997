"""How many classes of equal answers the samples of a prompt fall into, as a DARLING reward partitions them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.eval.answered import Answered, value

CLASS = "log/class"


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The number of classes of a prompt's sampled responses; the reward of the evaluation is a darling.Darling.

    Responses outside all classes do not count: with `correct_only` of its ByClasses, these are the wrong ones, and the
    number is that of distinct right answers.
    """

    def measure(self, answered: Sequence[Answered]) -> Mapping[str, np.ndarray]:
        """{"classes": one value a prompt}; NaN where no response was valid."""
        found = []
        for one in answered:
            classes = np.array([value(record, CLASS) for record in one.of("sampled")], np.float64)
            known = classes[~np.isnan(classes)]
            found.append(float(len(set(known[known >= 0]))) if len(known) else np.nan)
        return {"classes": np.array(found, np.float64)}
