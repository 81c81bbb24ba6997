"""Servers and child processes of ours: clients too slow to be waited for are closed, and children get no secrets."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

# What any program may need to start; a verifier gets these alone.
NEEDED = re.compile(r"PATH|HOME|LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|PYTHONHOME|VIRTUAL_ENV|\w+_NUM_THREADS")
SECRET = re.compile(r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|API_?KEY|PRIVATE_KEY|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)


def bare_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that programs need to start, and no others."""
    return {name: value for name, value in environment.items() if NEEDED.fullmatch(name)}


def without_secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """All variables but those whose names say that they hold a secret, such as HF_TOKEN or WANDB_API_KEY."""
    return {name: value for name, value in environment.items() if not SECRET.search(name)}


HEAD_S = 15.0  # seconds until the head of a request is whole; idle connections end after them too
BODY_S = 60.0  # seconds until its body is
_LOOK_S = 0.5

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False, kw_only=True)
class Patience:
    """Knows which connections are being answered, and closes the others after a while.

    Attributes:
      limit_s: seconds that a connection may go without a request that is being answered.
      body_s: seconds until the body of a request is whole, for those who read it.
    """

    limit_s: float = HEAD_S
    body_s: float = BODY_S
    _answered: dict[Hashable, int] = field(default_factory=dict, init=False)
    _since: dict[Hashable, float] = field(default_factory=dict, init=False)

    def begin(self, peer: Hashable) -> None:
        """A request of that address (host, port) is whole, but for its body."""
        self._answered[peer] = self._answered.get(peer, 0) + 1

    def end(self, peer: Hashable) -> None:
        """It has been answered."""
        left = self._answered.pop(peer) - 1
        if left:
            self._answered[peer] = left
        self._since[peer] = time.monotonic()

    def look(self, transports: Iterable[Any]) -> int:
        """Closes the connections whose time is over; how many they are. To be called again and again with all there are."""
        now, closed = time.monotonic(), 0
        there: dict[Hashable, float] = {}
        for transport in transports:
            if transport is None or (peer := transport.get_extra_info("peername")) is None:
                continue
            peer = tuple(peer)
            there[peer] = now if peer in self._answered else self._since.get(peer, now)
            if now - there[peer] > self.limit_s:
                transport.abort()
                closed += 1
        self._since = there
        return closed


def middleware(patience: Patience) -> Any:
    """Tells `patience` what an aiohttp application is answering; the outermost of its middlewares."""

    @web.middleware
    async def waits(request: web.Request, handler: Handler) -> web.StreamResponse:
        place = None if request.transport is None else request.transport.get_extra_info("peername")
        peer = tuple(place or ())
        patience.begin(peer)
        try:
            return await handler(request)
        finally:
            patience.end(peer)

    return waits


async def body(request: web.Request, limit_s: float) -> bytes:
    """The body of a request; 408 where it is not whole within the limit, 413 where it is too large."""
    try:
        async with asyncio.timeout(limit_s):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body was not whole within {limit_s:g} s") from None


async def looking(server: web.Server, patience: Patience) -> None:
    """Looks after the connections of a server, for ever."""
    while True:
        await asyncio.sleep(_LOOK_S)
        patience.look(connection.transport for connection in server.connections)


def serve(app: web.Application, patience: Patience, host: str, port: int) -> None:
    """Serves an application whose middleware knows `patience`, until it is interrupted or told to end.

    Raises:
      OSError: the port cannot be used.
    """

    async def run() -> None:
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            assert runner.server is not None
            watch = asyncio.create_task(looking(runner.server, patience))
            ended = asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, ended.set)
            print(f"======== Running on http://{host}:{runner.addresses[0][1]} ========", flush=True)
            await ended.wait()
            watch.cancel()
        finally:
            await runner.cleanup()

    asyncio.run(run())
