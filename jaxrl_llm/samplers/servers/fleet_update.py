"""Updates a fleet's servers to published weights, all at once or a few at a time, without waiting long for slow ones."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from jaxrl_llm.publication.relays.client import Relays, Useless
from jaxrl_llm.publication.relays.version import Announcement
from jaxrl_llm.samplers.servers.answers import Refused, ServerFault, TooSlow, Unreached
from jaxrl_llm.samplers.servers.load_balancer import LoadBalancer
from jaxrl_llm.samplers.servers.server_update import Inflight, Published, Server, stage, swap

# Values of an update that are reported of the worst server.
_WORST = frozenset({"canary_ratio", "canary_mean", "canary_max", "tensors_unchecked", "rounding"})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a fleet's waiting times and tries.

    Attributes:
      sequences: most sequences in flight on a server.
      update_s: most seconds of a server's whole update.
      wait_s: most seconds that requests wait while no server takes any.
      tries: most servers that are asked one request.
      at_once: most servers that are paused for an update at a time; 0 for all. With fewer than all, requests from before a publication
        go on meanwhile, at servers that still hold their version.
      straggler: multiple of the time that half of the servers took, after which an update is no longer waited for; 0 waits without
        limit, also for servers that draw nothing.
      straggler_s: fewest seconds before that, and seconds without a token after which a server's requests continue elsewhere from the
        tokens so far.
    """

    sequences: int = 1024
    update_s: float = 300.0
    wait_s: float = 300.0
    tries: int = 8
    at_once: int = 0
    straggler: float = 4.0
    straggler_s: float = 30.0


