"""A relay of published weights: one for each sampler host, from which the host's servers and the relay of the next host get a version.

    JAXRL_LLM_TOKEN=... python -m jaxrl_llm.publication.relays.server --folder /dev/shm/relay --host 10.0.0.5 --port 9100

It fetches each version once, from the relay before it or from where the learner wrote it, checks each block, and writes it into the
folder, from which the host's vLLM servers stage it; blocks that the version before has too are copied from there, and checked. Each
request carries `Authorization: Bearer TOKEN`, over plain HTTP: between hosts, use a private network. It needs numpy, tensorstore and
aiohttp, which vLLM's environment has.

    POST /announce {"version", "source", "blocks", "before"} -> {"id", "state", "path", ...}     GET /ID -> the same
    GET /ID/blocks, GET /ID/NUMBER -> bytes, or the status 202 where it has not arrived yet
"""

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from jaxrl_llm import command_line, serving
from jaxrl_llm.publication.object_store import folder_of
from jaxrl_llm.publication.relays.blocks import Held
from jaxrl_llm.publication.relays.version import Announcement, Patience, RelayedVersion

_ID = re.compile("[0-9a-f]{32}")
_SENDING = 32  # most blocks that are sent at a time

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True)
class Relay:
    """The relay of one host.

    Attributes:
      folder: the relay's own folder of versions; those that an earlier relay left there are removed.
      token: token that a request must carry, of at least 16 characters.
      own: folder to which the learner on this host publishes, from which its versions are passed on; None for none.
      keep: number of newest versions that are kept.
      patience: limits of waiting for other relays.
      slow_clients: limits of connections that do not complete a request.
    """

    folder: Path
    token: str
    own: Path | None = None
    keep: int = 2
    patience: Patience = field(default_factory=Patience)
    slow_clients: serving.Patience = field(default_factory=serving.Patience, repr=False)

    def __post_init__(self) -> None:
        serving.check_token(self.token)
        if self.keep < 1:
            raise ValueError(f"--keep must be 1 or more versions (got {self.keep})")

    def application(self) -> web.Application:
        """Returns the application, whose routes all require the token."""
        app = web.Application(
            middlewares=[
                serving.middleware(self.slow_clients),
                serving.token_guard(self.token),
                serving.guard(None),
            ]
        )
        app[_VERSIONS], app[_SENDERS] = {}, asyncio.Semaphore(_SENDING)
        app.cleanup_ctx.append(self._running)
        app.router.add_post("/announce", self._announce)
        app.router.add_get("/{id}", self._status)
        app.router.add_get("/{id}/blocks", self._listing)
        app.router.add_get("/{id}/{number:\\d+}", self._block)
        return app

    async def _running(self, app: web.Application) -> AsyncIterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self.folder.iterdir():
            if _ID.fullmatch(left.name):
                await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)
        headers, connector = {"Authorization": f"Bearer {self.token}"}, aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
            app[_SESSION] = session
            yield
            for version in list(app[_VERSIONS].values()):
                await self._drop(version)

    async def _announce(self, request: web.Request) -> web.Response:
        """Begins to fetch a version, unless it is complete or in progress; one that failed is fetched anew."""
        try:
            announced = Announcement.of(json.loads(await serving.body(request, self.slow_clients.body_s)))
        except (ValueError, RecursionError) as wrong:
            raise web.HTTPBadRequest(text=str(wrong)) from None
        versions, name = request.app[_VERSIONS], announced.id
        if name not in versions or versions[name].state == "failed":
            versions.pop(name, None)
            staying = list(versions.values())[1 - self.keep :] if self.keep > 1 else []
            held = [one for version in staying if (one := version.held()) is not None]
            versions[name] = self._begun(announced, request.app[_SESSION], held[-1] if held else None)
            for old in list(versions.values())[: -self.keep]:
                del versions[old.announced.id]
                await self._drop(old)
        return web.json_response({"id": name} | versions[name].status())

    def _begun(self, announced: Announcement, session: aiohttp.ClientSession, earlier: Held | None) -> RelayedVersion:
        place = folder_of(announced.source)
        own = self.own is not None and place is not None and place.resolve().is_relative_to(self.own.resolve())
        folder = place if own and place is not None else self.folder / announced.id
        return RelayedVersion(
            announced=announced, folder=folder, own=own, session=session, patience=self.patience, earlier=earlier
        )

    async def _drop(self, version: RelayedVersion) -> None:
        version.task.cancel()
        await asyncio.gather(version.task, return_exceptions=True)
        if not version.own:
            await asyncio.to_thread(shutil.rmtree, version.folder, ignore_errors=True)

    def _found(self, request: web.Request) -> RelayedVersion:
        found = request.app[_VERSIONS].get(request.match_info["id"])
        if found is None:
            raise web.HTTPNotFound(text="no such version was announced here")
        return found

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response({"id": request.match_info["id"]} | self._found(request).status())

    async def _listing(self, request: web.Request) -> web.Response:
        return self._answer(version := self._found(request), await version.listing())

    async def _block(self, request: web.Request) -> web.StreamResponse:
        version = self._found(request)
        try:
            if not await version.has(number := int(request.match_info["number"])):
                return self._answer(version, None)
            async with request.app[_SENDERS]:
                return await _sent(request, *version.place(number), self.patience.body_s)
        except (IndexError, OSError) as gone:
            raise web.HTTPGone(text=str(gone)) from None

    def _answer(self, version: RelayedVersion, content: bytes | None) -> web.Response:
        if content is not None:
            return web.Response(body=content, content_type="application/octet-stream")
        if version.state == "failed":
            raise web.HTTPGone(text=version.error)
        return web.Response(status=202)


async def _sent(request: web.Request, file: Path, first: int, nbytes: int, limit_s: float) -> web.StreamResponse:
    """Sends a part of a file by the kernel's copy, in a third of the time that copying through this process takes."""
    answer = web.StreamResponse(headers={"Content-Length": str(nbytes)})
    with file.open("rb") as content:
        await answer.prepare(request)
        try:
            async with asyncio.timeout(limit_s):
                if request.transport is not None:
                    await asyncio.get_running_loop().sendfile(request.transport, content, first, nbytes)
            await answer.write_eof()
        except (OSError, RuntimeError):  # the client is gone, or hangs
            if request.transport is not None:
                request.transport.abort()  # only a broken connection shows that the rest is missing
    return answer


_SESSION = web.AppKey("session", aiohttp.ClientSession)
_VERSIONS = web.AppKey("versions", dict[str, RelayedVersion])
_SENDERS = web.AppKey("senders", asyncio.Semaphore)


def main() -> None:
    """Serves until the process is ended."""
    parser = command_line.parser("publication.relays.server", (__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--folder", required=True, type=Path, help="folder of its own for versions: /dev/shm/relay, or a disk"
    )
    parser.add_argument("--own", type=Path, help="on the learner's host: the folder that it publishes to")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=9100, help="port to listen on")
    parser.add_argument("--keep", type=int, default=2, help="newest versions kept")
    parser.add_argument("--least_mb_s", type=float, default=10.0, help="MB/s below which another relay is by-passed")
    given = parser.parse_args()
    token: Any = os.environ.get(serving.TOKEN_VARIABLE, "")
    try:
        patience = Patience(least_rate=1e6 * given.least_mb_s)
        relay = Relay(folder=given.folder, token=token, own=given.own, keep=given.keep, patience=patience)
    except ValueError as wrong:
        parser.error(str(wrong))
    serving.serve(relay.application(), relay.slow_clients, given.host, given.port)


if __name__ == "__main__":
    command_line.ended(main)
