"""The shared parts of the two HTTP routes: errors in OpenAI's shape, event streams, and retries that get the first answer."""

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from aiohttp import web

from jaxrl_llm.agents.service import Overloaded
from jaxrl_llm.agents.session import Call, Ended, TooLong
from jaxrl_llm.experience import Completion

_log = logging.getLogger(__name__)
_KEPT = 64  # answers of a session that a retry may still ask for


class BadRequest(ValueError):
    """Raised for an invalid request.

    Attributes:
      param: name of the wrong field.
      code: code of the error, or None.
      status: HTTP status of the answer.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def failure(error: BaseException) -> web.Response:
    """Returns the answer to a failed request, in OpenAI's shape; logs errors that are not the request's fault."""
    if isinstance(error, BadRequest):
        return _error(error.status, str(error), param=error.param, code=error.code)
    if isinstance(error, Ended):  # clients would retry 409 and 429
        return _error(403, str(error), kind="session_ended", code=error.limit, headers={"x-should-retry": "false"})
    if isinstance(error, Overloaded):
        return _error(429, str(error), kind="rate_limit_error", headers={"Retry-After": "1"})
    if isinstance(error, TooLong):
        return _error(400, str(error), code="context_length_exceeded")
    if isinstance(error, ValueError):
        return _error(400, str(error))
    if isinstance(error, web.HTTPException):
        return _error(error.status, error.text or error.reason, headers={"x-should-retry": "false"})
    _log.error("a call of an agent failed", exc_info=error)
    return _error(503, f"{type(error).__name__}: {error}", kind="server_error", headers={"Retry-After": "1"})


def _error(
    status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> web.Response:  # fmt: skip
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return web.json_response(body, status=status, headers=headers)


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Returns the token counts of a request, in OpenAI's form."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def spans(completion: Completion) -> list[dict[str, Any]]:
    """Returns the versions of a completion's tokens in vLLM's form: [{version: str, start, end}]."""
    found: list[dict[str, Any]] = []
    for place, version in enumerate(completion.versions.tolist()):
        if found and found[-1]["version"] == str(version):
            found[-1]["end"] = place + 1
        else:
            found.append({"version": str(version), "start": place, "end": place + 1})
    return found


async def events(
    request: web.Request, work: Awaitable[Iterable[Mapping[str, Any]]], silence_s: float
) -> web.StreamResponse:
    """Answers with a stream of server-sent events once `work` returns them; until then a comment each `silence_s` keeps it open.

    A failure before the first comment becomes an answer with its own status, a later one an event.
    """
    task = asyncio.ensure_future(work)
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        while not (await asyncio.wait({task}, timeout=silence_s))[0]:
            if not stream.prepared:
                await stream.prepare(request)
            await stream.write(b": waits\n\n")
        try:
            said: Iterable[Mapping[str, Any]] = task.result()
        except Exception as error:
            answer = failure(error)
            if not stream.prepared:
                return answer
            said = [json.loads(answer.text or "{}")]
        if not stream.prepared:
            await stream.prepare(request)
        for event in said:
            await stream.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await stream.write(b"data: [DONE]\n\n")
    finally:
        task.cancel()
    return stream


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A finished answer, as JSON, with the calls that it consists of."""

    text: str
    calls: tuple[Call, ...]

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON object; it is kept as text, since thousands of kept objects slow Python's garbage collection."""
        found: dict[str, Any] = json.loads(self.text)
        return found


A = TypeVar("A")


@dataclass(eq=False, kw_only=True)
class _Entry(Generic[A]):
    task: asyncio.Task[A] | None  # None once there is an answer: a task keeps much else alive
    answer: A | None = None
    waiting: int = 0
    read: bool = False
    dropped: bool = False


@dataclass(eq=False, kw_only=True)
class Once(Generic[A]):
    """The requests of one session by their content: a retry gets the first answer, or waits for it.

    A client that goes away ends the work, unless a retry takes it over within `grace_s`.

    Attributes:
      drop: undoes an answer that nobody has read.
      restore: restores it, where a retry reads it after all.
      grace_s: seconds that the work goes on without a client.
      retried: called for each request that gets an earlier answer.
    """

    drop: Callable[[A], None]
    restore: Callable[[A], None]
    retried: Callable[[], None]
    grace_s: float
    _entries: OrderedDict[tuple[str, bytes], _Entry[A]] = field(default_factory=OrderedDict, init=False)

    async def get(self, key: tuple[str, bytes], again: bool, work: Callable[[], Awaitable[A]]) -> A:
        """Returns the result of `work`, or that of an equal earlier request.

        Args:
          key: identifies the request: a client's own key, or "", and a digest of the body.
          again: whether the request may be a retry.
          work: begins the work.
        """
        entry = self._entries.get(key) if again else None
        if entry is None or _failed(entry.task):
            task = asyncio.ensure_future(_awaited(work))
            entry = self._entries[key] = _Entry(task=task)
            task.add_done_callback(lambda task, entry=entry: self._done(entry, task))  # type: ignore[misc]
            self._entries.move_to_end(key)
            self._forget()
        else:
            self.retried()
        entry.waiting += 1
        try:
            result = cast(A, entry.answer) if entry.task is None else await asyncio.shield(entry.task)
            entry.read = True
            if entry.dropped:
                entry.dropped = False
                self.restore(result)
            return result
        finally:
            entry.waiting -= 1
            if not entry.waiting and entry.task is not None and not entry.task.done():
                asyncio.get_running_loop().call_later(self.grace_s, self._abandon, entry)

    def _done(self, entry: _Entry[A], task: asyncio.Task[A]) -> None:
        """Undoes an answer whose clients have gone; retrieves the error of failed work, so that asyncio does not report it."""
        if _failed(task):
            return
        answer = task.result()
        entry.task, entry.answer = None, answer
        if not entry.waiting and not entry.read and not entry.dropped:
            entry.dropped = True
            self.drop(answer)

    def _abandon(self, entry: _Entry[A]) -> None:
        if not entry.waiting and entry.task is not None:
            entry.task.cancel()

    def _forget(self) -> None:
        while len(self._entries) > _KEPT:
            oldest = next(iter(self._entries))
            if (task := self._entries[oldest].task) is not None and not task.done():
                return
            del self._entries[oldest]


def _failed(task: asyncio.Task[Any] | None) -> bool:
    return task is not None and task.done() and (task.cancelled() or task.exception() is not None)


async def _awaited(work: Callable[[], Awaitable[A]]) -> A:
    return await work()
