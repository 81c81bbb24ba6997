"""Countdown: problems that ask for an expression over three or four given numbers that equals a target.

`python -m jaxrl_llm.data.prepare.countdown --out DIR [--source generated]`. The ground truth holds the target and the numbers;
any expression that uses each number once and equals the target is right. Generated problems have at least one solution.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from jaxrl_llm.data import files
from jaxrl_llm.data.prepare.preparation import Item, Options, Preparation, Raw, command

GENERATED = "generated"
HIGHEST_NUMBER, HIGHEST_TARGET = 99, 999


def read(preparation: Preparation, options: Options, split: str) -> Iterator[files.Located]:
    """Returns rows of the source, or as many generated ones as the sizes need, with some to spare for repeated problems."""
    if options.source != GENERATED:
        return files.each(options.source, preparation.columns, split=split)
    counts = list(options.sizes.values())
    if not counts or any(isinstance(count, float) or count < 1 for count in counts):
        raise ValueError(f"--source {GENERATED} needs numbers of rows in --sizes (got {options.sizes})")
    return islice(problems(options.seed), int(sum(counts) * 1.1) + 10)


def problems(seed: int) -> Iterator[files.Located]:
    """Yields solvable problems without end, determined by the seed."""
    random = np.random.default_rng(seed)
    number = 0
    while True:
        numbers = [int(n) for n in random.integers(1, HIGHEST_NUMBER + 1, random.integers(3, 5))]
        target = _combined(list(numbers), random)
        if target is not None:
            yield f"generated, row {number}", {"target": target, "nums": numbers}
            number += 1


def _combined(values: list[int], random: np.random.Generator) -> int | None:
    """Returns the value of a random expression over all of `values`, or None where a step is not a positive whole number."""
    while len(values) > 1:
        a, b = (values.pop(int(random.integers(len(values)))) for _ in range(2))
        sign = "+-*/"[int(random.integers(4))]
        if (sign == "-" and a <= b) or (sign == "/" and a % b):
            return None
        values.append({"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign])
    return values[0] if values[0] <= HIGHEST_TARGET else None


def convert(row: Raw, options: Options) -> Item:
    """Writes the numbers and the target as a question."""
    target, numbers = int(row["target"]), [int(number) for number in row["nums"]]
    asked = (
        f"Using the numbers {', '.join(map(str, numbers))}, write an expression that equals {target}. You may use the "
        "operations +, -, *, / and parentheses, and must use each number exactly once."
    )
    return Item(question=asked, truth={"target": target, "numbers": numbers})


PREPARATION = Preparation(
    name="countdown",
    source="Jiayi-Pan/Countdown-Tasks-3to4",
    columns=("target", "nums"),
    sizes={"train": 327680, "test": 1024},
    unique=True,
    instruction="Give the expression in answer tags, such as <answer>(1 + 2) / 3</answer>.",
    convert=convert,
    read=read,
)

if __name__ == "__main__":
    command(PREPARATION)
