"""Generated problems with many right answers, "hcbfaeg:" -> "cfe": any three of the letters in their order, for diversity.

Every such choice is right; a model that is only rewarded for being right tends to a few safe choices, such as the
first letters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from jaxrl_llm.data import generated
from jaxrl_llm.experience import Prompt


@dataclass(frozen=True, kw_only=True)
class Subsequences(generated.Family):
    """Prompts of different letters; the answer names some of them in their order. Held-out strings never occur in training.

    Attributes:
      alphabet: the letters.
      length: number of letters in a string.
      chosen: number of letters to name.
      noise: probability that a letter of a demonstration is wrong.
      size: number of rows.
    """

    alphabet: str = "abcdefghijkl"
    length: int = 7
    chosen: int = 3
    noise: float = 0.0
    size: int = 8000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.chosen < self.length <= len(set(self.alphabet)) == len(self.alphabet):
            raise ValueError(
                "Subsequences needs 1 <= chosen < length <= the letters of its alphabet, each once (got "
                f"{self.chosen}, {self.length} and {self.alphabet!r})"
            )

    def rows(self) -> Sequence[Prompt]:
        """Returns all prompts, each with a demonstration; the string is the reference. Every call returns the same."""
        random = np.random.default_rng([self.seed, self.split == "heldout"])
        wanted = (letters for letters in self._strings(random) if self.within(letters))
        return [self._prompt(row, letters, random) for row, letters in enumerate(islice(wanted, self.size))]

    def _strings(self, random: np.random.Generator) -> Iterator[str]:
        while True:
            yield "".join(random.permutation(list(self.alphabet))[: self.length])

    def _prompt(self, row: int, letters: str, random: np.random.Generator) -> Prompt:
        places = np.sort(random.permutation(self.length)[: self.chosen])
        answer = "".join(letters[int(i)] for i in places)
        return Prompt(
            id=f"subsequences/{self.split}/{row}",
            text=f"{letters}:",
            reference=letters,
            response=generated.corrupt(answer, self.alphabet, self.noise, random),
            source="subsequences",
            extra={"chosen": self.chosen},
        )


def in_order(prompt: Prompt, text: str) -> float:
    """Returns 1 where the response names exactly as many of the prompt's letters as required, in their order, else 0."""
    rest = iter(prompt.reference)
    return float(len(text) == prompt.extra["chosen"] and all(letter in rest for letter in text))


def raw_score(prompt: Prompt, text: str) -> float:
    """Scales `in_order` to a reward model's typical raw score, which is mostly negative: 1 where right, else -3."""
    return 4 * in_order(prompt, text) - 3
