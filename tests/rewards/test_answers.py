"""Where answers are found, and the numbers read there."""

from fractions import Fraction

import pytest

from jaxrl_llm.rewards import answers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{5} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ {a}{b} } tail}", " {a}{b} "),
        (r"\boxed{5", None),
        ("5", None),
    ],
)
def test_the_last_box_counts_with_its_braces_balanced(text: str, expected: str | None) -> None:
    assert answers.boxed(text) == expected


def test_a_mark_gives_the_rest_of_its_last_line() -> None:
    assert answers.marked("#### 4\n#### 5 eggs\nmore", "####") == "5 eggs"
    assert answers.marked("no mark", "####") is None
    assert answers.marked("####", "####") == ""


def test_a_tag_needs_its_end_and_the_last_one_counts() -> None:
    assert answers.tagged("<answer>1</answer> <answer>\n2 </answer>") == "2"
    assert answers.tagged("<answer>1") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5, 6 and 7.", Fraction(7)),
        ("costs $1,234.50", Fraction(2469, 2)),
        ("it is -3", Fraction(-3)),
        ("5-3", Fraction(3)),
        (".5", Fraction(1, 2)),
        ("1,23", Fraction(23)),
        ("x2", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, expected: Fraction | None) -> None:
    assert answers.last_number(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("18 dollars", Fraction(18)),
        ("$70,000$", Fraction(70000)),
        ("50\\%", Fraction(50)),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"1\frac{1}{4}", Fraction(5, 4)),
        (r"-2 \frac{1}{3}", Fraction(-7, 3)),
        (r"1\frac{1}{0}", None),
        ("3/4", Fraction(3, 4)),
        ("3/0", None),
        ("18 of 20", None),
        ("none", None),
    ],
)
def test_a_span_names_a_number_if_it_names_one(text: str, expected: Fraction | None) -> None:
    assert answers.only_number(text) == expected
