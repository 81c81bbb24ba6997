"""Open prompts are disjoint by the share of their hash, and their demonstrations follow the stated chain."""

import pytest

from jaxrl_llm.data.open_letters import OpenLetters
from jaxrl_llm.data.several_sources import SeveralSources
from jaxrl_llm.data.sorting import Sorting


def test_disjoint_shares_hold_disjoint_prompts_whatever_the_seed() -> None:
    parts = [
        OpenLetters(first_share=a, last_share=b, size=300, seed=s)
        for a, b, s in ((0, 0.4, 0), (0.4, 0.7, 1), (0.7, 1, 2))
    ]
    texts = [{row.text for row in part.rows()} for part in parts]
    assert [len(t) for t in texts] == [300, 300, 300]
    assert not texts[0] & texts[1] and not texts[1] & texts[2] and not texts[0] & texts[2]
    again = OpenLetters(last_share=0.4, size=300).rows()
    assert [row.text for row in again] == [row.text for row in parts[0].rows()]


def test_a_letter_stays_as_often_as_its_place_in_the_alphabet_says() -> None:
    rows = OpenLetters(alphabet="ab", length=14, answer_length=12, size=800, stays=(0.9, 0.1)).rows()
    pairs = [(x, y) for row in rows for x, y in zip(row.response or "", (row.response or "")[1:])]
    for letter, stays in (("a", 0.9), ("b", 0.1)):
        after = [y for x, y in pairs if x == letter]
        share = sum(y == letter for y in after) / len(after)
        assert share == pytest.approx(stays + (1 - stays) / 2, abs=0.03)  # what does not stay is any of the two letters
    assert all(len(row.response or "") == 12 and row.source == "open_letters" for row in rows)


def test_several_sources_are_one_after_another() -> None:
    parts = (OpenLetters(size=3), Sorting(size=2))
    assert [row.source for row in SeveralSources(parts=parts).rows()] == ["open_letters"] * 3 + ["sorting"] * 2
    with pytest.raises(ValueError, match="at least one dataset"):
        SeveralSources(parts=())


@pytest.mark.parametrize("fields", [
    {"first_share": 0.5, "last_share": 0.5}, {"size": 0}, {"stays": (0.5, 1.5)}, {"length": 2, "size": 60},
])  # fmt: skip
def test_options_that_make_no_sense_are_refused(fields: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match="OpenLetters"):
        OpenLetters(**fields)
