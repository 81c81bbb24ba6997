"""Multiple-choice reward: 1 where the chosen letter is the reference's, as in MMLU, MMLU-Pro and WMDP."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.experience import Prompt, Rollout, Scores
from jaxrl_llm.rewards.wrap import PlainReward, judge_each

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CHOICE = "log/choice"

# Places where a choice can stand; each pattern has one group, the letter or text that begins with it; L stands for the letters.
PATTERNS: Mapping[str, str] = {
    "boxed": r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}",
    "sentence": r"[Cc]orrect answer is:?\s*\**\(?([L])\b",
    "phrase": r"(?i:answer\s+is:?)\s*\**\(?([L])\b",
    "mark": r"(?i:answer):\s*\**\(?([L])\b",
    "tag": r"(?s:<answer>(.*?)</answer>)",
    "bracketed": r"\(([L])\)",
    "last_letter": r"(?<![\w'])([L])(?![\w'])",
}
PLACES = ("boxed", "phrase", "mark", "tag", "last_letter")


@dataclass(frozen=True, kw_only=True)
class MultipleChoice(PlainReward):
    """Compares letters; a response that chooses none scores 0.

    Attributes:
      letters: letters of the choices, in capitals; empty takes as many as the prompt has in extra["options"], else ABCD.
      places: places where the choice is looked for; the first that has one counts: "boxed" (\\boxed{}), "sentence" ("correct
        answer is X"), "phrase" ("answer is (X)"), "mark" ("Answer: X"), "tag" (in <answer></answer>), "bracketed" ("(X)"),
        "last_letter" (a standalone capital).
      take: which of several choices in a place counts, "last" or "first".
      after: mark after whose last occurrence the text counts, where it occurs; empty takes the whole response.
      wrong: score of a wrong choice; TokenBuncher's second objective gives it 0.1.
      reference: column of the prompt that holds the right letter; empty takes the prompt's reference. It distinguishes
        Classmate-CoT's hinted letter from the true one.
    """

    letters: str = ""
    places: Sequence[str] = PLACES
    take: Literal["last", "first"] = "last"
    after: str = ""
    wrong: float = 0.0
    reference: str = ""

    def __post_init__(self) -> None:
        unknown = [place for place in self.places if place not in PATTERNS]
        if unknown or not self.places:
            raise ValueError(
                f"MultipleChoice.places must be one or more of {tuple(PATTERNS)} (got {tuple(self.places)})"
            )
        if self.letters and (
            not re.fullmatch(r"[A-Z]{2,}", self.letters) or len(set(self.letters)) < len(self.letters)
        ):
            raise ValueError(f"MultipleChoice.letters must be two or more different capitals (got {self.letters!r})")
        components.choices(self)

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns part "multiple_choice" [G], 1, `wrong` or 0, invalid where the reference is not a choice; and "log/choice" [G], the
        index of the chosen letter in the alphabet, or -1 for none."""
        del stats
        scores = judge_each("multiple_choice", self.judge, rollouts)
        chosen = [self.choice(r.text, self._of(r.prompt)) for r in rollouts]
        places = np.array([-1 if letter is None else LETTERS.index(letter) for letter in chosen], np.float64)
        return Scores(
            parts={**scores.parts, CHOICE: places}, valid={**scores.valid, CHOICE: np.ones(len(rollouts), bool)}
        )

    def judge(self, prompt: Prompt, text: str) -> float:
        """Returns 1 for the right letter, `wrong` for another, 0 for none.

        Raises:
          ValueError: the reference is none of the letters.
        """
        letters = self._of(prompt)
        stated = prompt.extra.get(self.reference) if self.reference else prompt.reference
        right = _letter(str(stated), letters)
        if right is None:
            raise ValueError(f"the reference of {prompt.id!r} must be one of {letters} (got {stated!r})")
        chosen = self.choice(text, letters)
        return 0.0 if chosen is None else 1.0 if chosen == right else self.wrong

    def choice(self, text: str, letters: str = "ABCD") -> str | None:
        """Returns the letter that the response chooses, or None."""
        if self.after:
            text = text.rpartition(self.after)[2]
        for place in self.places:
            found = re.findall(PATTERNS[place].replace("[L]", f"[{letters}]"), text)
            if found and (letter := _letter(found[-1 if self.take == "last" else 0], letters)) is not None:
                return letter
        return None

    def _of(self, prompt: Prompt) -> str:
        return self.letters or LETTERS[: len(prompt.extra.get("options") or "ABCD")]


def _letter(span: str, letters: str) -> str | None:
    """Returns the letter that a short text starts with, with or without brackets or \\text{}; None without one."""
    found = re.match(rf"(?:\\text\w*\{{)?\s*\(?([{letters}])(?![A-Za-z])", span.strip())
    return found[1] if found else None
