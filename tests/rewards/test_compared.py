"""Judges of two texts: DARLING's partition by a language model, AlpacaEval's win rate; and the harmless objective of words."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.experience import Scores
from jaxrl_llm.rewards.judged_pairs import JudgedPairs
from jaxrl_llm.rewards.partition import Partition
from jaxrl_llm.rewards.preferred import Preferred, second_is_chosen
from jaxrl_llm.rewards.words import Words
from jaxrl_llm.rewards.wrap import Failed

Score = Callable[..., Scores]


@dataclass(frozen=True, kw_only=True)
class Said:
    """Answers a question by a function of it; it keeps the questions."""

    by: Callable[[str], str]
    asked: list[str] = field(default_factory=list, repr=False)

    async def reply(self, messages: Any, judged: str, read: Callable[[str], float]) -> float:
        del judged
        self.asked.append(messages[-1]["content"])
        try:
            return read(self.by(self.asked[-1]))
        except ValueError as error:
            raise Failed(str(error)) from error


def same_first_letter(question: str) -> str:
    first, second = question.split("] ")[1:]
    return "They are alike. [[yes]]" if first[0] == second[0] else "[[no]]"


PLAIN = "Same?\n[1] {first}\n[2] {second}"


def test_yes_is_the_same_class_and_no_is_another() -> None:
    judge = Said(by=same_first_letter)
    pairs = JudgedPairs(endpoint=judge, question=PLAIN)
    assert asyncio.run(pairs.similar([("ab", "ac"), ("ab", "b")])) == [1.0, 0.0]
    texts = ["a one two three four five", "b one two three four five", "a six seven eight nine ten"]
    assert asyncio.run(Partition(pairs=pairs).classes(texts)).tolist() == [0, 1, 0]
    assert judge.asked[0] == "Same?\n[1] ab\n[2] ac"


@pytest.mark.parametrize("name", ["meaning", "strategy"])
def test_the_named_questions_hold_both_texts_and_ask_whether_they_are_the_same(name: str) -> None:
    judge = Said(by=lambda question: "[[no]]")
    assert asyncio.run(JudgedPairs(endpoint=judge, question=name).similar([("{one}", "two {x}")])) == [0.0]
    (question,) = judge.asked
    assert question.index("{one}") < question.index("two {x}") and "yes where they are" in question
    assert "no where they differ" in question


def test_an_answer_without_a_verdict_is_a_failure_and_a_question_without_both_texts_is_refused() -> None:
    with pytest.raises(Failed, match="neither yes nor no"):
        asyncio.run(JudgedPairs(endpoint=Said(by=lambda q: "well"), question=PLAIN).similar([("a", "b")]))
    with pytest.raises(ValueError, match=r"JudgedPairs.question must be a text with \{first\}"):
        JudgedPairs(endpoint=Said(by=str), question="Are {first} and {other} the same?")


def longer(question: str) -> str:
    first, second = question.split("|")[1:]
    return "M" if len(second) > len(first) else "m"


def compared(score: Score, by: Callable[[str], str], texts: Sequence[str], reference: str = "four") -> Scores:
    return score(Preferred(endpoint=Said(by=by), question="{asked}|{first}|{second}"), texts, reference=reference)


def test_a_response_wins_where_it_is_chosen_in_both_orders(score: Score) -> None:
    found = compared(score, longer, ["longer", "abc", ""])
    assert found.parts["preferred"].tolist() == [1.0, 0.0, 0.0] and found.valid["preferred"].all()
    # A judge that always takes the second place, or the first, has decided nothing.
    for answer in ("M", "Answer: m."):
        assert compared(score, lambda q, a=answer: a, ["some"]).parts["preferred"].tolist() == [0.5]


def test_what_cannot_be_compared_is_invalid(score: Score) -> None:
    assert not compared(score, lambda q: "both are fine", ["some"]).valid["preferred"].any()
    assert not compared(score, longer, ["some"], reference=" ").valid["preferred"].any()
    with pytest.raises(ValueError, match=r"Preferred.question must be a text with \{asked\}"):
        Preferred(endpoint=Said(by=str), question="{asked} {first}")


@pytest.mark.parametrize(("text", "value"), [("M", 1.0), ("m", 0.0), ("Not m but M.", 1.0), ("I'm sure: m", 0.0)])
def test_the_last_letter_that_stands_alone_counts(text: str, value: float) -> None:
    assert second_is_chosen(text) == value


@pytest.mark.parametrize("text", ["", "I'm sure", "Mm"])
def test_no_letter_is_no_choice(text: str) -> None:
    with pytest.raises(ValueError, match="neither m nor M"):
        second_is_chosen(text)


def test_words_are_counted_whole_whatever_their_case_and_at_most_to_one() -> None:
    scorer = Words(words=("great", "love"), most=4)
    texts = ["Great! I LOVE it, great", "greatness, loved", "", "love " * 9]
    np.testing.assert_allclose(asyncio.run(scorer.scores(texts)), [3 / 4, 0, 0, 1])
    for fields in ({"words": ()}, {"words": ("two words",)}, {"most": 0}):
        with pytest.raises(ValueError, match=r"words\.Words"):
            Words(**fields)
