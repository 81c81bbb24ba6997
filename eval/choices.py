"""Multiple choice: the letter that a response ends in, by a cascade of patterns, and accuracy with its unparsed share.

An unparsed response is wrong. MMLU-Pro's script gives it a random option instead; the expectation of that credit is a
metric of its own where it is asked for.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from jaxrl_llm.eval.answered import Answered, mean, value
from jaxrl_llm.experience import Prompt, Rollout, Scores

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CHOICE = "log/choice"

# Patterns by the form that a prompt asks for; each has one group, the letter, and the first that matches counts.
CASCADES: Mapping[str, tuple[str, ...]] = {
    "sentence": (r"[Cc]orrect answer is:?\s*\**\(?([A-Z])\b",),
    "reasoned": (r"answer is:?\s*\**\(?([A-Z])\b", r"[Aa]nswer:\s*\**\(?([A-Z])\b", r"\b([A-Z])\b"),
    "boxed": (r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-Z])\)?\s*\}",),
    "therefore": (
        r"[Tt]herefore,? the answer is:?\s*\**\(?([A-Z])\b",
        r"answer is:?\s*\**\(?([A-Z])\b",
        r"\(([A-Z])\)",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Letter:
    """1 where the chosen letter is the reference's; a prompt's `extra["options"]` are its options.

    Attributes:
      cascade: "sentence" ("The correct answer is X"), "reasoned" (MMLU-Pro's three patterns), "boxed" or "therefore".
      patterns: regular expressions in place of the cascade's, each with one group; empty takes the cascade's.
      take: which match of a pattern counts, "last" or "first".
      after: only the text after the last such mark counts, where there is one; empty takes the whole response.
    """

    needs_stats: ClassVar[bool] = False

    cascade: str = "sentence"
    patterns: Sequence[str] = ()
    take: Literal["last", "first"] = "last"
    after: str = "</think>"

    def __post_init__(self) -> None:
        if self.cascade not in CASCADES:
            raise ValueError(f"choices.Letter.cascade must be one of {sorted(CASCADES)} (got {self.cascade!r})")
        if self.take not in ("last", "first"):
            raise ValueError(f"choices.Letter.take must be 'last' or 'first' (got {self.take!r})")
        for pattern in self.patterns:
            if re.compile(pattern).groups != 1:
                raise ValueError(f"choices.Letter.patterns need one group each, the letter (got {pattern!r})")

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Part "correct", 0 or 1 [G], and "log/choice", the chosen option counted from 0, or -1 where unparsed."""
        del stats
        chosen = np.array([self.choice(r.text, len(options(r.prompt))) for r in rollouts], np.float64)
        right = np.array([LETTERS.index(r.prompt.reference) for r in rollouts], np.float64)
        valid = np.ones(len(rollouts), bool)
        return Scores(
            parts={"correct": (chosen == right).astype(np.float64), CHOICE: chosen},
            valid={"correct": valid, CHOICE: valid},
        )

    def choice(self, text: str, count: int) -> int:
        """The chosen option of `count`, from 0; -1 where no pattern finds one of their letters."""
        if self.after:
            text = text.rpartition(self.after)[2]
        for pattern in self.patterns or CASCADES[self.cascade]:
            found = [letter for letter in re.findall(pattern, text) if letter in LETTERS[:count]]
            if found:
                return LETTERS.index(found[-1 if self.take == "last" else 0])
        return -1


@dataclass(frozen=True, kw_only=True)
class ChoiceAccuracy:
    """Accuracy of multiple choice over all rows, "accuracy", and by category.

    "unparsed" is the share without a letter, "accuracy_of_parsed" leaves those out, "accuracy_macro" is the mean over
    categories.

    Attributes:
      random_credit: adds "accuracy_with_random_credit": an unparsed response is worth one over the number of options.
    """

    random_credit: bool = False

    def measure(self, answered: Sequence[Answered]) -> Mapping[str, np.ndarray]:
        """One value a prompt, over its greedy responses or else its sampled ones."""
        right = [[value(r, "correct") for r in one.main] for one in answered]
        lost = [[float(value(r, CHOICE) < 0) for r in one.main] for one in answered]
        found = {
            "accuracy": [mean(group) for group in right],
            "unparsed": [mean(group) for group in lost],
            "accuracy_of_parsed": [
                mean([x for x, u in zip(a, b, strict=True) if not u]) for a, b in zip(right, lost, strict=True)
            ],
        }
        if self.random_credit:
            guesses = [1 / len(options(one.prompt)) for one in answered]
            found["accuracy_with_random_credit"] = [
                mean(a) + mean(b) * guess for a, b, guess in zip(right, lost, guesses, strict=True)
            ]
        return {n: np.array(v, np.float64) for n, v in found.items()} | by_category(
            "accuracy", answered, found["accuracy"]
        )


def by_category(name: str, answered: Sequence[Answered], values: Sequence[float]) -> dict[str, np.ndarray]:
    """{name/category: its prompts' values, name_macro: the mean over categories}; nothing for a single category."""
    groups: dict[str, list[float]] = {}
    for one, x in zip(answered, values, strict=True):
        groups.setdefault(str(one.prompt.extra.get("category", "")), []).append(x)
    if len(groups) < 2:
        return {}
    found = {f"{name}/{category}": np.array(group, np.float64) for category, group in sorted(groups.items())}
    return found | {f"{name}_macro": np.array(mean([mean(group) for group in groups.values()]))}


def options(prompt: Prompt) -> Sequence[str]:
    """The options of a prompt; raises ValueError where it has none."""
    found = prompt.extra.get("options")
    if not found:
        raise ValueError(f"prompt {prompt.id!r} has no extra['options']: use a multiple choice dataset")
    return found
