"""HTTP client of the services that rewards call: JSON, several servers, time limits, retries with back-off.

The retry loop is written out: each attempt asks another server and may wait as long as the last one's Retry-After asks, and
tenacity would replace only the line that computes the delay.
"""

import asyncio
import json
import os
import random
import socket
import urllib.request
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from jaxrl_llm import components
from jaxrl_llm.protocols import Down
from jaxrl_llm.rewards.wrap import Failed

T = TypeVar("T")

MOST_BYTES = 64 * 2**20  # limit on the size of an answer
# Statuses for which a retry may help; any other status but 200 is the caller's mistake.
PASSING = frozenset({408, 425, 429})


@dataclass(frozen=True, kw_only=True)
class Service:
    """Servers that answer the same calls.

    Attributes:
      urls: addresses such as "http://127.0.0.1:8000"; calls go to them in turn, and a retry asks the next one.
      token_env: environment variable that holds the bearer token; empty sends none.
      limit_s: time limit of one attempt in seconds.
      tries: number of attempts of a call.
      backoff_s: largest number of seconds before the second attempt; doubles with each further one, and a random part of up to half is cut off.
      concurrency: largest number of calls at the same time.
      stop_after: number of consecutive calls whose attempts all failed before the run is stopped; 0 never stops it.
    """

    urls: Sequence[str]
    token_env: str = ""
    limit_s: float = 60.0
    tries: int = 3
    backoff_s: float = 1.0
    concurrency: int = 64
    stop_after: int = 64
    _state: "_State" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        bad = [url for url in self.urls if not url.startswith(("http://", "https://"))]
        if isinstance(self.urls, str) or not self.urls or bad:
            raise ValueError(
                f"Service.urls must be a sequence of addresses that begin with http:// or https:// (got {self.urls!r})"
            )
        components.above(self, 0, "limit_s", "tries", "concurrency")
        components.at_least(self, 0, "backoff_s", "stop_after")
        object.__setattr__(self, "_state", _State())

    async def post(self, path: str, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        """Sends `body` and returns `read(answer)` of the JSON answer.

        Args:
          path: path from the server's root, such as "/score".
          read: reads the answer; raises ValueError, KeyError, TypeError or IndexError for one that is not as it should be.

        Raises:
          Failed: no attempt gave an answer that `read` accepts, or the server refused the call.
          Down: the last `stop_after` calls failed in this way.
        """
        async with self._state.turns(self.concurrency):
            try:
                answer = await self._tried(path, body, read)
            except Failed as failure:
                self._state.failures += 1
                if self.stop_after and self._state.failures >= self.stop_after:
                    raise Down(
                        f"the last {self._state.failures} calls failed; last: {failure}. Start the server, look at "
                        "its answers where it gave some, set service.Service.urls, or let the run go on without it by service.Service.stop_after = 0"
                    ) from failure
                raise
            self._state.failures = 0
            return answer

    async def _tried(self, path: str, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        limit = aiohttp.ClientTimeout(total=self.limit_s)
        # Each call has its own session: a shared one would belong to an event loop that may have ended.
        async with aiohttp.ClientSession(timeout=limit, headers=self._headers()) as session:
            for attempt in range(self.tries):
                url = self._state.next(self.urls) + path
                try:
                    return read(await _answer(session, url, body))
                except _Again as error:
                    problem, wait = str(error), error.wait_s
                except TimeoutError:
                    problem, wait = f"no answer within {self.limit_s:g} s (service.Service.limit_s)", 0.0
                except (aiohttp.ClientError, OSError) as error:
                    problem, wait = f"{type(error).__name__}: {error}", 0.0
                except (ValueError, KeyError, TypeError, IndexError) as error:
                    problem, wait = f"an answer that cannot be used: {error!r}", 0.0
                if attempt + 1 < self.tries:
                    delay = self.backoff_s * 2**attempt * (1 + random.random()) / 2
                    await asyncio.sleep(max(delay, min(wait, self.limit_s)))
        raise Failed(f"{url}: {problem} ({self.tries} attempts)")

    def health(self, url: str, limit_s: float = 3.0) -> dict[str, Any]:
        """Returns what the server at `url` reports of itself at /health; {} where it does not answer in time with a JSON object."""
        ask = urllib.request.Request(url.rstrip("/") + "/health", headers=self._headers())
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as the calls themselves
        try:
            with direct.open(ask, timeout=limit_s) as answer:
                found = json.loads(answer.read(MOST_BYTES))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _headers(self) -> dict[str, str]:
        # Servers with several clients serve them in turn.
        who = {"X-Client": f"{socket.gethostname()}:{os.getpid()}"}
        if not self.token_env:
            return who
        token = os.environ.get(self.token_env)
        if not token:
            raise Down(f"Service.token_env: the environment variable {self.token_env} is not set")
        return {**who, "Authorization": f"Bearer {token}"}


async def _answer(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Any:
    """Returns the JSON of a 200; raises _Again where a retry may help, and Failed where it cannot."""
    async with session.post(url, json=body) as response:
        text = await _text(response)
        if response.status == 200:
            return json.loads(text)
        problem = f"{response.status} {response.reason}: {text[:200]}"
        if response.status in PASSING or response.status >= 500:
            asked = response.headers.get("Retry-After", "")
            raise _Again(problem, float(asked) if asked.isdigit() else 0.0)
        raise Failed(f"{url}: {problem}")


async def _text(response: aiohttp.ClientResponse) -> str:
    """Returns the body; raises ValueError for one above the size limit, so that a server cannot fill this process's memory."""
    found = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        found += chunk
        if len(found) > MOST_BYTES:
            raise ValueError(f"an answer of more than {MOST_BYTES} bytes")
    return found.decode(errors="replace")


class _Again(Exception):
    """Raised for an answer that a retry after `wait_s` seconds may improve."""

    def __init__(self, problem: str, wait_s: float) -> None:
        super().__init__(problem)
        self.wait_s = wait_s


class _State:
    """State shared by all calls: the next server, the number of consecutive failures, and a semaphore for each event loop."""

    def __init__(self) -> None:
        self.calls = 0
        self.failures = 0
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def turns(self, concurrency: int) -> asyncio.Semaphore:
        return self._turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(concurrency))

    def next(self, urls: Sequence[str]) -> str:
        self.calls += 1
        return urls[(self.calls - 1) % len(urls)].rstrip("/")
