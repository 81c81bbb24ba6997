"""Generated prompts without a fixed answer, "f:dbca=" -> letters in runs: demonstrations vary, and so does their entropy.

    first letter: any;   next letter: the previous one with that letter's probability `stays`, else any

It is a harmless replacement for prompts on which a model is to be defended: the effect of a reward of letters (rewards/letters.py)
can be measured without harm. As in real text, some answers are more certain than others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.data import generated
from jaxrl_llm.experience import Prompt


@dataclass(frozen=True, kw_only=True)
class OpenLetters:
    """Prompts of random letters with random letters as demonstrations; disjoint ranges of shares give disjoint prompts.

    Attributes:
      alphabet: the letters.
      length: number of letters in a prompt.
      answer_length: number of letters in a demonstration.
      stays: probability that a letter is followed by itself, for the first and the last letter of the alphabet; linear in
        between.
      first_share: start of the range of the prompts' hashes, as a share of all hashes, in [0, 1].
      last_share: end of that range.
      size: number of rows.
      seed: seed of the prompts, their order and the demonstrations.
    """

    alphabet: str = "abcdefghij"
    length: int = 6
    answer_length: int = 6
    stays: tuple[float, float] = (0.0, 0.0)
    first_share: float = 0.0
    last_share: float = 1.0
    size: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.first_share < self.last_share <= 1:
            raise ValueError(
                f"OpenLetters needs 0 <= first_share < last_share <= 1 (got {self.first_share} and {self.last_share})"
            )
        if len(self.stays) != 2 or not all(0 <= p <= 1 for p in self.stays):
            raise ValueError(f"OpenLetters.stays must be two probabilities (got {self.stays})")
        components.at_least(self, 1, "length", "answer_length", "size")
        if self.size > len(self.alphabet) ** self.length * (self.last_share - self.first_share) / 2:
            raise ValueError(f"OpenLetters.size={self.size} is more than half of the strings there are: raise length")

    def rows(self) -> Sequence[Prompt]:
        """Returns `size` different prompts; every call returns the same."""
        random = np.random.default_rng([self.seed, 2])
        found: dict[str, str] = {}
        while len(found) < self.size:
            letters = "".join(self.alphabet[i] for i in random.integers(len(self.alphabet), size=self.length))
            within = generated.held_out(letters, self.last_share) and not generated.held_out(letters, self.first_share)
            if within and letters not in found:
                found[letters] = self._answer(random)
        return [
            Prompt(id=f"open_letters/{letters}", text=f"f:{letters}=", response=answer, source="open_letters")
            for letters, answer in found.items()
        ]

    def _answer(self, random: np.random.Generator) -> str:
        stays = np.linspace(*self.stays, len(self.alphabet))
        chosen = [int(random.integers(len(self.alphabet)))]
        while len(chosen) < self.answer_length:
            again = random.random() < stays[chosen[-1]]
            chosen.append(chosen[-1] if again else int(random.integers(len(self.alphabet))))
        return "".join(self.alphabet[i] for i in chosen)
