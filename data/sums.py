"""Generated arithmetic with short texts, such as "47+85=" -> "132", for demonstrations, training and evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.data import generated
from jaxrl_llm.experience import Prompt

OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclass(frozen=True, kw_only=True)
class Sums(generated.Family):
    """Prompts of two operands and an operator; held-out problems never occur in training, not even with swapped operands.

    Attributes:
      low: smallest operand.
      high: largest operand.
      operators: one or more of "+-*", used in turn.
      reversed_answer: whether the answer is written last digit first, the order in which carries arise.
      noise: probability that a digit of a demonstration's answer is wrong; references stay right.
    """

    low: int = 0
    high: int = 99
    operators: str = "+"
    reversed_answer: bool = False
    noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.low <= self.high:
            raise ValueError(f"Sums needs 0 <= low <= high (got low={self.low}, high={self.high})")
        if not self.operators or set(self.operators) - set(OPERATORS):
            raise ValueError(f"Sums.operators must be one or more of {''.join(OPERATORS)!r} (got {self.operators!r})")

    def rows(self) -> Sequence[Prompt]:
        """Returns all prompts, each with its reference and a demonstration; every call returns the same."""
        count = self.high - self.low + 1
        problems = self.problems(
            [count**2] * len(self.operators),
            self._key,
        )
        random = np.random.default_rng([self.seed, 1])
        return [self._prompt(i, *self._problem(*problem), random) for i, problem in enumerate(problems)]

    def _problem(self, operator: int, index: int) -> tuple[int, str, int]:
        a, b = divmod(index, self.high - self.low + 1)
        return self.low + a, self.operators[operator], self.low + b

    def _key(self, operator: int, index: int) -> str:
        a, sign, b = self._problem(operator, index)
        return f"{a}{sign}{b}" if sign == "-" else f"{min(a, b)}{sign}{max(a, b)}"

    def _prompt(self, row: int, a: int, sign: str, b: int, random: np.random.Generator) -> Prompt:
        answer = str(OPERATORS[sign](a, b))
        reference = answer[::-1] if self.reversed_answer else answer
        return Prompt(
            id=f"sums/{self.split}/{row}",
            text=f"{a}{sign}{b}=",
            reference=reference,
            response=generated.corrupt(reference, "0123456789", self.noise, random),
            source="sums",
        )
