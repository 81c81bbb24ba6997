"""Endpoints that answer a judge's question: any server of OpenAI's chat completions, or offline stand-ins."""

import asyncio
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxrl_llm.rewards.service import Service

Messages = Sequence[Mapping[str, str]]


@runtime_checkable
class Endpoint(Protocol):
    """An endpoint, which answers messages."""

    async def reply(self, messages: Messages, judged: str, read: Callable[[str], float]) -> float:
        """Returns `read(answer)` of the answer to `messages`, which ask about `judged`; raises wrap.Failed.

        `read` raises ValueError for an answer that it cannot read.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ChatEndpoint:
    """Asks a server of POST /v1/chat/completions.

    Attributes:
      service: the server's address without "/v1"; its retries, limits and back-off.
      model: the model's name on the server.
      temperature: sampling temperature; 0 for the likeliest answer.
      max_tokens: largest number of tokens of an answer.
      extra: further fields of the request's body.
      cache: folder that keeps readable answers, by a hash of the whole question; empty keeps none.
    """

    service: Service
    model: str
    temperature: float = 0.0
    max_tokens: int = 1024
    extra: Mapping[str, Any] | None = None
    cache: str = field(default="", repr=False)

    async def reply(self, messages: Messages, judged: str, read: Callable[[str], float]) -> float:
        """Returns `read(answer)`, from the cache where possible; the server is asked again for an answer that cannot be read."""
        del judged
        body = {
            "model": self.model,
            "messages": [dict(message) for message in messages],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            **(self.extra or {}),
        }
        kept = Kept(Path(self.cache)) if self.cache else None
        if kept is not None and (text := await asyncio.to_thread(kept.get, body)) is not None:
            return read(text)

        def readable(answer: Any) -> str:
            text = answer["choices"][0]["message"]["content"]
            if not isinstance(text, str):
                raise ValueError(f"an answer without text: {text!r}")
            read(text)
            return text

        text = await self.service.post("/v1/chat/completions", body, readable)
        if kept is not None:
            await asyncio.to_thread(kept.put, body, text)
        return read(text)


@dataclass(frozen=True, kw_only=True)
class Lexicon:
    """Rates texts deterministically by the words they contain: a stand-in for a judge in demonstrations and tests.

    Its answer has the two lines of a rating judge, "RATING: n" and "EXPLANATION: ...", with
    n = min(1 + number of listed words, 10), repeats counted.

    Attributes:
      words: the listed words; letter case is ignored.
    """

    words: Sequence[str] = ("great", "excellent", "wonderful", "absolutely", "right", "agree")

    async def reply(self, messages: Messages, judged: str, read: Callable[[str], float]) -> float:
        """Returns `read(rating)`."""
        del messages
        listed = {word.lower() for word in self.words}
        found = [word for word in re.findall(r"\w+", judged.lower()) if word in listed]
        return read(f"RATING: {min(1 + len(found), 10)}\nEXPLANATION: listed words: {', '.join(found) or 'none'}")


@dataclass(frozen=True, kw_only=True)
class Mentions:
    """Answers "1" where the judged text contains the first line of the question, else "0": a stand-in for a judge or a monitor.

    With the template "{hinted}\\n{judged}" and the parser "binary" it decides whether an output, or a thought, names the
    hinted choice.
    """

    async def reply(self, messages: Messages, judged: str, read: Callable[[str], float]) -> float:
        """Returns `read(answer)`."""
        line = messages[-1]["content"].partition("\n")[0]
        return read(str(int(line in judged)))


class Kept:
    """A cache of answers on disk: one file each, named by the question's hash; several processes may write at the same time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, body: Mapping[str, Any]) -> str | None:
        """Returns the answer to `body`; None where there is none or its file is damaged."""
        try:
            kept = json.loads(self._file(body).read_text())
        except (OSError, ValueError):
            return None
        return kept["answer"] if isinstance(kept, dict) and isinstance(kept.get("answer"), str) else None

    def put(self, body: Mapping[str, Any], answer: str) -> None:
        """Stores the answer to `body`."""
        file = self._file(body)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as part:
            json.dump({"question": body, "answer": answer}, part)
        os.replace(part.name, file)

    def _file(self, body: Mapping[str, Any]) -> Path:
        name = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        return self.folder / name[:2] / f"{name}.json"
