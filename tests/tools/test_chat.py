"""The chat goes on after what it cannot read."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.data.tokenizer import CharTokenizer
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.tools import chat


class Echo:
    """A sampler that answers with the prompt."""

    def start(self, *_: Any, **__: Any) -> "Echo":
        return self

    async def publish(self, *_: Any) -> None: ...

    async def close(self) -> None: ...

    async def sample(self, prefixes: Any, *_: Any) -> Any:
        yield 0, (SimpleNamespace(tokens=prefixes[0]),)


def test_a_character_outside_the_alphabet_is_an_error_in_one_line_and_the_talk_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: Iterator[str | None] = iter(["ab", "a?é", "ba", None])
    policy = SimpleNamespace(architecture=SimpleNamespace(max_positions=64))
    monkeypatch.setattr(chat, "load", lambda folder: (policy, {}, CharTokenizer(alphabet="ab").load()))
    monkeypatch.setattr(chat, "EmbeddedSampler", lambda **_: Echo())
    monkeypatch.setattr(chat, "_line", lambda: next(lines))
    asyncio.run(chat.talk(Path("folder"), SamplingParams(max_tokens=4), 64))
    shown = capsys.readouterr()
    assert shown.out.split() == ["ab", "ba"]
    assert shown.err == "error: the tokenizer cannot encode 'a?é' (it has no token for '?', 'é')\n"


def test_an_answer_leaves_no_task_behind_in_a_loop_that_goes_on() -> None:
    with asyncio.Runner() as runner:
        tokens = runner.run(chat.answer(Echo(), np.array([3, 4]), SamplingParams(max_tokens=4), 0))
        assert tokens.tolist() == [3, 4]
        assert not asyncio.all_tasks(runner.get_loop())
