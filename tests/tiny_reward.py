"""A reward that an untrained policy earns in part, so that the tests of whole runs learn something."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxrl_llm.data.sorting import Sorting
from jaxrl_llm.experience import Prompt


def early_letters(prompt: Prompt, text: str) -> float:
    """The share of a response's characters that come from the first half of the alphabet, after REWARD_S seconds and no file REWARD_HOLD."""
    del prompt
    while os.path.exists(os.environ.get("REWARD_HOLD", "")):
        time.sleep(0.01)
    time.sleep(float(os.environ.get("REWARD_S", 0)))
    return sum(c in "abcde" for c in text) / max(len(text), 1)


@dataclass(frozen=True, kw_only=True)
class SortedPairs:
    """Sorted strings, preferred to the same letters in reverse."""

    def rows(self) -> Sequence[Prompt]:
        rows = Sorting(alphabet="abcdefghij", min_length=6, max_length=6, size=256).rows()
        return [replace(r, extra={"rejected": r.reference[::-1]}) for r in rows if r.reference != r.reference[::-1]]
