"""Joins the rows of several datasets."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxrl_llm.experience import Prompt
from jaxrl_llm.protocols import Dataset


@dataclass(frozen=True, kw_only=True)
class SeveralSources:
    """Concatenates datasets; a run shuffles the rows, so a source occurs as often as it has rows.

    Attributes:
      parts: the datasets.
    """

    parts: Sequence[Dataset]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("SeveralSources.parts must name at least one dataset (got none)")

    def rows(self) -> Sequence[Prompt]:
        """Returns all rows, in the order of `parts`."""
        return [row for part in self.parts for row in part.rows()]
