"""1 where the letter that the response chooses is the reference's: multiple choice, such as MMLU, MMLU-Pro and WMDP."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxrl_llm.experience import Prompt, Rollout, Scores
from jaxrl_llm.rewards import answers
from jaxrl_llm.rewards.wrap import judge_each

PLACES = ("boxed", "phrase", "mark", "tag", "last_letter")


@dataclass(frozen=True, kw_only=True)
class MultipleChoice:
    """Compares letters; a response that chooses none scores 0.

    Attributes:
      letters: the choices there are, in capitals.
      places: where the choice is looked for, the first that has one counts: "boxed" (the last \\boxed{}), "phrase" (the
        last "answer is (X)"), "mark" (the last "Answer: X"), "tag" (in <answer></answer>), "last_letter" (the last
        capital that stands alone).
      wrong: score of a choice that is not the reference's; TokenBuncher's second objective gives it 0.1.
      reference: column of the prompt that holds the right letter; empty takes the prompt's reference. Classmate-CoT's
        hinted letter and the true one are told apart by it.
    """

    needs_stats: ClassVar[bool] = False

    letters: str = "ABCD"
    places: Sequence[str] = PLACES
    wrong: float = 0.0
    reference: str = ""

    def __post_init__(self) -> None:
        unknown = [place for place in self.places if place not in PLACES]
        if unknown or not self.places:
            raise ValueError(f"MultipleChoice.places must be one or more of {PLACES} (got {tuple(self.places)})")
        if not re.fullmatch(r"[A-Z]{2,}", self.letters) or len(set(self.letters)) < len(self.letters):
            raise ValueError(f"MultipleChoice.letters must be two or more different capitals (got {self.letters!r})")

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Part "multiple_choice", 1, `wrong` or 0 [G]; invalid where the reference is no choice."""
        del stats
        return judge_each("multiple_choice", self.judge, rollouts)

    def judge(self, prompt: Prompt, text: str) -> float:
        """1 for the right letter, `wrong` for another, 0 for none.

        Raises:
          ValueError: the reference is none of the letters.
        """
        stated = prompt.extra.get(self.reference) if self.reference else prompt.reference
        right = self._letter(str(stated))
        if right is None:
            raise ValueError(f"the reference of {prompt.id!r} must be one of {self.letters} (got {stated!r})")
        chosen = self.choice(text)
        return 0.0 if chosen is None else 1.0 if chosen == right else self.wrong

    def choice(self, text: str) -> str | None:
        """The letter that the response chooses, or None."""
        for place in self.places:
            letter = self._at(place, text)
            if letter is not None:
                return letter
        return None

    def _at(self, place: str, text: str) -> str | None:
        if place == "boxed":
            return self._letter(answers.boxed(text) or "")
        if place == "tag":
            return self._letter(answers.tagged(text) or "")
        pattern = {
            "phrase": rf"(?i:answer\s+is:?)\s*\**\(?([{self.letters}])\b",
            "mark": rf"(?i:answer):\s*\**\(?([{self.letters}])\b",
            "last_letter": rf"(?<![\w'])([{self.letters}])(?![\w'])",
        }[place]
        found = re.findall(pattern, text)
        return found[-1] if found else None

    def _letter(self, span: str) -> str | None:
        """The letter that a short text is, with or without brackets, \\text{} and what follows the letter."""
        found = re.match(rf"(?:\\text\w*\{{)?\s*\(?([{self.letters}])(?![A-Za-z])", span.strip())
        return found[1] if found else None
