"""The numeric verifier on cases, and on GSM8K's published model solutions with their labels."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxrl_llm.experience import Prompt, Scores
from jaxrl_llm.rewards.format import Format
from jaxrl_llm.rewards.numeric import Numeric

Score = Callable[..., Scores]


def test_the_first_place_with_a_number_counts(score: Score) -> None:
    texts = [
        r"\boxed{18} is not 7",
        "2 + 16\n#### 18",
        "<answer>18</answer> 7",
        "the answer is 18.",
        r"\boxed{7} 18",
        "",
    ]
    assert score(Numeric(), texts, "18").parts["numeric"].tolist() == [1, 1, 1, 1, 0, 0]


def test_strict_grading_needs_the_asked_place(score: Score) -> None:
    strict = Numeric(places=("boxed", "mark"))
    texts = [r"\boxed{18}", "#### 18", "the answer is 18", "<answer>18</answer>"]
    assert score(strict, texts, "18").parts["numeric"].tolist() == [1, 1, 0, 0]


def test_numbers_compare_exactly_or_within_the_tolerance(score: Score) -> None:
    texts = ["0.50", "1/2 is .5", r"\boxed{\frac{1}{2}}", "0.501", "0.51"]
    assert score(Numeric(), texts, "1/2").parts["numeric"].tolist() == [1, 1, 1, 0, 0]
    assert score(Numeric(tolerance=0.002), texts, "0.5").parts["numeric"].tolist() == [1, 1, 1, 1, 0]
    assert score(Numeric(), ["1,000", "1000.0"], "1000").parts["numeric"].tolist() == [1, 1]


def test_a_reference_without_a_number_is_invalid(score: Score) -> None:
    scores = score(Numeric(), ["5"], "five")
    assert scores.valid["numeric"].tolist() == [False]


def test_the_labels_of_gsm8ks_model_solutions_are_reproduced(real_data: Path) -> None:
    grade = Numeric(places=("mark", "last_number"), mark="A:")
    agree = total = 0
    for line in (real_data / "graders" / "gsm8k_example_model_solutions.jsonl").read_text().splitlines():
        row = json.loads(line)
        gold = row["ground_truth"].rpartition("A:")[2].strip()
        prompt = Prompt(id="g", text=row["question"], reference=gold)
        for solution in (value for value in row.values() if isinstance(value, dict)):
            agree += grade.judge(prompt, solution["solution"]) == float(solution["is_correct"])
            total += 1
    assert (agree, total) == (5276, 5276)


def test_bad_options_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"places must be one or more of .*'last_number'.*got \('end',\)"):
        Numeric(places=("end",))
    with pytest.raises(ValueError, match=r"tolerance must be >= 0"):
        Numeric(tolerance=-1.0)


def test_a_format_matches_whole_or_anywhere(score: Score) -> None:
    whole = Format(pattern=r".*</think>\s*<answer>.*</answer>")
    texts = ["two\nlines</think> <answer>4</answer>\n", "</think><answer>4</answer> more", "<answer>4</answer>", ""]
    assert score(whole, texts).parts["format"].tolist() == [1, 0, 0, 0]
    assert score(Format(pattern=r"<answer>", whole=False), texts).parts["format"].tolist() == [1, 1, 1, 0]


def test_a_bad_pattern_is_an_error_at_construction() -> None:
    with pytest.raises(ValueError, match=r"Format.pattern='\(' is no regular expression"):
        Format(pattern="(")
