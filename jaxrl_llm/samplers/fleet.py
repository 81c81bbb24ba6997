"""Several vLLM servers as one: requests spread over them, weights updated on all at once, the failed set aside and taken back."""

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxrl_llm.samplers.server_update import Inflight, Published, Server, update_server
from jaxrl_llm.samplers.vllm_http import Ask, Piece, Refused, ServerFault, TooSlow, Unreached

_log = logging.getLogger(__name__)

_HEARTBEAT_S = 0.5
_STRIKES = 3  # requests in a row that took too long before a server is set aside
_REMEMBERED = 100_000  # prefixes whose server is known


class Unserved(TimeoutError):
    """No server took requests for too long; the message names each and its cause."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long and how often, for a fleet.

    Attributes:
      sequences: most sequences in flight on a server.
      update_s: most seconds of an update of one server, and of the drain before it.
      wait_s: most seconds that requests wait while no server takes any.
      tries: most servers that one request is asked of.
    """

    sequences: int = 1024
    update_s: float = 300.0
    wait_s: float = 300.0
    tries: int = 8


@dataclass(eq=False, kw_only=True)
class Fleet:
    """The servers of a sampler.

    Attributes:
      servers: all of them, ready or not.
      limits: how long and how often.
      inflight: what becomes of requests in flight while weights change.
      published: the newest version, which requests are asked of; None before the first.
      counters: retries, aborted and slow requests, servers set aside and taken back, updates.
      update: seconds and canary of the last update, by name.
    """

    servers: Sequence[Server]
    limits: Limits
    inflight: Inflight = "recompute"
    published: Published | None = None
    counters: Counter[str] = field(default_factory=Counter)
    update: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._waiting: deque[tuple[int, bytes, asyncio.Future[Server]]] = deque()
        self._homes: OrderedDict[bytes, Server] = OrderedDict()
        self._rejoining: dict[Server, asyncio.Task[None]] = {}
        self._heart: asyncio.Task[None] | None = None
        self._down_since: float | None = None

    @property
    def streams(self) -> bool:
        """Whether tokens are taken as they are drawn, because nothing else tells their versions."""
        crossing = self.inflight in ("recompute", "stale_kv")
        return crossing and any(not s.http.spans for s in self.servers)

    async def open(self) -> None:
        """Meets every server; those that do not answer yet may join later.

        Raises:
          Refused: a server is not set up for updates.
          ServerFault: none answers.
        """
        met = await asyncio.gather(*(s.http.open() for s in self.servers), return_exceptions=True)
        for server, error in zip(self.servers, met, strict=True):
            if isinstance(error, BaseException):
                if not isinstance(error, ServerFault):
                    raise error
                self._set_aside(server, error)
            server.ready = error is None
        if not any(server.ready for server in self.servers):
            raise ServerFault("; ".join(s.cause for s in self.servers))
        self._heart = asyncio.create_task(self._watch())

    async def close(self) -> None:
        tasks = [t for t in (self._heart, *self._rejoining.values()) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail(RuntimeError("the sampler is closed"))
        for server in self.servers:
            await server.http.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def ask(self, ask: Ask, home: bytes) -> list[Piece]:
        """What one server drew for the n samples; after a failure, at least what arrived of some, marked "abort".

        Args:
          ask: the request.
          home: requests with equal bytes go to one server while its load allows it, for its prefix cache.

        Raises:
          Unserved: no server took requests for `wait_s`.
          ServerFault: `tries` servers failed on it.
          Refused: a server calls it wrong.
        """
        fault: ServerFault | None = None
        for _ in range(self.limits.tries):
            server = await self._turn(ask.n, home)
            pieces = [Piece() for _ in range(ask.n)]
            try:
                await self._fly(server, ask, pieces)
                await self._approved(server)
                server.strikes = 0
                self.counters["aborted"] += sum(piece.finish == "abort" for piece in pieces)
                return pieces
            except ServerFault as error:
                fault = error
                self._blame(server, error)
            finally:
                server.load -= ask.n
                self._dispatch()
            self.counters["retries"] += 1
            if any(_cut(piece, server.suspect) for piece in pieces):
                return pieces
        raise ServerFault(f"a request failed {self.limits.tries} times; the last time: {fault}") from fault

    async def _fly(self, server: Server, ask: Ask, pieces: list[Piece]) -> None:
        """The request, which ends too where the server is set aside."""
        flight = asyncio.ensure_future(server.http.generate(ask, pieces))
        server.flights.add(flight)
        try:
            await asyncio.wait({flight})
        finally:
            server.flights.discard(flight)
            flight.cancel()
        if flight.cancelled():
            raise ServerFault(f"{server.http.url} was set aside: {server.cause}")
        flight.result()

    async def _approved(self, server: Server) -> None:
        """Waits for the verdict where an answer came in the middle of an update."""
        if server.shut:
            async with server.lock:
                pass
            if server.suspect is not None:
                raise ServerFault(server.cause)

    def _blame(self, server: Server, error: ServerFault) -> None:
        """A failed server is set aside; a slow one after some requests in a row."""
        if isinstance(error, TooSlow):
            self.counters["slow"] += 1
            server.strikes += 1
            if server.strikes < _STRIKES:
                return
        self._set_aside(server, error)

    async def _turn(self, n: int, home: bytes) -> Server:
        """A server with room for n sequences, in the order of asking."""
        turn: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
        self._waiting.append((n, home, turn))
        self._dispatch()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                turn.result().load -= n
                self._dispatch()
            raise

    def _dispatch(self) -> None:
        """Gives waiting requests their servers."""
        while self._waiting:
            n, home, turn = self._waiting[0]
            if not turn.done():
                server = self._choose(n, home)
                if server is None:
                    return
                server.load += n
                turn.set_result(server)
            self._waiting.popleft()

    def _serving(self) -> list[Server]:
        """Servers that take requests for the newest version."""
        version = None if self.published is None else self.published.version
        return [s for s in self.servers if s.ready and not s.shut and s.http.version == version]

    def _choose(self, n: int, home: bytes) -> Server | None:
        """The prefix's own server unless it is much busier than the least loaded; None where all are full.

        Servers that are still in their update will take their share, so those that are through with it leave them theirs.
        """
        most, serving, able = self.limits.sequences, self._serving(), [s for s in self.servers if s.ready]
        if len(serving) < len(able):
            waiting = sum(count for count, _, turn in self._waiting if not turn.done())
            most = min(most, -(-(waiting + sum(s.load for s in able)) // len(able)))
        room = [s for s in serving if s.load + n <= most or s.load == 0]
        if not room:
            return None
        least = min(room, key=lambda s: s.load)
        known = self._homes.get(home)
        chosen = known if known in room and known.load <= least.load + max(most // 8, n) else least
        self._homes[home] = chosen
        self._homes.move_to_end(home)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return chosen

    def _fail(self, error: Exception) -> None:
        """Everyone who waits gets the error."""
        while self._waiting:
            turn = self._waiting.popleft()[2]
            if not turn.done():
                turn.set_exception(error)

    # -- updates -------------------------------------------------------------------------------------------------------

    async def publish(self, published: Published) -> None:
        """Brings every server that answers to the version; new requests wait for it.

        Raises:
          ServerFault, Refused: every server answered and none took it; says what each said.
        """
        self.published = published
        begin = time.perf_counter()
        able = [s for s in self.servers if s.ready]
        failed = [e for e in await asyncio.gather(*(self._bring(s) for s in able)) if e is not None]
        self.update["total_s"] = time.perf_counter() - begin
        self.counters["updates"] += 1
        if len(failed) == len(self.servers) and not any(isinstance(e, Unreached) for e in failed):
            causes = "; ".join(str(error) for error in failed)
            error = type(failed[0])(f"no server took version {published.version} of the weights: {causes}")
            self._fail(error)
            raise error

    async def _bring(self, server: Server) -> Exception | None:
        """Brings one server to the newest version, or sets it aside and says why."""
        async with server.lock:
            try:
                while (wanted := self.published) is not None and server.http.version != wanted.version:
                    job = update_server(server, wanted, self.inflight, self.limits.update_s, streams=self.streams)
                    self.update |= await asyncio.wait_for(job, self.limits.update_s)
                server.ready, server.shut, server.suspect = True, False, None
            except TimeoutError:
                return self._set_aside(server, self._overdue(server))
            except (ServerFault, Refused) as error:
                return self._set_aside(server, error)
        self._dispatch()
        return None

    def _overdue(self, server: Server) -> TooSlow:
        return TooSlow(
            f"{server.http.url} was not on the new weights within {self.limits.update_s:g} s (it was at: {server.cause}): look at "
            "its log, or raise vllm_sampler.VllmSampler.update_s"
        )

    # -- servers that failed -------------------------------------------------------------------------------------------

    def _set_aside(self, server: Server, error: Exception) -> Exception:
        """No requests until it holds the newest weights again; what is in flight there is asked elsewhere."""
        server.cause = str(error)
        if server.ready:
            self.counters["set_aside"] += 1
            _log.warning("vLLM server set aside: %s", error)
        server.ready, server.http.version = False, -1
        for flight in list(server.flights):
            flight.cancel()
        return error

    async def _rejoin(self, server: Server) -> None:
        """Brings a server back, if it answers."""
        try:
            if server.revive is not None:
                await server.revive()
            await server.http.open()
        except (ServerFault, Refused, TimeoutError, OSError) as error:
            server.cause = str(error)
            return
        if await self._bring(server) is None:
            server.strikes = 0
            self.counters["rejoined"] += 1
            _log.warning("vLLM server %s serves again, version %d", server.http.url, server.http.version)

    async def _watch(self) -> None:
        """Tries to bring failed servers back, and ends waits that have become hopeless."""
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            if self.published is None:
                continue
            for server in self.servers:
                running = self._rejoining.get(server)
                if not server.ready and not server.lock.locked() and (running is None or running.done()):
                    self._rejoining[server] = asyncio.create_task(self._rejoin(server))
            now = time.monotonic()
            self._down_since = None if self._serving() or not self._waiting else self._down_since or now
            if self._down_since is not None and now - self._down_since > self.limits.wait_s:
                causes = "; ".join(f"{s.http.url}: {s.cause}" for s in self.servers)
                self._fail(
                    Unserved(
                        f"no vLLM server took requests for {self.limits.wait_s:g} s ({causes}): start them, or raise VllmSampler.wait_s"
                    )
                )


def _cut(piece: Piece, suspect: int | None) -> int:
    """Ends a piece where its server failed, without tokens of a suspect version; the number of tokens left."""
    kept = next((i for i, version in enumerate(piece.versions) if version == suspect), len(piece.tokens))
    if piece.finish is None or kept < len(piece.tokens):
        piece.finish = "abort"
    del piece.tokens[kept:], piece.logprobs[kept:], piece.versions[kept:]
    return kept
