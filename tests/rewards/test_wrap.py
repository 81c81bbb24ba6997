"""What the log says of rewards that fail: each kind once with its traceback, prompt and response, each group in one line."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from jaxrl_llm.experience import Prompt, Rollout, Scores
from jaxrl_llm.rewards import wrap
from jaxrl_llm.rewards.maths import Maths
from jaxrl_llm.rewards.weighted import Weighted
from jaxrl_llm.rewards.wrap import Failed, Wrap, judge_together, none_judged

Score = Callable[..., Scores]


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log of a process in which no reward has failed yet."""
    monkeypatch.setattr(wrap, "_failures", type(wrap._failures)())
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm"):
        yield caplog


def picky(prompt: Prompt, text: str) -> float:
    if text.startswith("silent"):
        raise RuntimeError
    return float({"one": 1}[text])


def whole(log: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The records with a traceback."""
    return [record for record in log.records if record.exc_info]


def test_the_first_failure_of_a_kind_is_whole_and_later_ones_are_counted(
    score: Score, log: pytest.LogCaptureFixture
) -> None:
    score(Wrap(function=picky), ["one", "two", "three"])
    (first,) = whole(log)
    assert "'picky' raised its first KeyError, on prompt 'p', response 'two'" in first.getMessage()
    assert 'return float({"one": 1}[text])' in log.text and "KeyError: 'two'" in log.text
    assert "'picky' failed on 2 of 3 responses (failure 2 of this process); first: KeyError: 'two'" in log.text
    log.clear()
    score(Wrap(function=picky), ["four"])
    assert not whole(log)
    assert "'picky' failed on 1 of 1 responses (failure 3 of this process); first: KeyError: 'four'" in log.text
    score(Wrap(function=picky, name="other"), ["four"])
    assert ["other" in record.getMessage() for record in whole(log)] == [True]


def test_an_exception_without_a_message_is_told_by_its_place(score: Score, log: pytest.LogCaptureFixture) -> None:
    long = "silent" + "a" * 1000 + "end"
    score(Wrap(function=picky), ["two", long])
    assert [record.getMessage().split()[5] for record in whole(log)] == ["KeyError,", "RuntimeError,"]
    assert "response 'silent" + "a" * 194 + " ... " + "a" * 97 + "end'" in log.text
    log.clear()
    score(Wrap(function=picky), [long])
    line = picky.__code__.co_firstlineno + 2
    assert f"first: RuntimeError (test_wrap.py:{line})" in log.text and not whole(log)


def test_judgements_at_the_same_time_name_their_own_rollout(score: Score, log: pytest.LogCaptureFixture) -> None:
    async def judgement(text: str) -> float:
        if text == "bad":
            raise Failed("the judge said nothing") from ValueError("no rating in 'Hm.'")
        return 1.0

    class Reward:
        async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
            return await judge_together("both", [judgement(r.text) for r in rollouts], rollouts)

    scores = score(Reward(), ["good", "bad"])
    assert scores.valid["both"].tolist() == [True, False]
    assert "on prompt 'p', response 'bad'" in whole(log)[0].getMessage()
    assert "ValueError: no rating in 'Hm.'" in log.text and "Failed: the judge said nothing" in log.text
    log.clear()
    assert asyncio.run(judge_together("unknown", [judgement("bad")])).valid["unknown"].tolist() == [False]
    assert "'unknown' raised its first Failed, on a response;" in whole(log)[0].getMessage()


def test_a_group_that_fails_as_a_whole_is_one_failure(log: pytest.LogCaptureFixture) -> None:
    for message in ("no server", "no server yet"):
        assert none_judged("all", [], Failed(message)).parts["all"].shape == (0,)
    assert len(whole(log)) == 1
    assert "'all' failed on a whole group of 0 (failure 2 of this process); first: " in log.text
    assert "Failed: no server yet" in log.text


class Slow:
    needs_stats: ClassVar[bool] = False

    async def score(self, rollouts: Sequence[Rollout], stats: Any = None) -> Scores:
        await asyncio.sleep(60)
        raise AssertionError


class Broken(Slow):
    async def score(self, rollouts: Sequence[Rollout], stats: Any = None) -> Scores:
        raise TimeoutError


def test_a_part_that_is_late_says_which_limit_it_passed(score: Score, log: pytest.LogCaptureFixture) -> None:
    scores = score(Weighted(parts={"slow": Slow(), "broken": Broken()}, limit_s=0.1), ["a", "b"])
    assert not scores.valid["slow"].any() and not scores.valid["broken"].any()
    assert "'slow' failed on a whole group of 2 (failure 1 of this process); first: " in log.text
    assert "Failed: no scores within 0.1 s (Weighted.limit_s)" in log.text
    assert "'broken' raised its first TimeoutError, on prompt 'p', response 'a'" in log.text


def test_a_verifiers_process_names_the_response_that_it_failed_on(score: Score, log: pytest.LogCaptureFixture) -> None:
    reward = Maths(workers=1, limit_s=20.0)
    try:
        score(reward, [r"\boxed{5}"], "")
    finally:
        reward.close()
    assert "'maths' raised its first Failed, on prompt 'p', response '\\\\boxed{5}'" in log.text
    assert "ValueError: the reference '' is no expression" in log.text
