"""One server of tokens over HTTP, of whatever kind: what the fleet asks of it, and how requests are sent (aiohttp).

`vllm.server_api` and `sglang.server_api` are the kinds. A version of the weights is staged while the server generates, committed while it
is paused, and carries a mark, by which `server_update.Marks` finds out whether the server still holds it.
"""

import contextlib
import resource
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import aiohttp
import numpy as np
from jaxtyping import Float

from jaxrl_llm.samplers.servers.answers import Ask, Piece, Refused, ServerFault, TooSlow, Unreached, fault_of

CONNECT_S = 5.0
TEXT = 400  # characters of a server's answer that an error quotes
_KEEP_ALIVE_S = 3.0  # shorter than the servers' own 5 s, so that no connection is used while the server closes it

_FILES = 1 << 16

Scores = tuple[Float[np.ndarray, " T-1"], Float[np.ndarray, " T-1"]]
Ranks = list[dict[str, Any]]


@dataclass(eq=False, kw_only=True)
class ServerHttp(ABC):
    """A client of one server.

    Attributes:
      url: "http://host:port".
      api_key: key that is sent as a bearer token; empty sends none.
      vocabulary: token ids are below it.
      request_s: most seconds of one generation.
      control_s: most seconds of one step of an update.
      version: the policy version that the server serves; -1 before the first.
      arrivals: number of answers and events of streams so far.
      adapters: whether versions are adapters beside the base that the server serves.
      adapter: the name of the adapters that requests ask for; empty before the first version.
      flying: {name of adapters: requests in flight that asked for them}.
      former: names of adapters that former runs of the learner left; None before the first version.
    """

    kind: ClassVar[str]  # as messages name it
    settings: ClassVar[str]  # the sampler's class, as gin names it
    counts: ClassVar[tuple[str, ...]]  # how the lines of /metrics begin that count tokens

    url: str
    api_key: str = ""
    vocabulary: int = 2**31 - 1
    request_s: float = 600.0
    control_s: float = 60.0
    version: int = -1
    arrivals: int = 0
    adapters: bool = False
    adapter: str = ""
    flying: Counter[str] = field(default_factory=Counter)
    former: set[str] | None = None

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    # -- what the fleet asks of a server -------------------------------------------------------------------------------

    @property
    def spans(self) -> bool:
        """Whether the server reports the version that drew each token."""
        return False

    @abstractmethod
    async def open(self) -> None:
        """Detects what the server offers.

        Raises:
          ServerFault: the server does not answer.
          Refused: the server lacks what an update needs.
        """

    @abstractmethod
    async def generate(self, ask: Ask, pieces: list[Piece]) -> None:
        """Fills `pieces`, one for each of the n samples; tokens that arrived before an error stay in them.

        Raises:
          ServerFault: the server failed, or its answer does not fit the request.
          Refused: the server refuses the request.
        """

    @abstractmethod
    async def score(self, tokens: Sequence[int], likely: Sequence[int], listed: int, adapter: str = "") -> Scores:
        """Returns the server's log-probs of a text of T tokens at temperature 1; raises as `generate` does.

        Args:
          tokens: the text's T token ids.
          likely: a token id to be scored after each of the first T - 1 tokens.
          listed: number of most likely tokens that the server lists after each token.
          adapter: the name of adapters to score by; empty for `adapter`.

        Returns:
          The log-prob of each token but the first, and of each of `likely`: -inf where the server does not list it.
        """

    @abstractmethod
    async def stage(self, path: str, version: int) -> None:
        """Starts reading a published version in the background."""

    @abstractmethod
    async def stage_status(self) -> Ranks:
        """Returns each rank's progress: version, state ("idle", "staging", "staged", "failed"), error, seconds, bytes; and its mark."""

    @abstractmethod
    async def commit(self, version: int, mark: str) -> Ranks:
        """Loads the staged version on every rank of the paused server. Each rank returns the version it holds, and the mark it had before."""

    @abstractmethod
    async def commit_memory(self, version: int, mark: str, memory: str) -> Ranks:
        """Commits weights without staging, as `commit` does: they lie in the GPU memory of a process on the server's host."""

    @abstractmethod
    async def pause(self, mode: str, *, clear_cache: bool, limit_s: float | None = None) -> None:
        """Stops generation: "keep" freezes requests in flight, "wait" finishes them, "abort" ends them."""

    @abstractmethod
    async def resume(self) -> None:
        """Goes on generating."""

    async def progress(self) -> float | None:
        """Returns the number of tokens that the server has read and drawn since its start; None where it does not count them."""
        try:
            said = await self._call("GET", "/metrics", limit_s=CONNECT_S)
        except Refused:
            return None
        found = [line.rpartition(" ")[2] for line in said.splitlines() if line.startswith(self.counts)]
        try:
            return sum(map(float, found)) if found else None
        except ValueError as wrong:
            raise ServerFault(f"{self.url} counts its tokens in words that are no numbers: {wrong}") from wrong

    async def label(self, version: int) -> None:
        """Tells the server the number of the weights it holds, where it stores one."""
        return

    def take_unrecorded(self) -> int:
        """Returns the number of samples without a valid record of experts since the last call."""
        return 0

    async def load_adapters(self, name: str, path: str) -> None:
        """Has the server load the adapters of a folder under a name; raises as `stage` does."""
        raise Refused(f"{self.url} is a {self.kind} server, to which adapters alone are not published")

    async def unload_idle(self) -> None:
        """Has the server unload the learner's adapters that no request needs."""
        return

    async def unload_all(self, adapter: str, limit_s: float) -> None:
        """Has the server unload all adapters of the run to which `adapter` belongs, as far as it answers in `limit_s`; empty for no run."""
        return

    def versions_asked(self) -> set[int]:
        """Returns the versions whose adapters requests in flight ask for."""
        return set()

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=headers, read_bufsize=2**20)
        return self._session

    async def close(self) -> None:
        """Closes the connections, which ends the generations over them."""
        if self._session is not None:
            await self._session.close()

    async def ask(self, verb: str, route: str, body: Any = None) -> str:
        """Sends a request of an update's step and returns the answer's text; raises as `stage` does."""
        return await self._call(verb, route, body, limit_s=self.control_s)

    async def _call(self, verb: str, route: str, body: Any = None, *, limit_s: float) -> str:
        """Sends a request and returns the text of an answer with status 200."""
        with self._faults(route, limit_s):
            async with self.session.request(verb, self.url + route, json=body, timeout=timeout(limit_s)) as answer:
                await self._good(answer, verb, route)
                return await answer.text(errors="replace")

    async def _good(self, answer: aiohttp.ClientResponse, verb: str, route: str) -> None:
        if answer.status == 200:
            return
        text = " ".join((await answer.text(errors="replace")).split())[:TEXT]
        raise fault_of(f"{self.url} answered {verb} {route} with {answer.status}", answer.status, text)

    @contextlib.contextmanager
    def _faults(self, route: str, limit_s: float) -> Iterator[None]:
        """Turns what aiohttp raises into a ServerFault that names the server."""
        where = f"{self.url} ({route})"
        try:
            yield
        except (ServerFault, Refused):
            raise
        except TimeoutError as error:
            raise TooSlow(f"{where} did not answer within {limit_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unreached(f"{where} is not reached: {type(error).__name__} {error}") from error


def timeout(limit_s: float) -> aiohttp.ClientTimeout:
    """Returns the limits of one request: in all, and of the connection."""
    return aiohttp.ClientTimeout(total=limit_s, sock_connect=min(CONNECT_S, limit_s))


def many_files() -> None:
    """Raises the process's limit of open files as far as it may, since a request has a connection of its own, and often 1,024 are the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
