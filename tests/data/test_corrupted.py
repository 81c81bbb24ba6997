"""Procedural preferences: the right answer and a wrong one of the same length, or one of the two with a label."""

import json
from pathlib import Path

import pytest

from jaxrl_llm.data.corrupted import Corrupted
from jaxrl_llm.data.sft import Demonstrations
from jaxrl_llm.data.sorting import Sorting

TASK = Sorting(size=400, min_length=6, max_length=8)


def test_a_pair_prefers_the_reference_to_a_wrong_answer_of_its_length() -> None:
    rows = Corrupted(source=TASK, alphabet="abcdefghij", share=0.1).rows()
    assert [r.response for r in rows] == [r.reference for r in TASK.rows()]
    wrong = [sum(a != b for a, b in zip(r.reference, r.extra["rejected"], strict=True)) for r in rows]
    assert min(wrong) == 1
    # Binomial errors at 0.1 a character, 7 characters on average, given that there is one: 0.7 / (1 - 0.9^7) = 1.34.
    assert sum(wrong) / len(wrong) == pytest.approx(1.34, abs=0.1)
    assert rows == Corrupted(source=TASK, alphabet="abcdefghij", share=0.1).rows()


def test_labelled_responses_are_right_and_wrong_in_turn() -> None:
    rows = Corrupted(source=TASK, alphabet="abcdefghij", paired=False).rows()
    assert [r.extra["desirable"] for r in rows[:4]] == [True, False, True, False]
    assert all((r.response == r.reference) == r.extra["desirable"] and "rejected" not in r.extra for r in rows)


def test_a_reference_that_cannot_be_corrupted_is_named() -> None:
    with pytest.raises(ValueError, match=r"row 'sorting/train/0'.*corrupted.Corrupted.alphabet='xyz'"):
        Corrupted(source=TASK, alphabet="xyz").rows()
    with pytest.raises(ValueError, match=r"corrupted.Corrupted.share must be in \(0, 1\]"):
        Corrupted(source=TASK, alphabet="ab", share=0)


def test_a_file_of_labelled_responses_is_read_and_another_label_named(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1?", "completion": "2", "label": True}, {"prompt": "1+1?", "completion": "3", "label": 0}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Demonstrations(path=str(file), response="completion", label="label")
    assert [(r.response, dict(r.extra)) for r in source.rows()] == [
        ("2", {"desirable": True}),
        ("3", {"desirable": False}),
    ]
    file.write_text(json.dumps({**rows[0], "label": "good"}) + "\n")
    with pytest.raises(ValueError, match=r"rows.jsonl.*1.*column 'label' must be true or false \(got 'good'\)"):
        source.rows()
