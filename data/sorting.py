"""Generated sorting of short strings, such as "s:dbca=" -> "abcd", for demonstrations, training and evaluation."""

import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.data import generated
from jaxrl_llm.experience import Prompt


@dataclass(frozen=True, kw_only=True)
class Sorting(generated.Family):
    """Prompts of a string of characters to be sorted; held-out strings never occur in training.

    Attributes:
      min_length: length of the shortest strings.
      max_length: length of the longest strings; the lengths come in turn.
      alphabet: the characters in their order; a string may hold one several times.
      noise: probability that a character of a demonstration's answer is wrong; references stay right.
    """

    min_length: int = 4
    max_length: int = 4
    alphabet: str = string.ascii_lowercase[:10]
    noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min_length <= self.max_length:
            raise ValueError(
                f"Sorting needs 1 <= min_length <= max_length (got {self.min_length} and {self.max_length})"
            )
        if len(set(self.alphabet)) != len(self.alphabet) or len(self.alphabet) < 2:
            raise ValueError(f"Sorting.alphabet must hold two or more characters, each once (got {self.alphabet!r})")

    def rows(self) -> Sequence[Prompt]:
        """Returns all prompts, each with its reference and a demonstration; every call returns the same."""
        problems = self.problems(
            [len(self.alphabet) ** length for length in range(self.min_length, self.max_length + 1)],
            self._string,
        )
        random = np.random.default_rng([self.seed, 1])
        return [self._prompt(i, self._string(*problem), random) for i, problem in enumerate(problems)]

    def _string(self, stratum: int, index: int) -> str:
        """Writes `index` in the alphabet's base, as a string of the stratum's length."""
        characters = []
        for _ in range(self.min_length + stratum):
            index, digit = divmod(index, len(self.alphabet))
            characters.append(self.alphabet[digit])
        return "".join(characters)

    def _prompt(self, row: int, letters: str, random: np.random.Generator) -> Prompt:
        reference = "".join(sorted(letters, key=self.alphabet.index))
        return Prompt(
            id=f"sorting/{self.split}/{row}",
            text=f"s:{letters}=",
            reference=reference,
            response=generated.corrupt(reference, self.alphabet, self.noise, random) if self.noise else reference,
            source="sorting",
        )
