"""A user's function as a reward: the forms it may have, what it may return, how it is found and how its failures are told."""

import asyncio
import logging
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.data.rows import Rows
from jaxrl_llm.experience import Prompt, Rollout, Scores
from jaxrl_llm.rewards import found_function, wrap
from jaxrl_llm.rewards.function import Function
from jaxrl_llm.rewards.weighted import Weighted
from jaxrl_llm.train import settings

Score = Callable[..., Scores]
COLUMNS = {"answer": "4", "level": 2}


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log of a process in which no reward has failed yet."""
    monkeypatch.setattr(wrap, "_failures", type(wrap._failures)())
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm"):
        yield caplog


def plain(prompt: str, text: str) -> float:
    return len(prompt) + len(text) / 10


def columned(prompt: str, text: str, **columns: Any) -> bool:
    return text == columns["answer"] and sorted(columns) == ["answer", "level", "reference"]


def named(text: str, level: int, answer: str, missing: int = 7) -> int:
    return level * (text == answer) + missing


async def waiting(prompt: str, completion: str, answer: str) -> float | None:
    await asyncio.sleep(0)
    return None if completion == "?" else float(completion == answer)


def trl(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
    assert prompts == ["?"] * 3 and columns["level"] == [2] * 3 and len(columns["completion_ids"]) == 3
    return [None if text == "?" else float(text == gold) for text, gold in zip(completions, answer)]


async def trl_waiting(completions: list[str], **columns: Any) -> np.ndarray:
    return np.array([len(text) for text in completions])


FORMS = {
    plain: ([1.1, 1.1, 1.3], [True] * 3),
    columned: ([1, 0, 0], [True] * 3),
    named: ([9, 7, 7], [True] * 3),
    waiting: ([1, 0, 0], [True, False, True]),
    trl: ([1, 0, 0], [True, False, True]),
    trl_waiting: ([1, 1, 3], [True] * 3),
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_form_of_a_function_scores(form: Any, score: Score) -> None:
    scores = score(Function(function=form), ["4", "?", "abc"], reference="4", extra=COLUMNS)
    values, valid = FORMS[form]
    assert scores.parts[form.__name__].tolist() == pytest.approx(values)
    assert scores.valid[form.__name__].tolist() == valid


def test_the_prompt_is_what_the_row_has() -> None:
    turns = [{"role": "user", "content": "2 + 2 ="}]
    seen: list[Any] = []

    def look(prompts: Any, completions: Any) -> list[float]:
        seen.append((prompts, completions))
        return [0.0]

    for source in ("2 + 2 =", turns):
        (prompt,) = Rows(source=[{"prompt": source}]).rows()
        none = np.zeros(0)
        rollout = Rollout(
            prompt=prompt, tokens=none, sampler_logprobs=none, mask=none, versions=none, finish="stop", text="4"
        )
        asyncio.run(Function(function=look).score([rollout]))
    assert seen == [(["2 + 2 ="], ["4"]), ([turns], [[{"role": "assistant", "content": "4"}]])]


def test_what_is_no_number_is_invalid_and_told_with_its_sample(score: Score, log: pytest.LogCaptureFixture) -> None:
    def odd(prompt: str, text: str) -> Any:
        return {"text": "0.5", "list": [1.0], "scalar": np.float32(0.5), "array": np.ones(1), "nan": float("nan")}[text]

    scores = score(Function(function=odd), ["text", "list", "scalar", "array", "nan", "absent"])
    assert scores.valid["odd"].tolist() == [False, False, True, True, False, False]
    assert scores.parts["odd"][2:4].tolist() == [0.5, 1.0]
    assert "a reward function returns a number, a bool or None (got str '0.5')" in log.text
    whole = [record for record in log.records if record.exc_info]
    assert [re.findall(r"first (\w+), on prompt 'p', response '(\w+)'", r.getMessage()) for r in whole] == [
        [("TypeError", "text")], [("KeyError", "absent")],
    ]  # fmt: skip
    assert '"scalar": np.float32(0.5)' in log.text  # the line of the user's function


def test_a_list_of_another_length_makes_the_group_invalid(score: Score, log: pytest.LogCaptureFixture) -> None:
    def short(completions: list[str]) -> list[float]:
        return [1.0]

    assert score(Function(function=short), ["a", "b"]).valid["short"].tolist() == [False, False]
    assert "returned list of 1 for 2 completions: a list with one number, bool or None for each is wanted" in log.text


def test_a_column_that_a_row_lacks_is_named(score: Score, log: pytest.LogCaptureFixture) -> None:
    def asks(text: str, gold: str) -> float:
        return 1.0

    assert not score(Function(function=asks), ["a"], extra=COLUMNS).valid["asks"].any()
    assert "'asks' asks for the column 'gold', and the row has ['answer', 'level']" in log.text


def test_several_functions_are_weighed(score: Score) -> None:
    both = Weighted(parts={"a": Function(function=plain), "b": Function(function=trl_waiting)}, weights={"b": 0.5})
    scores = score(both, ["four"])
    assert scores.parts["a"].tolist() == [1.4] and scores.parts["b"].tolist() == [4.0]
    assert {name: scores.weights[name] for name in "ab"} == {"a": 1.0, "b": 0.5}


def test_a_function_is_found_in_a_file_and_in_a_module(
    tmp_path: Path, score: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text("BONUS = 2\n")
    (tmp_path / "mine.py").write_text("import beside\n\ndef long(text):\n    return len(text) * beside.BONUS\n")
    scores = score(Function(function=f"{tmp_path}/mine.py:long"), ["abc"])
    assert scores.parts["long"].tolist() == [6]
    monkeypatch.chdir(tmp_path)
    assert score(Function(function="mine.py:long"), ["ab"]).parts["long"].tolist() == [4]
    (tmp_path / "importable.py").write_text("def long(text):\n    return len(text)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert score(Function(function="importable:long"), ["ab"]).parts["long"].tolist() == [2]


WRONG = {
    "none.py:score": r"no file 'none.py' for the reward function \(looked for /",
    "no_such_module:score": r"no module 'no_such_module' for the reward function .*'reward.py:score'",
    "score": r"must be 'path/to/file.py:name', 'package.module:name' or a callable \(got 'score'\)",
    "broken.py:score": r"broken.py:2 cannot be run: ZeroDivisionError: division by zero",
    "unclosed.py:score": r"unclosed.py:1 cannot be run: SyntaxError: '\(' was never closed",
    "good.py:scoer": r"good.py has no 'scoer'; its functions are \['other', 'score'\]",
    "good.py:VALUE": r"good.py:VALUE is no function \(got int\)",
    "good.py:other": r"other\(a, b\) takes no `text`: a reward function takes \(prompt, text\), ",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_function_that_cannot_be_had_is_refused_when_it_is_named(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.py").write_text("VALUE = 1\ndef score(text): return 1\ndef other(a, b): return 1\n")
    (tmp_path / "broken.py").write_text("import math\n1 / 0\n")
    (tmp_path / "unclosed.py").write_text("def score(text:\n")
    with pytest.raises(ValueError, match=WRONG[wrong]):
        Function(function=wrong)
    with pytest.raises(ValueError, match=r"or a callable \(got int 5\)"):
        found_function.load(5)


def test_a_changed_function_is_another_setting_and_a_moved_or_commented_one_is_not(tmp_path: Path) -> None:
    def kept(text: str, folder: str = "a") -> dict[str, str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "mine.py").write_text(text)
        return settings.settings_of(Function(function=f"{tmp_path}/{folder}/mine.py:score"))

    text = "LIMIT = 3\ndef short(text): return len(text) < LIMIT\ndef score(text): return short(text)\n"
    first = kept(text)
    assert kept(text, "b") == first
    assert kept("# A comment.\n" + text.replace("): ", "):\n    ") + "def other(): pass\n") == first
    assert kept(text.replace("= 3", "= 4")) != first
    assert kept(text.replace("<", "<=")) != first


def test_a_callable_and_its_file_are_the_same_setting(tmp_path: Path) -> None:
    here = Function(function=plain)
    assert here.content == Function(function=f"{__file__}:plain").content != Function(function=named).content


def test_a_prompt_of_another_data_source_is_given_as_its_text(score: Score) -> None:
    seen: list[Any] = []

    def look(prompt: Any, text: str, source: str = "none") -> float:
        seen.append((prompt, source))
        return 1.0

    none = np.zeros(0)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    for prompt in (Prompt(id="a", messages=messages[1:]), Prompt(id="b", messages=messages)):
        rollout = Rollout(prompt=prompt, tokens=none, sampler_logprobs=none, mask=none, versions=none, finish="stop")
        asyncio.run(Function(function=look).score([rollout]))
    assert seen == [("hi", "none"), (messages, "none")]


async def score_of(reward: Function, texts: list[str]) -> Scores:
    none, prompt = np.zeros(0), Prompt(id="p", text="?")
    rollouts = [
        Rollout(prompt=prompt, tokens=none, sampler_logprobs=none, mask=none, versions=none, finish="stop", text=text)
        for text in texts
    ]
    return await reward.score(rollouts)


def slow(text: str) -> float:
    time.sleep(0.2)
    return float(text)


def slow_trl(completions: list[str]) -> list[float]:
    time.sleep(0.2)
    return [float(text) for text in completions]


@pytest.mark.parametrize("function", [slow, slow_trl], ids=lambda function: function.__name__)
def test_a_plain_function_that_takes_long_leaves_the_event_loop_to_others(function: Any) -> None:
    """Counted and not timed: while it sleeps, another task has hundreds of turns; in the main thread none."""

    async def turns(reward: Function) -> int:
        ended, count = asyncio.ensure_future(score_of(reward, ["1"])), 0
        await asyncio.sleep(0)
        while not ended.done():
            count += 1
            await asyncio.sleep(0.001)
        assert (await ended).parts[function.__name__].tolist() == [1.0]
        return count

    assert asyncio.run(turns(Function(function=function))) > 10
    assert asyncio.run(turns(Function(function=function, thread=False))) < 3


def test_plain_functions_are_called_one_at_a_time_in_the_order_of_the_rollouts() -> None:
    seen: list[str] = []

    def first(text: str) -> float:
        seen.append(f"begin {text}")
        time.sleep(0.002)
        seen.append(f"end {text}")
        return len(seen)

    def second(completions: list[str]) -> list[float]:
        seen.append(f"both {completions[0]}")
        return [0.0] * len(completions)

    async def groups() -> list[Scores]:
        one, other = Function(function=first), Function(function=second)
        return await asyncio.gather(
            score_of(one, ["a", "b"]), score_of(other, ["x", "y"]), score_of(one, ["c"]), score_of(other, ["z"])
        )

    scores = asyncio.run(groups())
    assert seen == ["begin a", "end a", "begin b", "end b", "both x", "begin c", "end c", "both z"]
    assert [found.parts["first"].tolist() for found in scores[::2]] == [[2, 4], [7]]


def test_a_function_that_sets_a_signal_is_called_in_the_main_thread_where_it_is_told(score: Score, log: Any) -> None:
    def limited(text: str) -> float:
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return 1.0

    assert not score(Function(function=limited), ["a"]).valid["limited"].any()
    assert "main thread" in log.text and "set function.Function.thread=False" in log.text
    assert score(Function(function=limited, thread=False), ["a"]).parts["limited"].tolist() == [1.0]
