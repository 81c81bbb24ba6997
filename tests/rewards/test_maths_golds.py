"""The maths reward on the gold answers of MATH: each is right for its own problem, and wrong for another's.

MATH's training file gives a problem's answer twice: as text without spaces, and in the box of its solution. Two solutions box
nothing, and two further texts are empty: such a problem has no gold, and preparation drops it.
"""

import asyncio
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet
import pytest

from jaxrl_llm.data.prepare import hendrycks_math
from jaxrl_llm.experience import Scores
from jaxrl_llm.rewards.maths import Maths, judge

# One spelling for what differs in spelling alone, so that two golds that still differ are different answers.
UNSEEN = re.compile(r"\s|\\[!, ]|\\?\$|\\left|\\right|\^\\circ|\\text\{.*?\}")


@pytest.fixture(scope="module")
def maths() -> Iterator[Maths]:
    reward = Maths(workers=2, limit_s=60.0)
    yield reward
    reward.close()


def boxed(reward: Maths, pairs: Sequence[tuple[str, str]]) -> Scores:
    asked = [(gold, f"\\boxed{{{answer}}}") for gold, answer in pairs]
    return asyncio.run(reward.judge_all("jaxrl_llm.rewards.maths", "judge", asked, []))


def golds(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """MATH-500's 500 answers, and MATH's 7,500 twice: as texts and as their solutions' boxes."""
    tested = [json.loads(line)["answer"] for line in (folder / "math500.jsonl").read_text().splitlines()]
    column = pyarrow.parquet.read_table(folder / "train.parquet")["reward_model"].to_pylist()
    rows = [row["ground_truth"] for row in column]
    return tested, [row["target"] for row in rows], [hendrycks_math.gold(row["solution"]) for row in rows]


@pytest.mark.slow
def test_every_gold_of_math_is_right_in_its_own_box(real_data: Path, maths: Maths) -> None:
    tested, texts, boxes = golds(real_data / "math")
    assert [len(tested), len(texts), len(boxes)] == [500, 7500, 7500]
    assert [tested.count(""), texts.count(""), boxes.count("")] == [0, 4, 2]
    every = sorted({*tested, *texts, *boxes} - {""})
    scores = boxed(maths, [(gold, gold) for gold in every])
    wrong = [gold for gold, score in zip(every, scores.parts["maths"], strict=True) if score != 1]
    assert not wrong, f"{len(wrong)} of {len(every)} golds are not right in their own box: {wrong[:10]}"


@pytest.mark.slow
def test_at_most_one_of_1000_golds_of_other_problems_is_accepted(real_data: Path, maths: Maths) -> None:
    tested, _, boxes = golds(real_data / "math")
    spelled = lambda gold: re.sub("[dt]frac", "frac", UNSEEN.sub("", gold))  # noqa: E731
    every, drawn = [gold for gold in tested + boxes if gold], random.Random(0)
    pairs = [tuple(drawn.sample(every, 2)) for _ in range(1500)]
    pairs = [(gold, other) for gold, other in pairs if spelled(gold) != spelled(other)][:1000]
    scores = boxed(maths, pairs)
    assert len(pairs) == 1000 and scores.valid["maths"].all()
    accepted = [pair for pair, score in zip(pairs, scores.parts["maths"], strict=True) if score]
    assert len(accepted) <= 1, accepted


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("3, 5, 7", ["3,5,7", "7, 3, 5"], ["7", "3,5", "357"]),
        ("-1,3,3", ["3,-1"], ["3", "-1"]),
        ("1,2", [r"1 \text{ and } 2"], ["2", "1.2", "12"]),
        (r"\$36", ["36", r"\$36"], ["6", "63"]),
        (r"\$32,\!348", ["32348", "32,348"], ["348", "32"]),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", [r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"], ["4", "1"]),
        (r"\begin{pmatrix} -1 \\ 2 \end{pmatrix}.", [r"\begin{pmatrix} -1 \\ 2 \end{pmatrix}"], ["2", "-1"]),
        (r"\begin{pmatrix}-1\\[2pt] 2\end{pmatrix}", [], ["2", "-1"]),
        (r"\begin{pmatrix}-1\2\end{pmatrix}", [r"\begin{pmatrix}-1\2\end{pmatrix}"], ["2", "-1"]),
        (r"2007 + \frac\pi 2", [r"2007 + \frac\pi 2"], ["2007", "2"]),
        (r"30^\circ.", ["30", r"30^\circ"], ["3"]),
        ("+5", ["5", "+5"], ["-5"]),
        ("1 234", ["1234", "1,234"], ["234", "235"]),
        ("12,345.67", ["12345.67"], ["345.67", "12"]),
    ],
)
def test_a_gold_is_read_as_a_whole(gold: str, right: list[str], wrong: list[str]) -> None:
    assert [answer for answer in right if judge(gold, f"so \\boxed{{{answer}}}") != 1] == []
    assert [answer for answer in wrong if judge(gold, f"so \\boxed{{{answer}}}") != 0] == []
