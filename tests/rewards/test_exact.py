"""Exact match and plain functions as rewards: values on cases, and failures that are invalid rather than 0."""

import logging
from collections.abc import Callable

import pytest

from jaxrl_llm.experience import Prompt, Scores
from jaxrl_llm.protocols import Reward
from jaxrl_llm.rewards.exact import Exact
from jaxrl_llm.rewards.wrap import Wrap

Score = Callable[..., Scores]


def test_exact_match_ignores_white_space_around_the_answer_alone(score: Score) -> None:
    scores = score(Exact(), ["132", " 132\n", "1 32", "0132", "", "132."], "132")
    assert scores.parts["exact"].tolist() == [1, 1, 0, 0, 0, 0]
    assert scores.valid["exact"].all()


def test_exact_match_reads_up_to_its_end_string(score: Score) -> None:
    assert score(Exact(end=";"), ["132;7", "132", ";132"], "132").parts["exact"].tolist() == [1, 1, 0]


def test_exact_match_may_ignore_case(score: Score) -> None:
    assert score(Exact(ignore_case=True), ["yes", "YES"], "Yes").parts["exact"].tolist() == [1, 1]
    assert score(Exact(), ["yes", "Yes"], "Yes").parts["exact"].tolist() == [0, 1]


def test_a_prompt_without_reference_is_invalid_not_wrong(score: Score) -> None:
    scores = score(Exact(), ["", "132"], reference=" ")
    assert not scores.valid["exact"].any()


def length(prompt: Prompt, text: str) -> float:
    return len(text) / len(prompt.reference)


def inverse(prompt: Prompt, text: str) -> float:
    return float("nan") if text == "nan" else 1 / len(text)


def test_a_plain_function_is_a_reward_under_its_own_name(score: Score) -> None:
    scores = score(Wrap(function=length), ["132", "132132", ""], "132")
    assert scores.parts["length"].tolist() == [1.0, 2.0, 0.0]
    assert isinstance(Wrap(function=length), Reward) and Wrap(function=length).needs_stats is False
    assert set(score(Wrap(function=length, name="size"), [""], "132").parts) == {"size"}


def test_an_exception_or_a_nan_is_invalid_and_leaves_the_others(score: Score, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        scores = score(Wrap(function=inverse), ["ab", "", "nan", "abcd"])
    assert scores.valid["inverse"].tolist() == [True, False, False, True]
    assert scores.parts["inverse"].tolist() == [0.5, 0.0, 0.0, 0.25]
    assert "'inverse' failed on 1 of 4 responses" in caplog.text and "ZeroDivisionError: " in caplog.text
