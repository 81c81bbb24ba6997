"""OpenMathReasoning (arXiv 2504.16891): 12,500 worked solutions of its easiest problems, as demonstrations for r1_zero.

`python -m jaxrl_llm.data.prepare.openmathreasoning --out DIR [--max_tokens 2048]`. Solutions without a pass rate are left out,
the others are sorted by pass rate from the highest, and the first 12,500 are shuffled into training and validation. A limit on
tokens (2048 and 4096 are common) counts the prompt and the response and applies before the selection.
"""

import heapq
from collections.abc import Mapping, Sequence
from itertools import chain

from jaxrl_llm.data.prepare import preparation

OPEN, CLOSE = "<think>", "</think>"


def convert(row: preparation.Raw, options: preparation.Options) -> preparation.Item:
    """Takes a problem and its solution; the text after the thinking is put in answer tags, the form that r1_zero's grader reads."""
    try:
        rate = float(row["pass_rate_72b_tir"])
    except (TypeError, ValueError):
        raise preparation.Drop("no_pass_rate") from None
    thinking, closed, rest = str(row["generated_solution"]).rpartition(CLOSE)
    if not closed or not rest.strip():
        raise preparation.Drop("unfinished_thinking")
    answer = str(row["expected_answer"]).strip()
    if not answer:
        raise preparation.Drop("no_answer")
    # The template ends with <think>. removeprefix removes a repeated one; lstrip would also remove letters of the first word.
    response = f"{thinking.strip().removeprefix(OPEN).strip()}\n{CLOSE} <answer>{rest.strip()}</answer>"
    return preparation.Item(
        question=str(row["problem"]), truth=answer, info={"pass_rate": rate}, columns={"response": response}
    )


def carve(pools: preparation.Pools, options: preparation.Options) -> Mapping[str, Sequence[preparation.Item]]:
    """Selects the rows with the highest pass rates, as many as the sizes add up to."""
    sizes = [size for size in options.sizes.values() if size > 0]
    everything = chain.from_iterable(pools.values())
    if not sizes or len(sizes) < len(options.sizes) or any(isinstance(size, float) for size in sizes):
        raise ValueError(f"--sizes must name numbers of rows, which say how many are chosen (got {options.sizes})")
    best = heapq.nlargest(int(sum(sizes)), everything, key=lambda item: item.info["pass_rate"])
    return preparation.by_sizes({"best": best}, options)


PREPARATION = preparation.Preparation(
    name="openmathreasoning",
    source="nvidia/OpenMathReasoning",
    splits={"train": "cot"},
    columns=("problem", "generated_solution", "expected_answer"),
    sizes={"train": 12000, "val": 500},
    shuffle=True,
    template="r1_zero",
    tokenizer="Qwen/Qwen2.5-Math-1.5B",
    convert=convert,
    carve=carve,
)

if __name__ == "__main__":
    preparation.command(PREPARATION)
