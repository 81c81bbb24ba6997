"""Shared code of the project's HTTP servers and child processes: slow clients are disconnected, and children get no secrets."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

# Variables that any program may need to start; a verifier gets these alone.
NEEDED = re.compile(r"PATH|HOME|LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|PYTHONHOME|VIRTUAL_ENV|\w+_NUM_THREADS")
SECRET = re.compile(r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|API_?KEY|PRIVATE_KEY|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)


def bare_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that programs need to start, and no others."""
    return {name: value for name, value in environment.items() if NEEDED.fullmatch(name)}


def without_secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """All variables but those whose names say that they hold a secret, such as HF_TOKEN or WANDB_API_KEY."""
    return {name: value for name, value in environment.items() if not SECRET.search(name)}


HEAD_S = 15.0  # seconds until the headers of a request are complete; idle connections end after them too
BODY_S = 60.0  # seconds until its body is complete
_LOOK_S = 0.5

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False, kw_only=True)
class Patience:
    """Records which connections have a request that is being answered, and closes the others after a time limit.

    Attributes:
      limit_s: seconds that a connection may go without a request that is being answered.
      body_s: seconds until the body of a request is complete, for handlers that read it.
    """

    limit_s: float = HEAD_S
    body_s: float = BODY_S
    _answered: dict[Hashable, int] = field(default_factory=dict, init=False)
    _since: dict[Hashable, float] = field(default_factory=dict, init=False)

    def begin(self, peer: Hashable) -> None:
        """Records that the headers of a request from the address `peer` (host, port) are complete."""
        self._answered[peer] = self._answered.get(peer, 0) + 1

    def end(self, peer: Hashable) -> None:
        """Records that a request of `peer` has been answered."""
        left = self._answered.pop(peer) - 1
        if left:
            self._answered[peer] = left
        self._since[peer] = time.monotonic()

    def look(self, transports: Iterable[Any]) -> int:
        """Closes the connections whose time is over and returns their number; it is called repeatedly with all open connections."""
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
    """Returns the middleware that tells `patience` what an aiohttp application is answering; it must be the outermost one."""

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
    """Reads the body of a request; raises 408 where it is not complete within the limit, and 413 where it is too large."""
    try:
        async with asyncio.timeout(limit_s):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body was not whole within {limit_s:g} s") from None


async def looking(server: web.Server, patience: Patience) -> None:
    """Closes the slow connections of a server again and again, without end."""
    while True:
        await asyncio.sleep(_LOOK_S)
        patience.look(connection.transport for connection in server.connections)


def serve(app: web.Application, patience: Patience, host: str, port: int) -> None:
    """Serves an application whose middleware reports to `patience`, until SIGINT or SIGTERM.

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
