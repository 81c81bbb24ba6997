"""Numeric reward: 1 where the response's number equals the reference's, as for GSM8K and other tasks with numeric answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.experience import Prompt, Rollout, Scores
from jaxrl_llm.rewards import answers
from jaxrl_llm.rewards.wrap import PlainReward, judge_each

PLACES = ("boxed", "mark", "tag", "last_number")


@dataclass(frozen=True, kw_only=True)
class Numeric(PlainReward):
    """Compares exactly (as fractions) or within a relative tolerance; a response without a number scores 0.

    Attributes:
      places: places where the answer is looked for; the first that has one counts: "boxed" (the last \\boxed{}), "mark"
        (after the last `mark`), "tag" (in <answer></answer>), "last_number" (anywhere). Strict grading leaves
        "last_number" out.
      mark: text that precedes the answer, for the place "mark".
      tolerance: largest |answer - reference| / max(1, |reference|) that counts as equal.
    """

    places: Sequence[str] = PLACES
    mark: str = "####"
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        unknown = [place for place in self.places if place not in PLACES]
        if unknown or not self.places:
            raise ValueError(f"Numeric.places must be one or more of {PLACES} (got {tuple(self.places)})")
        components.at_least(self, 0, "tolerance")

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns part "numeric", 0 or 1 [G]; invalid where the reference is not a number."""
        del stats
        return judge_each("numeric", self.judge, rollouts)

    def judge(self, prompt: Prompt, text: str) -> float:
        """Returns 1 for an equal number, else 0.

        Raises:
          ValueError: the prompt's reference is not a number.
        """
        reference = answers.only_number(prompt.reference)
        if reference is None:
            raise ValueError(f"the reference of {prompt.id!r} is no number (got {prompt.reference!r})")
        answer = self.answer(text)
        if answer is None:
            return 0.0
        return float(abs(answer - reference) <= Fraction(self.tolerance) * max(Fraction(1), abs(reference)))

    def answer(self, text: str) -> Fraction | None:
        """Returns the number that the response gives as its answer, or None."""
        for place in self.places:
            number = self._at(place, text)
            if number is not None:
                return number
        return None

    def _at(self, place: str, text: str) -> Fraction | None:
        if place == "last_number":
            return answers.last_number(text)
        if place == "boxed":
            span = answers.boxed(text)
        elif place == "mark":
            span = answers.marked(text, self.mark)
        else:
            span = answers.tagged(text)
        return None if span is None else answers.only_number(span)
