"""The learner's side of relays: announces a version to the relay of each sampler host, and waits until the host has it.

Relays are in the order of the fleet's servers, after the one on the learner's host where there is one. A server whose relay fails
stages from where the learner wrote the version.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from jaxrl_llm.publication.relays.version import Announcement

_log = logging.getLogger(__name__)
_POLL_S, _LONGEST_POLL_S = 0.05, 0.5
_ANSWER_S = 10.0


class Useless(Exception):
    """Raised where a relay does not provide a version."""


@dataclass(eq=False, kw_only=True)
class Relays:
    """The relays of a fleet's hosts.

    Attributes:
      port: port on which each listens.
      token: token that they require.
      first: address of the relay on the learner's host; empty for none.
      bypassed: number of relays that others by-passed, or that failed their own host, since the last call of `metrics`.
      seconds: seconds until the last host had the newest version.
      source_bytes: bytes of the newest version that relays read from the learner's publication.
      passed_bytes: bytes of it that they got from one another.
      kept_bytes: bytes of it that they had already, as the version before has them too.
    """

    port: int
    token: str
    first: str = ""
    bypassed: int = 0
    seconds: float = 0.0
    source_bytes: int = 0
    passed_bytes: int = 0
    kept_bytes: int = 0

    def __post_init__(self) -> None:
        self._newest, self._begun = -1, 0.0
        self._seen, self._told = set[tuple[int, str]](), set[str]()

    def of(self, url: str) -> str:
        """Returns the address of the relay on the host of a server."""
        host = urlsplit(url).hostname or ""
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def before(self, relay: str, urls: Sequence[str]) -> list[str]:
        """Returns the relays before a relay of the fleet, the nearest first; `urls` are the fleet's servers."""
        order = list(dict.fromkeys([*filter(None, [self.first.rstrip("/")]), *map(self.of, urls)]))
        place = order.index(relay) if relay in order else len(order)
        return order[:place][::-1]

    async def path(self, url: str, urls: Sequence[str], announced: Announcement) -> str:
        """Returns the folder of a version on the host of the server `url`, once it is complete; `urls` are the fleet's servers.

        Raises:
          Useless: its relay cannot be reached, or cannot get the version.
        """
        relay = self.of(url)
        self._begin(announced.version)
        said = replace(announced, before=tuple(self.before(relay, urls)))
        headers, limit = {"Authorization": f"Bearer {self.token}"}, aiohttp.ClientTimeout(total=_ANSWER_S)
        try:
            async with aiohttp.ClientSession(headers=headers, timeout=limit) as session:
                status = await self._whole(session, relay, said)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as wrong:
            raise Useless(f"{relay} is not reached: {type(wrong).__name__} {wrong}") from wrong
        self._note(relay, said, status)
        return str(status["path"])

    async def _whole(self, session: aiohttp.ClientSession, relay: str, said: Announcement) -> Mapping[str, Any]:
        status, wait_s = await _answer(session.post(f"{relay}/announce", json=said.content())), _POLL_S
        while status["state"] == "fetching":
            await asyncio.sleep(wait_s)
            wait_s = min(1.5 * wait_s, _LONGEST_POLL_S)
            status = await _answer(session.get(f"{relay}/{said.id}"))
        if status["state"] != "whole":
            raise Useless(f"{relay}: {status['error']}")
        return status

    def _begin(self, version: int) -> None:
        if version > self._newest:
            self._newest, self._begun = version, time.perf_counter()
            self.source_bytes = self.passed_bytes = self.kept_bytes = 0

    def _note(self, relay: str, said: Announcement, status: Mapping[str, Any]) -> None:
        """Counts a relay's status of a version once, even where several servers of its host ask."""
        if said.version != self._newest or (said.version, relay) in self._seen:
            return
        self._seen = {(version, one) for version, one in self._seen if version == said.version} | {
            (said.version, relay)
        }
        self.seconds = time.perf_counter() - self._begun
        source = int(status["bytes"].get("source", 0))
        self.source_bytes += source
        self.passed_bytes += sum(map(int, status["bytes"].values())) - source
        self.kept_bytes += int(status["kept"])
        for peer, why in status["bypassed"].items():
            self.count(peer, f"{relay} by-passes it: {why}")

    def count(self, relay: str, why: str) -> None:
        """Counts a relay that failed, and logs a warning the first time."""
        self.bypassed += 1
        level = logging.DEBUG if relay in self._told else logging.WARNING
        self._told.add(relay)
        _log.log(level, "the relay %s is of no use: %s (sampler/relay_bypassed counts on)", relay, why)

    def metrics(self) -> dict[str, float]:
        """Returns counts since the last call, and the times and bytes of the newest version."""
        bypassed, self.bypassed = self.bypassed, 0
        return {
            "sampler/relay_bypassed": float(bypassed), "publish/relay_s": self.seconds,
            "publish/relay_source_bytes": float(self.source_bytes), "publish/relay_passed_bytes": float(self.passed_bytes),
            "publish/relay_kept_bytes": float(self.kept_bytes),
        }  # fmt: skip


async def _answer(asked: Any) -> Mapping[str, Any]:
    async with asked as answer:
        if answer.status != 200:
            raise Useless(f"{answer.url} answers {answer.status}: {(await answer.text(errors='replace'))[:200]}")
        found: Mapping[str, Any] = await answer.json()
        return found
