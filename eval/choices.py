"""Multiple-choice accuracy over all rows, with the share of responses without a choice.

An unparsed response counts as wrong. MMLU-Pro's script gives it a random option instead, whose expected credit is an optional separate
metric.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.eval.answered import Answered, mean, value
from jaxrl_llm.experience import Prompt
from jaxrl_llm.rewards.multiple_choice import CHOICE, LETTERS


@dataclass(frozen=True, kw_only=True)
class ChoiceAccuracy:
    """Measures multiple-choice accuracy over all rows ("accuracy") and by category.

    "unparsed" is the share of responses without a letter, "accuracy_of_parsed" leaves those out, "accuracy_macro" is the mean
    over categories.

    Attributes:
      random_credit: whether to add "accuracy_with_random_credit", where an unparsed response is worth one over the number of options.
      reference: column of the prompt that holds the right letter; empty takes the prompt's reference, which is the hinted letter
        where that is rewarded.
    """

    random_credit: bool = False
    reference: str = ""

    def measure(self, answered: Sequence[Answered]) -> Mapping[str, np.ndarray]:
        """Returns one value per prompt, over its greedy responses or else its sampled ones."""
        right = [[float(value(r, CHOICE) == self._right(one.prompt)) for r in one.main] for one in answered]
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

    def _right(self, prompt: Prompt) -> int:
        return LETTERS.index(str(prompt.extra[self.reference]) if self.reference else prompt.reference)


def by_category(name: str, answered: Sequence[Answered], values: Sequence[float]) -> dict[str, np.ndarray]:
    """Returns {name/category: its prompts' values, name_macro: the mean over categories}; empty for a single category."""
    groups: dict[str, list[float]] = {}
    for one, x in zip(answered, values, strict=True):
        groups.setdefault(str(one.prompt.extra.get("category", "")), []).append(x)
    if len(groups) < 2:
        return {}
    found = {f"{name}/{category}": np.array(group, np.float64) for category, group in sorted(groups.items())}
    return found | {f"{name}_macro": np.array(mean([mean(group) for group in groups.values()]))}


def options(prompt: Prompt) -> Sequence[str]:
    """Returns the options of a prompt; raises ValueError where it has none."""
    found = prompt.extra.get("options")
    if not found:
        raise ValueError(f"prompt {prompt.id!r} has no extra['options']: use a multiple choice dataset")
    return found
