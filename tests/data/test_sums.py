"""Generated sums: right answers, disjoint splits, the asked share of wrong demonstrations, varied held-out answers."""

import pytest

from jaxrl_llm.data.sums import Sums


def evaluated(text: str) -> int:
    return int(eval(text.rstrip("=")))  # Python's own arithmetic on the text


def test_references_are_the_value_of_the_text() -> None:
    for operators in ("+", "-", "*", "+-*"):
        rows = Sums(operators=operators, high=30, size=200).rows()
        assert all(int(row.reference) == evaluated(row.text or "") == int(row.response or "") for row in rows)
        assert {c for row in rows for c in row.text or "" if c in "+-*"} == set(operators)


def test_reversed_answers_are_written_last_digit_first() -> None:
    rows = Sums(reversed_answer=True, size=100).rows()
    assert all(int(row.reference[::-1]) == evaluated(row.text or "") for row in rows)


def test_splits_share_no_text_nor_its_mirror_image() -> None:
    train = {row.text for row in Sums(size=None).rows()}
    heldout = {row.text for row in Sums(split="heldout").rows()}
    assert len(train) + len(heldout) == 100 * 100 and not train & heldout
    mirrored = {"+".join(reversed((text or "").rstrip("=").split("+"))) + "=" for text in heldout}
    assert not train & mirrored
    assert 0.08 < len(heldout) / 10_000 < 0.12


def test_the_split_does_not_depend_on_seed_or_size() -> None:
    heldout = {row.text for row in Sums(split="heldout").rows()}
    assert not heldout & {row.text for row in Sums(size=5000, seed=7).rows()}
    assert {row.text for row in Sums(split="heldout", size=500, seed=9).rows()} <= heldout


def test_the_held_out_set_is_large_and_its_answers_vary() -> None:
    rows = Sums(split="heldout", size=512).rows()
    assert len({row.text for row in rows}) == 512
    assert len({row.reference for row in rows}) >= 100


def test_noise_is_the_share_of_wrong_digits_and_leaves_references_right() -> None:
    rows = Sums(size=8000, noise=0.3).rows()
    pairs = [(a, b) for row in rows for a, b in zip(row.reference, row.response or "", strict=True)]
    assert abs(sum(a != b for a, b in pairs) / len(pairs) - 0.3) < 0.015  # 5 standard errors of 20,000 digits
    assert all(int(row.reference) == evaluated(row.text or "") for row in rows)
    assert rows == Sums(size=8000, noise=0.3).rows()


def test_repeated_problems_carry_fresh_noise() -> None:
    rows = Sums(size=2000, high=9, noise=0.5).rows()
    responses: dict[str | None, set[str | None]] = {}
    for row in rows:
        responses.setdefault(row.text, set()).add(row.response)
    assert len({row.id for row in rows}) == 2000 and len(responses) <= 100
    assert min(len(found) for found in responses.values()) > 3


def test_large_operand_ranges_are_drawn_from_and_never_repeat() -> None:
    rows = Sums(high=10**6, size=300, split="heldout").rows()
    assert len({row.text for row in rows}) == 300
    with pytest.raises(ValueError, match=r"too large to list.*set `size`"):
        Sums(high=10**6).rows()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": 5, "high": 4}, "0 <= low <= high"),
        ({"operators": "/"}, r"one or more of '\+-\*' \(got '/'\)"),
        ({"heldout_share": 1.0}, r"heldout_share must be in \(0, 1\)"),
        ({"noise": 1.5}, r"noise must be in \[0, 1\]"),
        ({"size": 0}, "size must be >= 1"),
    ],
)
def test_bad_options_say_what_is_allowed(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sums(**options)  # type: ignore[arg-type]
