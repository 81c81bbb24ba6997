"""Preference pairs from tasks with known answers: the reference is preferred to a corrupted copy of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.data import generated
from jaxrl_llm.experience import Prompt
from jaxrl_llm.protocols import Dataset


@dataclass(frozen=True, kw_only=True)
class Corrupted:
    """Uses each row's reference as the preferred response, and a copy with wrong characters as the rejected one.

    Attributes:
      source: the tasks; every reference must hold a character of `alphabet`.
      alphabet: the characters that are exchanged for one another.
      share: probability that a character of `alphabet` is wrong; at least one is.
      paired: False gives one response a row, by turns the right one, labelled desirable, and a wrong one, labelled undesirable.
      seed: seed of the errors.
    """

    source: Dataset
    alphabet: str
    share: float = 0.2
    paired: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        components.within(self, "(0, 1]", "share")
        if len(set(self.alphabet)) < 2:
            raise ValueError(f"corrupted.Corrupted.alphabet must hold two or more characters (got {self.alphabet!r})")

    def rows(self) -> Sequence[Prompt]:
        """Returns all prompts, with extra["rejected"] or extra["desirable"]; every call returns the same.

        Raises:
          ValueError: a reference has no character of `alphabet`.
        """
        random = np.random.default_rng([self.seed, 2])
        return [self._row(i, prompt, random) for i, prompt in enumerate(self.source.rows())]

    def _row(self, number: int, prompt: Prompt, random: np.random.Generator) -> Prompt:
        wrong = self._wrong(prompt, random)
        if self.paired:
            return replace(prompt, response=prompt.reference, extra={**prompt.extra, "rejected": wrong})
        right = number % 2 == 0
        return replace(
            prompt, response=prompt.reference if right else wrong, extra={**prompt.extra, "desirable": right}
        )

    def _wrong(self, prompt: Prompt, random: np.random.Generator) -> str:
        if not set(prompt.reference) & set(self.alphabet):
            raise ValueError(
                f"row {prompt.id!r}: no character of corrupted.Corrupted.alphabet={self.alphabet!r} is in the reference "
                f"{prompt.reference[:80]!r}, so that it cannot be corrupted"
            )
        wrong = prompt.reference
        while wrong == prompt.reference:
            wrong = generated.corrupt(prompt.reference, self.alphabet, self.share, random)
        return wrong
