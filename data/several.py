"""Generated problems with many right answers, "17=" -> "5+12": any two numbers with that sum, for measures of diversity."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.data import generated
from jaxrl_llm.experience import Prompt

_SUM = re.compile(r"(\d+)\+(\d+)")


@dataclass(frozen=True, kw_only=True)
class Several:
    """A number to be written as a sum of two; held-out numbers never occur in training.

    A demonstration's first number is drawn from 0..n, near `favourite` x n the more often the larger `peak` is: a model
    that imitates them answers rightly in several ways, some of them likelier. The reference is the number.

    Attributes:
      low: smallest number.
      high: largest number.
      peak: how strongly demonstrations favour one answer; 0 draws all alike.
      favourite: which answer is favoured, as the first number's share of the sum.
      noise: share of demonstrations whose second number is wrong.
      split: "train" or "heldout".
      heldout_share: share of the numbers that are held out, chosen by a hash.
      size: rows; None gives every number once.
      seed: names the order of the rows and the demonstrations.
    """

    low: int = 10
    high: int = 99
    peak: float = 0.0
    favourite: float = 0.5
    noise: float = 0.0
    split: generated.Split = "train"
    heldout_share: float = 0.25
    size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        generated.check(
            name="Several", split=self.split, heldout_share=self.heldout_share, noise=self.noise, size=self.size
        )
        if not 1 <= self.low <= self.high:
            raise ValueError(f"Several needs 1 <= low <= high (got low={self.low}, high={self.high})")
        if self.peak < 0 or not 0 <= self.favourite <= 1:
            raise ValueError(
                f"Several.peak must be >= 0 and favourite in [0, 1] (got {self.peak} and {self.favourite})"
            )

    def rows(self) -> Sequence[Prompt]:
        """All prompts, each with a demonstration; the same at every call."""
        problems = generated.choose(
            [self.high - self.low + 1], self._key, split=self.split, heldout_share=self.heldout_share, size=self.size,
            seed=self.seed,
        )  # fmt: skip
        random = np.random.default_rng([self.seed, 1])
        return [self._prompt(row, self.low + index, random) for row, (_, index) in enumerate(problems)]

    def _key(self, stratum: int, index: int) -> str:
        return f"{self.low + index}="

    def _prompt(self, row: int, number: int, random: np.random.Generator) -> Prompt:
        shares = np.exp(-self.peak * np.abs(np.arange(number + 1) / number - self.favourite))
        first = int(random.choice(number + 1, p=shares / shares.sum()))
        wrong = int(random.integers(1, 10)) if random.random() < self.noise else 0
        return Prompt(
            id=f"several/{self.split}/{row}",
            text=f"{number}=",
            reference=str(number),
            response=f"{first}+{number - first + wrong}",
            source="several",
        )


def right_sum(prompt: Prompt, text: str) -> float:
    """1 where the whole response is a sum of two numbers that makes the prompt's, else 0."""
    found = _SUM.fullmatch(text.strip())
    return float(found is not None and int(found[1]) + int(found[2]) == int(prompt.reference))
