"""Chooses the server of a request: one queue for all servers, equal prefixes together, the least loaded first.

No request waits at a full server: it is assigned when a server has room for it, so that fast servers take more requests than slow ones.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxrl_llm.samplers.servers.server_update import Server

_REMEMBERED = 100_000  # prefixes whose server is remembered

Homes = tuple[bytes, ...]  # keys of a conversation and of a prefix: the first known one counts
Waiting = deque[tuple[int, Homes, asyncio.Future[Server]]]


@dataclass(eq=False, kw_only=True)
class LoadBalancer:
    """Requests that wait for a server.

    Attributes:
      servers: all servers, ready or not; the owner of the list adds and removes.
      sequences: most sequences in flight on a server.
      newest: the version that requests ask for; None before the first.
      mixed: whether servers of older versions take requests for those versions.
      shared_until: time (time.monotonic) until which servers in an update keep their share of the waiting requests.
      ended: the error that every later call of `turn` raises, once the fleet has ended.
    """

    servers: Sequence[Server]
    sequences: int
    newest: int | None = None
    mixed: bool = False
    shared_until: float = 0.0
    ended: Exception | None = None
    _waiting: dict[int, Waiting] = field(default_factory=dict, init=False)
    _homes: OrderedDict[bytes, Server] = field(default_factory=OrderedDict, init=False)

    @property
    def waiting(self) -> int:
        """The number of sequences that wait."""
        return sum(n for queue in self._waiting.values() for n, _, turn in queue if not turn.done())

    async def turn(self, n: int, home: bytes, oldest: int, conversation: bytes = b"") -> Server:
        """Returns a server with room for n sequences, in the order of the calls; `release` frees the room.

        Args:
          home: requests with equal bytes go to one server while its load allows it, for its prefix cache.
          oldest: the oldest version that may answer.
          conversation: as `home`, for prefixes that continue one another; it is preferred to `home` from the second turn on.
        """
        if self.ended is not None:
            raise self.ended
        turn: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(oldest, deque()).append((n, (conversation, home) if conversation else (home,), turn))
        self.dispatch()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.release(turn.result(), n)
            raise

    def release(self, server: Server, n: int) -> None:
        """Frees the room of a request that has ended."""
        server.load -= n
        self.dispatch()

    def dispatch(self) -> None:
        """Assigns waiting requests to servers."""
        for oldest in sorted(self._waiting):
            queue = self._waiting[oldest]
            while queue:
                n, homes, turn = queue[0]
                if not turn.done():
                    server = self._choose(n, homes, oldest)
                    if server is None:
                        break
                    server.load += n
                    turn.set_result(server)
                queue.popleft()
            if not queue:
                del self._waiting[oldest]

    def serving(self, oldest: int | None = None) -> list[Server]:
        """Returns the servers that take requests: of the newest version, or not older than `oldest` where versions are mixed."""
        open_ones = [s for s in self.servers if s.ready and not s.shut]
        if self.mixed and oldest is not None:
            return [s for s in open_ones if s.http.version >= oldest]
        return [] if self.newest is None else [s for s in open_ones if s.http.version == self.newest]

    def _choose(self, n: int, homes: Homes, oldest: int) -> Server | None:
        """Returns the prefix's own server, or the least loaded one where that is much busier; None where all are full.

        Servers that are still in their update will take their share, so updated servers leave it to them for as long as an update
        takes.
        """
        most, serving, able = self.sequences, self.serving(oldest), [s for s in self.servers if s.ready]
        if len(serving) < len(able) and time.monotonic() < self.shared_until:
            most = min(most, -(-(self.waiting + sum(s.load for s in able)) // len(able)))
        room = [s for s in serving if s.load + n <= most or s.load == 0]
        if not room:
            return None
        least = min(room, key=lambda s: s.load)
        known = next((self._homes[home] for home in homes if home in self._homes), None)
        chosen = known if known in room and known.load <= least.load + max(most // 8, n) else least
        for home in homes:
            self._homes[home] = chosen
            self._homes.move_to_end(home)
        while len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return chosen

    def fail(self, error: Exception) -> None:
        """Raises the error in all waiting calls of `turn`."""
        while self._waiting:
            for _, _, turn in self._waiting.popitem()[1]:
                if not turn.done():
                    turn.set_exception(error)
