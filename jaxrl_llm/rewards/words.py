"""Scores a text by how often it has words of a list: a harmless objective, in place of a classifier of harm, for models of language."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm import components


@dataclass(frozen=True, kw_only=True)
class Words:
    """A scorer of texts (classifier.Scorer): the number of listed words over `most`, at most 1.

    Attributes:
      words: listed words; letter case is ignored, and each occurrence counts.
      most: number of occurrences that gives 1.
    """

    words: Sequence[str] = ("wonderful", "great", "happy", "amazing", "love", "beautiful", "perfect", "excellent")
    most: int = 10

    def __post_init__(self) -> None:
        if not self.words or any(re.fullmatch(r"\w+", word) is None for word in self.words):
            components.refuse(self, "words", "one or more single words")
        components.at_least(self, 1, "most")

    async def scores(self, texts: Sequence[Any]) -> list[float | None]:
        """Returns the score of each text, in [0, 1]."""
        listed = {word.lower() for word in self.words}
        counts = [sum(word in listed for word in re.findall(r"\w+", str(text).lower())) for text in texts]
        return [min(count / self.most, 1.0) for count in counts]
