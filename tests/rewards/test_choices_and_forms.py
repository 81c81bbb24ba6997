"""Multiple choice, countdown, form times answer, and the reward of each source: values on cases."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np
import pytest

from jaxrl_llm.experience import Group, Rollout, Scores
from jaxrl_llm.rewards import answers
from jaxrl_llm.rewards.by_source import BySource
from jaxrl_llm.rewards.countdown import Countdown, value
from jaxrl_llm.rewards.exact import Exact
from jaxrl_llm.rewards.format import Format
from jaxrl_llm.rewards.format_answer import FormatAnswer
from jaxrl_llm.rewards.maths import Maths
from jaxrl_llm.rewards.multiple_choice import MultipleChoice
from jaxrl_llm.rewards.weighted import Weighted

Score = Callable[..., Scores]
MakeGroup = Callable[..., Group]


def test_tokenbunchers_second_objective_scores_boxes(score: Score) -> None:
    reward = MultipleChoice(places=("boxed",), wrong=0.1)
    texts = [r"\boxed{B}", r"\boxed{A}", "B", r"\boxed{A} no, \boxed{\text{B}}", r"\boxed{E}", r"\boxed{Both}"]
    assert score(reward, texts, "B").parts["multiple_choice"].tolist() == [1, 0.1, 0, 1, 0, 0]


def test_choices_are_found_in_phrases_marks_and_alone(score: Score) -> None:
    texts = [
        "Therefore, the answer is (C).",
        "the answer is **C**",
        "ANSWER: C",
        "<answer>(C)</answer> but A",
        "A? No. C",
        "I'd say C, not B",
        "the answer is Cold",
        "",
    ]
    assert score(MultipleChoice(), texts, "C").parts["multiple_choice"].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_the_right_letter_may_be_another_column(score: Score) -> None:
    hinted, true = MultipleChoice(), MultipleChoice(reference="actual_ground_truth")
    extra = {"actual_ground_truth": "A"}
    assert score(hinted, ["the answer is (D)"], "D", extra).parts["multiple_choice"].tolist() == [1]
    assert score(true, ["the answer is (D)"], "D", extra).parts["multiple_choice"].tolist() == [0]
    assert score(true, ["the answer is (D)"], "D").valid["multiple_choice"].tolist() == [False]


def test_ten_choices_are_a_matter_of_letters(score: Score) -> None:
    assert score(MultipleChoice(letters="ABCDEFGHIJ"), [r"\boxed{J}"], "J").parts["multiple_choice"].tolist() == [1]
    with pytest.raises(ValueError, match=r"different capitals \(got 'AAB'\)"):
        MultipleChoice(letters="AAB")


def test_an_equation_uses_each_number_once_and_makes_the_target(score: Score) -> None:
    extra = {"numbers": [3, 5, 7, 2], "target": 29}
    texts = [
        "<answer>(3 + 5) * 7 / 2 + 1</answer>",
        "<answer>3 * 5 + 7 * 2</answer>",
        "<answer>7 * 5 - 3 * 2 = 29</answer>",
        "<answer>2 * (7 + 5) + 3 + 2</answer>",
        "<answer>__import__('os')</answer>",
        "<answer>9**9**9**9</answer>",
        "<answer>7 * 5 - 3 * 2</answer> and <answer>29</answer>",
        "7 * 5 - 3 * 2",
    ]
    assert score(Countdown(), texts, extra=extra).parts["countdown"].tolist() == [0.1, 1, 1, 0.1, 0.1, 0.1, 0.1, 0]
    short = ["<answer>7 * 5 - 3 * 2</answer>", "<answer>3 + 5</answer>"]
    some = Countdown(every_number=False)
    assert score(some, short, extra={"numbers": [3, 5, 7, 2], "target": 8}).parts["countdown"].tolist() == [0.1, 1]
    assert score(Countdown(), short).valid["countdown"].tolist() == [False, False]


def test_expressions_are_valued_exactly() -> None:
    assert value("1 / 3 + 1 / 6") == Fraction(1, 2)
    assert [value(e) for e in ("1 / 0", "2 ** 3", "1 // 2", "(", "a", "-(2 - 5)")] == [None, None, None, None, None, 3]


@pytest.fixture(scope="module")
def maths() -> Iterator[Maths]:
    reward = Maths(workers=1, limit_s=30.0)
    yield reward
    reward.close()


def test_an_answer_without_its_form_earns_nothing(score: Score, maths: Maths) -> None:
    texts = [
        "it is half</think> <answer>\\frac{2}{4}</answer>",
        "</think> <answer>3</answer>",
        "</think>\n<answer>0.5</answer>",
        "so \\boxed{0.5}",
        "</think> <answer>3</answer> wait <answer>0.5 </answer>",
    ]
    scores = score(FormatAnswer(maths=maths), texts, "0.5")
    assert scores.parts["format_answer"].tolist() == [1, 0, 0, 0, 1]
    assert scores.parts["log/format"].tolist() == [1, 1, 0, 0, 1]
    assert scores.parts["log/answer"].tolist() == [1, 0, 0, 0, 1]
    lines = score(FormatAnswer(form="r1_zero_lines", maths=maths), texts, "0.5")
    assert lines.parts["format_answer"].tolist() == [1, 0, 1, 0, 1]
    four = score(FormatAnswer(grade_unformatted=True, maths=maths), [*texts[:2], "it is $0.5$", "it is $3$"], "0.5")
    assert four.parts["format_answer"].tolist() == [1, 0, 0, 0]
    assert four.parts["log/answer"].tolist() == [1, 0, 1, 0]
    boxed = score(FormatAnswer(form="boxed", maths=maths), texts[:4], "0.5")
    assert boxed.parts["format_answer"].tolist() == [0, 0, 0, 1]


def test_an_answer_in_tags_is_read_as_a_whole(score: Score, maths: Maths) -> None:
    matrix = r"\begin{pmatrix} 1 \\ 7 \end{pmatrix}"
    asked = {"3, 5, 7": ["3,5,7", "7"], r"\$36": [r"\$36", "36", "6"], matrix: [matrix, "7"], "7": [matrix, "3, 5, 7"]}
    found = {
        gold: score(FormatAnswer(maths=maths), [f"</think> <answer>{x}</answer>" for x in texts], gold)
        for gold, texts in asked.items()
    }
    assert {gold: scores.parts["format_answer"].tolist() for gold, scores in found.items()} == {
        "3, 5, 7": [1, 0],
        r"\$36": [1, 1, 0],
        matrix: [1, 0],
        "7": [0, 0],
    }
    assert all(scores.valid["format_answer"].all() for scores in found.values())


def test_one_of_several_references_is_enough(score: Score, maths: Maths) -> None:
    text = "</think> <answer>7</answer>"
    reward = FormatAnswer(maths=maths)
    assert score(reward, [text], "6", {"references": [6, "7.0"]}).parts["format_answer"].tolist() == [1]
    assert score(reward, [text, "no"], "").valid["format_answer"].tolist() == [False, True]


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>a</think> b", False, ("a", "b")),
        ("x<think>a</think><think>c</think>b", False, ("a", "<think>c</think>b")),
        ("a</think>b", False, ("a", None)),
        ("a</think>b", True, ("a", "b")),
        ("<think>a", False, ("a", None)),
        ("</think>a<think>b</think>c", False, ("b", "c")),
        ("", True, ("", None)),
    ],
)
def test_thought_and_output_are_split_at_the_first_tags(text: str, opened: bool, expected: tuple[str, str]) -> None:
    assert answers.thought(text, opened) == expected


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """Wants the learner's statistics."""

    needs_stats: ClassVar[bool] = True

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        ones = np.ones(len(rollouts))
        return Scores(parts={"s": 3 * ones}, valid={"s": ones > 0})


def test_the_source_chooses_the_reward_and_parts_keep_one_name(group: MakeGroup) -> None:
    both = Weighted(parts={"answer": Exact(), "form": Format(pattern=r"\d+")}, weights={"form": 0.25})
    reward = BySource(rewards={"aime*": both, "aime25": Exact(), "gsm8k": Format(pattern="x")}, default=Statistic())
    assert reward.needs_stats
    first = group(reward, ["132", "7"], "132", source="aime24")
    assert first.total().tolist() == [1.25, 0.25] and first.valid().all()
    assert set(first.scores.parts) == {"by_source", "log/aime/answer", "log/aime/form"}
    assert group(reward, ["132", "7"], "132", source="aime25").total().tolist() == [1, 0]
    assert group(reward, ["x"], "132", source="gsm8k").total().tolist() == [1]
    assert group(reward, ["x"], "132", source="new").total().tolist() == [3]
    assert not group(reward, ["x"], source="aime25").valid().any()


def test_a_source_without_a_reward_is_an_error_that_names_it(group: MakeGroup) -> None:
    with pytest.raises(ValueError, match=r"no reward for the source 'new'.*\['gsm8k'\].*BySource.default"):
        group(BySource(rewards={"gsm8k": Exact()}), ["x"], source="new")