@dataclass(eq=False, kw_only=True)
class Updates:
    """Updates servers to the newest version.

    Attributes:
      servers: all servers of the fleet.
      limits: limits of times and tries.
      inflight: treatment of requests in flight while weights change.
      balancer: the load balancer, which learns the newest version, and when a server takes requests again.
      counters: the fleet's counters.
      set_aside: takes a failed server out of service.
      relays: the relays of the servers' hosts, from which servers stage; None where they stage from the learner's publication.
      published: the newest version; None before the first.
      seconds: seconds and canary of the last update, by name.
      under_way: updates that nobody waits for, of servers that are late, rejoin or are new.
      staging: versions that servers read, which must be kept.
    """

    servers: list[Server]
    limits: Limits
    inflight: Inflight
    balancer: LoadBalancer
    counters: Counter[str]
    set_aside: Callable[[Server, Exception], Exception]
    relays: Relays | None = None
    published: Published | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    under_way: dict[Server, asyncio.Task[Any]] = field(default_factory=dict)
    staging: dict[Server, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.limits.at_once) if self.limits.at_once else None
        self._noted: int | None = None  # the version of `seconds`

    async def publish(self, published: Published) -> None:
        """Updates every server that answers to the version; late ones continue without being waited for.

        Raises:
          ServerFault, Refused: every server answered and none took it; the message holds each one's answer.
        """
        self.published, self.balancer.newest, self.balancer.shared_until = published, published.version, float("inf")
        begin = time.monotonic()
        able = [s for s in self.servers if s.ready and not self.busy(s)]
        jobs = {asyncio.create_task(self.bring(server)): server for server in able}
        try:
            await self._most(set(jobs), begin)
        except asyncio.CancelledError:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            raise
        late = {server: job for job, server in jobs.items() if not job.done()}
        self.under_way |= late
        self.counters["late_updates"] += len(late)
        self.seconds["total_s"] = time.monotonic() - begin
        self.counters["updates"] += 1
        ended = {server: job.result() for job, server in jobs.items() if job.done()}
        failed = [error for server in self.servers if (error := ended.get(server)) is not None]  # others left meanwhile
        if failed and len(failed) == len(self.servers) and not any(isinstance(e, Unreached) for e in failed):
            causes = "; ".join(str(error) for error in failed)
            raise type(failed[0])(f"no server took version {published.version} of the weights: {causes}")

    async def _most(self, pending: set[asyncio.Task[Exception | None]], begin: float) -> None:
        """Returns when all updates have ended, or when the rest are late compared with more than half."""
        count, limits, limit = len(pending), self.limits, float("inf")
        while pending:
            left = None if limit == float("inf") else max(0.0, limit - time.monotonic())
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return
            now = time.monotonic()
            if self.balancer.shared_until == float("inf"):
                self.balancer.shared_until = now + (now - begin) + 1.0
            if limits.straggler and limit == float("inf") and 2 * len(pending) < count:
                limit = now + max((limits.straggler - 1) * (now - begin), limits.straggler_s)

    async def bring(self, server: Server) -> Exception | None:
        """Updates one server to the newest version; where that fails, sets it aside and returns the error."""
        async with server.lock:
            try:
                while (wanted := self.published) is not None and server.http.version != wanted.version:
                    await self._bring_to(server, wanted)
                    if server.http.version == wanted.version and wanted is not self.published:
                        self._lags(server)
                server.ready, server.shut, server.suspect, server.served = True, False, None, True
            except TimeoutError:
                return self.set_aside(server, self._overdue(server))
            except (ServerFault, Refused) as error:
                return self.set_aside(server, error)
        self.balancer.dispatch()
        return None

    async def _bring_to(self, server: Server, wanted: Published) -> None:
        """Stages one version and swaps it in, even where a newer one has come meanwhile, since a slow server would otherwise never finish."""
        limit, begin = self.limits.update_s, time.perf_counter()
        self.staging[server] = wanted.version
        try:
            read = await asyncio.wait_for(self._stage(server, wanted), limit)
            self.seconds["stage_s"] = time.perf_counter() - begin
            slow = wanted is not self.published
            server.cause = "waiting for the updates of others"
            async with self._slot():
                if wanted is not self.published and not slow:
                    return  # there is time to stage the newer version
                found = await asyncio.wait_for(swap(server, wanted, self.inflight, limit), limit)
                self._note(found | read, wanted)
        finally:
            self.staging.pop(server, None)

    async def _stage(self, server: Server, wanted: Published) -> dict[str, float]:
        """Has a server stage a version from its host's relay, or from the source where the relay fails; returns the bytes as `stage`."""
        if self.relays is None or not wanted.blocks:
            return await stage(server, wanted)
        server.cause = "waiting for its host's relay"
        said = Announcement(version=wanted.version, source=wanted.source, blocks=wanted.blocks)
        try:
            path = await self.relays.path(server.http.url, [s.http.url for s in self.servers], said)
            return await stage(server, replace(wanted, path=path))
        except (Useless, ServerFault) as wrong:
            if isinstance(wrong, Unreached):
                raise
            self.relays.count(self.relays.of(server.http.url), str(wrong))
            return await stage(server, wanted)

    def _lags(self, server: Server) -> None:
        """Notes that a server lags behind the newest version; it takes requests only where servers of older versions do."""
        newest = self.published.version if self.published is not None else server.http.version
        self.counters["lagging"] += 1
        server.cause = f"it lags: it holds version {server.http.version}, the newest is {newest}"
        server.ready, server.shut, server.suspect, server.served = self.balancer.mixed, False, None, True
        self.balancer.dispatch()

    def _note(self, found: dict[str, float], published: Published) -> None:
        """Records the results of a swap: of `_WORST` values the worst of all servers, of others the last."""
        if published is not self.published:
            return
        same = self._noted == published.version
        worst = {
            name: max(found[name], self.seconds[name]) for name in _WORST & found.keys() & self.seconds.keys() if same
        }
        self.seconds |= found | worst
        self._noted = published.version

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Holds one of the places of servers that may be paused, for at most `straggler_s`, after which another server may take it."""
        if self._slots is None:
            yield
            return
        await self._slots.acquire()
        held = [self._slots]
        timer = asyncio.get_running_loop().call_later(self.limits.straggler_s, lambda: held.pop().release())
        try:
            yield
        finally:
            timer.cancel()
            if held:
                held.pop().release()

    def busy(self, server: Server) -> bool:
        """Returns whether the server is being updated."""
        job = self.under_way.get(server)
        return server.lock.locked() or (job is not None and not job.done())

    def _overdue(self, server: Server) -> TooSlow:
        return TooSlow(
            f"{server.http.url} was not on the new weights within {self.limits.update_s:g} s (it was at: {server.cause}): look at "
            f"its log, or raise {server.http.settings}.update_s"
        )
