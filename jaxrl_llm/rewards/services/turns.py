"""Shares places among clients that ask for more than can run at a time: the client that was served least comes next."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator

Who = tuple[str, int]  # a client and its request


class Turns:
    """Places that are taken in turns. The client that has held places for the least time comes next, and of its requests the one
    that has; of equal ones the first. So long requests of one client cost others at most one turn's wait.

    Args:
      places: number of turns at a time.
    """

    def __init__(self, places: int) -> None:
        self._free = list(range(places))[::-1]
        self._waiting: list[tuple[Who, asyncio.Future[int]]] = []
        self._held: Counter[Who] = Counter()
        self._served: dict[str | Who, float] = {}

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def turn(self, who: Who) -> AsyncIterator[int]:
        """Waits for a place, which is held within the context."""
        self._enter(who)
        if self._free and not self._waiting:
            place = self._free.pop()
        else:
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._waiting.append((who, future))
            try:
                place = await future
            except asyncio.CancelledError:
                self._waiting = [one for one in self._waiting if one[1] is not future]
                if future.done() and not future.cancelled():  # it came at the same moment
                    self._give(future.result())
                self._leave(who)
                raise
        began = time.monotonic()
        try:
            yield place
        finally:
            for key in (who[0], who):
                self._served[key] += time.monotonic() - began
            self._give(place)
            self._leave(who)

    def _enter(self, who: Who) -> None:
        """Registers a request; a client that comes anew starts at no less than the least served client present, so that it has nothing to catch up."""
        if not self._held:
            self._served.clear()
        clients = {client for client, _ in self._held}
        least = min((self._served[client] for client in clients), default=0.0)
        if who[0] not in clients:
            self._served[who[0]] = max(self._served.get(who[0], 0.0), least)
        self._served.setdefault(who, 0.0)
        self._held[who] += 1

    def _leave(self, who: Who) -> None:
        self._held[who] -= 1
        if not self._held[who]:
            del self._held[who], self._served[who]

    def _give(self, place: int) -> None:
        waiting = [one for one in self._waiting if not one[1].done()]
        if not waiting:
            self._waiting = []
            self._free.append(place)
            return
        chosen = min(waiting, key=lambda one: (self._served[one[0][0]], self._served[one[0]]))
        self._waiting = [one for one in waiting if one is not chosen]
        chosen[1].set_result(place)
