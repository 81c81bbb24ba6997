"""MATH (arXiv 2103.03874) by subject: 7,500 training problems, and the first rows of each subject's test problems.

`python -m jaxrl_llm.data.prepare.hendrycks_math --out DIR [--solutions]`. A local file may have verl's columns as well, with question
and solution in reward_model.ground_truth; the instruction that stands behind such a question is cut off. --solutions writes each
problem's solution as a demonstration for r1_zero, in the column response.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jaxrl_llm.data import files
from jaxrl_llm.data.prepare.preparation import Drop, Item, Options, Pools, Preparation, Raw, by_sizes, command
from jaxrl_llm.rewards import answers

SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)


# A few solutions box one token without braces.
_BARE_BOX = re.compile(r"\\boxed\s+([^\s${}]+)")


# What verl's copies ask for behind each problem.
_ASKED = re.compile(r"\s+Let's think step by step and output the final answer within \\boxed\{\}\.\s*$")


def gold(solution: str) -> str:
    """Returns the content of the solution's last box; empty where it boxes nothing."""
    bare = _BARE_BOX.findall(solution)
    return (answers.boxed(solution) or (bare[-1] if bare else "")).strip()


def read(preparation: Preparation, options: Options, split: str) -> Iterator[files.Located]:
    """Yields all subjects in turn; a local file, or a folder without subject folders, holds them together."""
    local = Path(options.source).expanduser()
    apart = not local.exists() or (local / SUBJECTS[0]).is_dir()
    if not apart:
        yield from ((where, plain(where, row)) for where, row in files.each(options.source, (), split=split))
        return
    for subject in SUBJECTS:
        yield from files.each(options.source, preparation.columns, split=split, subset=subject)


def plain(where: str, row: Raw) -> Raw:
    """Returns a row with the columns problem and solution, which verl's copies have in reward_model.ground_truth.

    Raises:
      ValueError: the row has them in neither place.
    """
    if row.get("problem") and row.get("solution"):
        return row
    truth = (row.get("reward_model") or {}).get("ground_truth")
    if not isinstance(truth, Mapping) or not (truth.get("question") and truth.get("solution")):
        raise ValueError(
            f"{where}: no problem with its solution, in columns of these names or as question and solution in "
            f"reward_model.ground_truth; the row has {sorted(row)}: name another --source"
        )
    return {**row, "problem": _ASKED.sub("", str(truth["question"])), "solution": truth["solution"]}


def convert(row: Raw, options: Options) -> Item:
    """Takes a problem with the content of its solution's box as gold answer."""
    answer = gold(str(row["solution"]))
    if not answer:
        raise Drop("no_boxed_answer")
    kept = {name: row[name] for name in ("level", "type") if row.get(name) is not None}
    return Item(question=str(row["problem"]), truth=answer, info={"answer": row["solution"]}, columns=kept)


def demonstrated(row: Raw, options: Options) -> Item:
    """Takes a problem, with --solutions together with its solution as a thought that the answer follows."""
    item = convert(row, options)
    if not options.solutions:
        return item
    response = f"{str(row['solution']).strip()}\n</think> <answer>{item.truth}</answer>"
    return replace(item, columns={**item.columns, "response": response})


def carve(pools: Pools, options: Options) -> Mapping[str, Sequence[Item]]:
    """Cuts the parts by the sizes, after limiting the test part to the first rows of each subject."""
    most = options.test_of_each
    if "test" not in pools or most is None:
        return by_sizes(pools, options)
    seen: Counter[str] = Counter()
    test = []
    for item in pools["test"]:
        seen[str(item.columns.get("type"))] += 1
        if seen[str(item.columns.get("type"))] <= most:
            test.append(item)
    return by_sizes({**pools, "test": test}, options)


PREPARATION = Preparation(
    name="hendrycks_math",
    source="EleutherAI/hendrycks_math",
    data_source="EleutherAI/hendrycks_math",
    splits={"train": "train", "test": "test"},
    columns=("problem", "solution"),
    instruction="Put your final answer within \\boxed{}.",
    convert=demonstrated,
    read=read,
    carve=carve,
    arguments={
        "--test_of_each": {"type": int, "default": 100, "help": "test problems of each subject"},
        "--solutions": {"action": "store_true", "help": "write the solutions as demonstrations for r1_zero"},
    },
)

if __name__ == "__main__":
    command(PREPARATION)
