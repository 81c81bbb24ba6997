"""Rules of the project's servers and child processes: whom servers answer, how long they wait for slow clients, and that children get no secrets.

aiohttp and uvicorn limit the time between two requests of a connection, but not the time that a request's head or body takes.
"""

import asyncio
import hmac
import ipaddress
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

# Variables that any program may need to start; a verifier gets these alone.
NEEDED = re.compile(r"PATH|HOME|LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|PYTHONHOME|VIRTUAL_ENV|\w+_NUM_THREADS")
SECRET = re.compile(r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|API_?KEY|PRIVATE_KEY|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)


def bare_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables that programs need to start, and no others."""
    return {name: value for name, value in environment.items() if NEEDED.fullmatch(name)}


def without_secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns all variables but those whose names say that they hold a secret, such as HF_TOKEN or WANDB_API_KEY."""
    return {name: value for name, value in environment.items() if not SECRET.search(name)}


def loopback(host: str) -> bool:
    """Returns whether the address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reachable(host: str) -> str:
    """Returns the host that URLs on this machine name for a server that listens on `host`, which may be a wildcard address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host or "127.0.0.1"
    if address.version == 6:
        return "[::1]" if address.is_unspecified else f"[{address}]"
    return "127.0.0.1" if address.is_unspecified else host


LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")


def refusal(headers: Mapping[str, str], has_body: bool, names: Collection[str] | None) -> tuple[int, str] | None:
    """Returns (status, reason) where a request is refused, else None: the one rule of all the project's servers against foreign web sites.

    A site that a user of this machine visits can make their browser send requests to loopback, can point a name of its own there,
    and can send bodies of plain text without asking; it can neither send JSON unasked, nor hide its origin or its name.

    Args:
      headers: headers of the request, by names in any case.
      has_body: the request has a body, or may have one.
      names: host names that are answered; None answers all, where a token is asked for.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if names is not None and host not in names and host.rpartition(":")[0] not in names:
        return 403, f"requests are answered under the names {', '.join(names)} only (got {host!r})"
    if origin is not None and origin.partition("://")[2] != host:
        return 403, f"requests of other sites are not answered (got Origin {origin!r})"
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if has_body and kind != "application/json":
        return 415, f"a body must be application/json (got {kind!r})"
    return None


TOKEN_VARIABLE = "JAXRL_LLM_TOKEN"  # holds the token of servers that other hosts call
_SHORTEST_TOKEN = 16


def check_token(token: str) -> None:
    """Raises ValueError where a token is too short to protect anything."""
    if len(token) < _SHORTEST_TOKEN:
        raise ValueError(
            f"the token has {len(token)} characters, at least {_SHORTEST_TOKEN} are needed: "
            f"set {TOKEN_VARIABLE} to a random one on this host and on the learner's"
        )


HEAD_S = 15.0  # seconds until the head of a request is complete; idle connections end after as many
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


def token_guard(token: str) -> Any:
    """Returns the middleware that refuses requests to an aiohttp application without `Authorization: Bearer TOKEN`."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise web.HTTPUnauthorized(text="the token is missing or wrong")
        return await handler(request)

    return check


def guard(names: Collection[str] | None, headers: Mapping[str, str] | None = None) -> Any:
    """Returns the middleware that refuses what `refusal` refuses, and adds headers to every answer of an aiohttp application."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if refused := refusal(request.headers, request.can_read_body, names):
                raise (web.HTTPForbidden if refused[0] == 403 else web.HTTPUnsupportedMediaType)(text=refused[1])
            response = await handler(request)
        except web.HTTPException as error:
            error.headers.update(headers or {})
            raise
        response.headers.update(headers or {})
        return response

    return check


async def body(request: web.Request, limit_s: float) -> bytes:
    """Reads the body of a request; raises 408 where it is not complete within the limit, and 413 where it is too large."""
    try:
        async with asyncio.timeout(limit_s):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body was not whole within {limit_s:g} s") from None


async def looking(server: web.Server, patience: Patience) -> None:
    """Closes the slow connections of a server at intervals, without end."""
    while True:
        await asyncio.sleep(_LOOK_S)
        patience.look(connection.transport for connection in server.connections)


def serve(
    app: web.Application, patience: Patience, host: str, port: int, leave: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Serves an application whose middleware reports to `patience`, until SIGINT or SIGTERM, and then until `leave` has returned.

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
            if leave is not None:
                await leave()
            watch.cancel()
        finally:
            await runner.cleanup()

    asyncio.run(run())
