"""Several servers as one: requests are spread over them, failed servers are set aside and later rejoin.

A request goes to one server at a time. Where a server draws no token for too long, its requests in flight are cut and continue
elsewhere from the tokens so far, so that slow or hung servers do not change the lengths of responses.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from dataclasses import dataclass, field, replace

from jaxrl_llm.publication.relays.client import Relays
from jaxrl_llm.samplers.servers.answers import Ask, Leaving, Piece, Refused, ServerFault, TooSlow, set_aside
from jaxrl_llm.samplers.servers.fleet_update import Limits, Updates
from jaxrl_llm.samplers.servers.load_balancer import LoadBalancer
from jaxrl_llm.samplers.servers.server_update import Inflight, Published, Server, streamed

_log = logging.getLogger(__name__)

_HEARTBEAT_S = 0.5
_STRIKES = 3  # requests in a row that took too long, at which a server is set aside
_CUT_S = 5.0  # seconds that a server has to end what it is told to end


class Unserved(TimeoutError):
    """Raised where no server took requests for too long; the message names each and its cause."""


@dataclass(eq=False, kw_only=True)
class Fleet:
    """The servers of a sampler.

    Attributes:
      servers: all of them, ready or not; `join` and `leave` change the list.
      limits: limits of times and tries.
      inflight: treatment of requests in flight while weights change.
      relays: the relays of the servers' hosts; None for none.
      counters: numbers of events by name: retries, aborted and slow requests, servers set aside and rejoined, updates ...
    """

    servers: list[Server]
    limits: Limits
    inflight: Inflight = "recompute"
    relays: Relays | None = None
    counters: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        limits = self.limits
        self.balancer = LoadBalancer(servers=self.servers, sequences=limits.sequences, mixed=bool(limits.at_once))
        self.updates = Updates(
            servers=self.servers, limits=limits, inflight=self.inflight, balancer=self.balancer, counters=self.counters,
            set_aside=self._set_aside, relays=self.relays,
        )  # fmt: skip
        self._leaving: dict[Server, asyncio.Task[None]] = {}
        self.tasks: list[asyncio.Task[None]] = []  # tasks that end with the fleet
        self._down_since: float | None = None

    async def open(self) -> None:
        """Connects to every server; those that do not answer yet may join later.

        Raises:
          Refused: a server is not set up for updates.
          ServerFault: no server answers.
        """
        met = await asyncio.gather(*(s.http.open() for s in self.servers), return_exceptions=True)
        for server, error in zip(list(self.servers), met, strict=True):
            if isinstance(error, BaseException):
                if not isinstance(error, ServerFault):
                    raise error
                self._set_aside(server, error)
            server.ready = error is None
        if not any(server.ready for server in self.servers):
            raise ServerFault("; ".join(s.cause for s in self.servers) or "no server is known")
        if not self.tasks:
            self.tasks += [asyncio.create_task(self._watch()), asyncio.create_task(self._watch_progress())]

    async def settled(self, oldest: int) -> None:
        """Returns when no server with a version before `oldest` is still late with an update; each update has its limit."""
        under_way = self.updates.under_way.items()
        if late := [task for server, task in under_way if server.http.version < oldest and not task.done()]:
            await asyncio.wait(late)

    async def close(self) -> None:
        tasks = [*self.tasks, *self.updates.under_way.values(), *self._leaving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.balancer.ended = RuntimeError("the sampler is closed")
        self.balancer.fail(self.balancer.ended)
        await asyncio.gather(*(self._part(server) for server in (*self.servers, *self._leaving)))

    async def _part(self, server: Server) -> None:
        """Closes the connections to a server; one that the learner did not start unloads the learner's adapters."""
        last = self.updates.published
        await server.http.unload_all(last.adapter if last and not server.revive else "", _CUT_S)
        await server.http.close()

    # -- servers that come and go --------------------------------------------------------------------------------------

    def join(self, server: Server) -> None:
        """Adds a server, which gets the newest weights, and then requests."""
        server.cause = "joins"
        self.servers.append(server)

    def leave(self, server: Server, within_s: float) -> None:
        """Removes a server: it gets no more requests, and those in flight have `within_s` to end before they are asked elsewhere."""
        self.servers.remove(server)
        self.counters["left"] += 1
        self._leaving[server] = asyncio.create_task(self._let_go(server, within_s))

    def leaves(self, url: str) -> bool:
        """Returns whether a server of that address is being removed."""
        return any(server.http.url == url for server in self._leaving)

    async def _let_go(self, server: Server, within_s: float) -> None:
        version, limit = self.balancer.newest, time.monotonic() + within_s
        while server.flights and time.monotonic() < limit and self.balancer.newest == version:
            await asyncio.sleep(_HEARTBEAT_S / 10)
        if server.flights and not server.lock.locked():  # it answers with the tokens so far, if it still answers
            try:
                await server.http.pause("abort", clear_cache=True, limit_s=_CUT_S)
                if server.flights:
                    await asyncio.wait(server.flights, timeout=_CUT_S)
            except (ServerFault, Refused):
                pass
        server.cause = "it left"
        server.ready = False
        for flight in list(server.flights):
            flight.cancel()
        while server.load > 0:
            await asyncio.sleep(_HEARTBEAT_S / 10)
        await self._part(server)
        del self._leaving[server]

    # -- requests ------------------------------------------------------------------------------------------------------

    async def ask(self, ask: Ask, home: bytes, oldest: int, conversation: bytes = b"") -> list[Piece]:
        """Returns one server's tokens for the n samples; after a failure, those that arrived of at least one sample, marked "abort".

        Args:
          ask: the request.
          home: requests with equal bytes go to one server while its load allows it, for its prefix cache.
          oldest: the oldest version that may answer, where servers are updated a few at a time.
          conversation: as `home`, and preferred to it where its server is known; empty for none.

        Raises:
          Unserved: no server took requests for `wait_s`.
          ServerFault: `tries` servers failed on it.
          Refused: a server refuses the request.
        """
        fault: ServerFault | None = None
        for _ in range(self.limits.tries):
            server = await self.balancer.turn(ask.n, home, oldest, conversation)
            try:
                return await self._answered(server, ask)
            except ServerFault as error:
                fault = error
            finally:
                self.balancer.release(server, ask.n)
        raise ServerFault(f"a request failed {self.limits.tries} times; the last time: {fault}") from fault

    async def _answered(self, server: Server, ask: Ask) -> list[Piece]:
        """Returns a server's tokens, marked "abort" where it failed after some; raises ServerFault where it failed before any."""
        pieces = [Piece() for _ in range(ask.n)]
        epoch, earlier = server.epoch, max(0, len(server.committed) - 1)
        try:
            if not server.ready:
                raise set_aside(server.http.url, server.cause)
            if not await self._fly(server, replace(ask, stream=streamed(server, self.inflight)), pieces):
                self.counters["held"] += 1
                return [Piece(finish="abort") for _ in pieces]
            await self._approved(server)
            if server.epoch != epoch:
                raise set_aside(server.http.url, server.cause)
            _check_versions(server, pieces, set(server.committed[earlier:]))
        except ServerFault as error:
            self._blame(server, error)
            self.counters["retries"] += 1
            if server.epoch != epoch:
                raise
            if sum(piece.cut(server.suspect) for piece in pieces) == 0:
                raise
            return pieces
        server.strikes, server.progress.moved = 0, True
        self.counters["aborted"] += sum(piece.finish == "abort" for piece in pieces)
        return pieces

    async def _fly(self, server: Server, ask: Ask, pieces: list[Piece]) -> bool:
        """Carries out the request, and ends it where the server is set aside; returns False where a pause held the request and it was cut off."""
        flight = asyncio.ensure_future(_confirmed(server, ask, pieces))
        server.flights.add(flight)
        try:
            await asyncio.wait({flight})
        finally:
            server.flights.discard(flight)
            flight.cancel()
        if flight in server.held:
            server.held.discard(flight)
            return False
        if flight.cancelled():
            raise set_aside(server.http.url, server.cause)
        flight.result()
        return True

    async def _approved(self, server: Server) -> None:
        """Waits for the canary's result where an answer came in the middle of an update."""
        if server.shut:
            async with server.lock:
                pass
            if server.suspect is not None:
                raise ServerFault(server.cause)

    def _blame(self, server: Server, error: ServerFault) -> None:
        """Sets a failed server aside, a slow one after several requests in a row, and one that leaves once it has returned its requests."""
        if isinstance(error, Leaving):
            if server.ready:
                self.counters["left"] += 1
                _log.warning("%s server %s leaves", server.http.kind, server.http.url)
                server.ready, server.cause = False, str(error)
                self.updates.under_way[server] = asyncio.create_task(self._emptied(server, error))
            return
        if isinstance(error, TooSlow):
            self.counters["slow"] += 1
            server.strikes += 1
            if server.strikes < _STRIKES:
                return
        self._set_aside(server, error)

    async def _emptied(self, server: Server, error: Leaving) -> None:
        """Waits for the requests that a leaving server returns; a server that later takes its place is treated as one that failed."""
        if server.flights:
            await asyncio.wait(set(server.flights), timeout=_CUT_S)
        self._set_aside(server, error)

    async def _watch_progress(self) -> None:
        """Ends requests in flight at servers that draw no token for too long; they continue elsewhere from the tokens so far."""
        while self.limits.straggler:
            await asyncio.sleep(max(self.limits.straggler_s / 5, 0.01))
            await asyncio.gather(*(self._look_at(server) for server in list(self.servers)))

    async def _look_at(self, server: Server) -> None:
        """Checks whether a server makes progress; one that does not is told to cut its requests, and set aside.

        A server is judged by its own tokens alone, never by those of others or by an answer's duration: long answers would otherwise be
        retried more often than short ones, and the answers that are learned from would be biased to short ones.
        """
        if not server.flights or server.shut or not server.ready:
            server.progress.rest()
            return
        try:
            tokens = await asyncio.wait_for(server.http.progress(), _CUT_S)
        except (ServerFault, TimeoutError):
            tokens = server.progress.tokens or 0.0
        if tokens is None:
            self._tell_uncounted(server)
        elif server.progress.stalled(tokens, self.limits.straggler_s) and not server.shut:
            self.counters["stalled"] += 1
            with contextlib.suppress(ServerFault, Refused):
                async with server.lock:
                    await server.http.pause("abort", clear_cache=True, limit_s=_CUT_S)
                    if server.flights:
                        await asyncio.wait(server.flights, timeout=_CUT_S)
            self._set_aside(server, TooSlow(f"{server.http.url} drew no token for {self.limits.straggler_s:g} s"))

    def _tell_uncounted(self, server: Server) -> None:
        if not server.progress.uncounted:
            http, why = server.http, f"one that hangs is noticed by {server.http.settings}.request_s alone"
            _log.warning("%s server %s does not count its tokens (/metrics): %s", http.kind, http.url, why)
        server.progress.uncounted = True
        self.counters["uncounted"] += 1

    # -- updates -------------------------------------------------------------------------------------------------------

    async def publish(self, published: Published) -> None:
        """Updates every server that answers to the version; late ones continue without being waited for.

        Raises:
          ServerFault, Refused: every server answered and none took it; the message holds each one's answer.
        """
        await self.updates.publish(published)

    async def publish_again(self, published: Published) -> None:
        """Updates servers that all failed to a version that was published once more.

        Raises:
          ServerFault: no server took it; the message holds each one's answer.
        """
        self.updates.published = published
        self.counters["published_again"] += 1
        for server in self.servers:
            server.http.version = -1
        await asyncio.gather(*(self._rejoin(server) for server in list(self.servers)))
        if not any(server.ready for server in self.servers):
            # A cause names a stage of the update where another attempt to bring the server back is under way.
            causes = "; ".join(f"{s.http.url}: {s.cause}" for s in self.servers) or "no server is known"
            raise ServerFault(f"no server took version {published.version} of the weights: {causes}")

    def reading(self) -> set[int]:
        """Returns the versions that must be kept: servers read them, or may read them again for requests that name their adapters."""
        return {*self.updates.staging.values()}.union(*(server.http.versions_asked() for server in self.servers))

    @property
    def update(self) -> dict[str, float]:
        """The seconds and the canary's results of the last update, by name."""
        return self.updates.seconds

    # -- servers that failed -------------------------------------------------------------------------------------------

    def _set_aside(self, server: Server, error: Exception) -> Exception:
        """Gives a server no requests until it holds the newest weights again; its requests in flight are asked elsewhere."""
        server.cause = str(error)
        if server.ready:
            self.counters["set_aside"] += 1
            _log.warning("%s server set aside: %s", server.http.kind, error)
        server.ready, server.http.version = False, -1
        server.marks.forget()
        server.disown()
        return error

    async def _rejoin(self, server: Server) -> None:
        """Updates a failed or new server and gives it requests, if it answers."""
        try:
            if server.revive is not None:
                await server.revive()
            await server.http.open()
        except (ServerFault, Refused, TimeoutError, OSError) as error:
            server.cause = str(error)
            self._told(server)
            return
        served = server.served
        if await self.updates.bring(server) is not None:
            self._told(server)
            return
        server.strikes, server.told = 0, ""
        self.counters["rejoined" if served else "joined"] += 1
        _log.warning("%s server %s serves, version %d", server.http.kind, server.http.url, server.http.version)

    def _told(self, server: Server) -> None:
        """Warns, once for each cause, of a server that gets no requests."""
        if server.told != server.cause:
            server.told = server.cause
            _log.warning("%s server %s gets no requests yet: %s", server.http.kind, server.http.url, server.cause)

    async def _watch(self) -> None:
        """Tries to bring failed servers back, dispatches waiting requests, and fails them where no server serves for too long."""
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            if self.balancer.newest is None:
                continue
            for server in self.servers:
                if not server.ready and not self.updates.busy(server):
                    self.updates.under_way[server] = asyncio.create_task(self._rejoin(server))
            self.balancer.dispatch()
            now = time.monotonic()
            self._down_since = None if self.balancer.serving() or not self.balancer.waiting else self._down_since or now
            if self._down_since is not None and now - self._down_since > self.limits.wait_s:
                causes = "; ".join(f"{s.http.url}: {s.cause}" for s in self.servers) or "no server is known"
                said = f"no server took requests for {self.limits.wait_s:g} s ({causes})"
                self.balancer.fail(Unserved(f"{said}: start them, or raise the sampler's wait_s"))


async def _confirmed(server: Server, ask: Ask, pieces: list[Piece]) -> None:
    """Asks for tokens, and then confirms that the server holds the weights of their label.

    Raises:
      ServerFault: the server failed, or holds other weights; tokens stay in `pieces` only where the server confirmed them.
    """
    try:
        await server.http.generate(ask, pieces)
    except ServerFault:
        if any(piece.tokens for piece in pieces):
            try:
                await asyncio.wait_for(server.marks.confirm(), _CUT_S)
            except (ServerFault, Refused, TimeoutError):
                _drop(pieces)
        raise
    try:
        await server.marks.confirm()
    except ServerFault:
        _drop(pieces)
        raise


def _drop(pieces: list[Piece]) -> None:
    pieces[:] = [Piece() for _ in pieces]


def _check_versions(server: Server, pieces: list[Piece], served: set[int]) -> None:
    """Raises ServerFault, and drops all tokens, where one is labelled with a version that the server did not hold meanwhile."""
    labels = {version for piece in pieces for version in piece.versions}
    if not labels <= served:
        _drop(pieces)
        raise ServerFault(
            f"{server.http.url} labels tokens with the versions {sorted(labels - served)}, while it served {sorted(served)}"
        )
