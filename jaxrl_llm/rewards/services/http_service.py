"""What the reward servers have in common: loopback unless told otherwise, a bearer token, bodies of bounded size, a queue."""

import argparse
import asyncio
import hmac
import ipaddress
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from jaxrl_llm.serving import Patience

MOST_BYTES = 32 * 2**20


class Refused(Exception):
    """A request that is answered with a status and a reason."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


def guarded(token: str = "", lifespan: Any = None, most_bytes: int = MOST_BYTES) -> FastAPI:
    """An application without pages, whose every path but /health asks for `token` where there is one.

    Args:
      lifespan: what goes around the serving, as FastAPI has it.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.patience = Patience()

    @app.middleware("http")
    async def check(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.url.path != "/health" and token:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return JSONResponse({"error": "a bearer token is needed"}, 401)
        if request.method == "POST":
            size = request.headers.get("content-length", "")
            if not size.isdigit():
                return JSONResponse({"error": "the header Content-Length is needed"}, 411)
            if int(size) > most_bytes:
                return JSONResponse({"error": f"a body has at most {most_bytes} bytes (got {size})"}, 413)
        return await answer(request)

    @app.middleware("http")  # the outermost
    async def counted(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        peer = tuple(request.client or ())
        app.state.patience.begin(peer)
        try:
            return await answer(request)
        finally:
            app.state.patience.end(peer)

    @app.exception_handler(Refused)
    async def refuse(request: Request, error: Refused) -> Response:
        del request
        return JSONResponse({"error": str(error)}, error.status)

    return app


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object of a request; raises Refused for anything else."""
    limit_s = request.app.state.patience.body_s
    try:
        async with asyncio.timeout(limit_s):
            text = await request.body()
        body = json.loads(text)
    except TimeoutError as error:
        raise Refused(f"the body was not whole within {limit_s:g} s", 408) from error
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is no JSON: {error}") from error
    except Exception as error:
        if type(error).__name__ != "ClientDisconnect":  # of starlette
            raise
        raise Refused("the connection ended within the body") from error
    if not isinstance(body, dict):
        raise Refused(f"the body must be a JSON object (got {type(body).__name__})")
    return body


def options(parser: argparse.ArgumentParser, port: int) -> None:
    """Adds where a server listens."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; others than loopback need a token")
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--token_env", default="", help="environment variable that holds the bearer token")


def token_of(host: str, token_env: str) -> str:
    """The token that the variable holds; raises ValueError where it is unset, or missing on an open address."""
    token = os.environ.get(token_env, "") if token_env else ""
    if token_env and not token:
        raise ValueError(f"--token_env: the environment variable {token_env} is not set")
    if not token and not loopback(host):
        raise ValueError(f"--host {host} can be reached from other machines: give a token by --token_env")
    return token


def loopback(host: str) -> bool:
    """Whether the address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def server(app: FastAPI, host: str, port: int) -> Any:
    """A uvicorn server of an application of `guarded`, which closes connections that keep it waiting; `run` serves."""
    import uvicorn

    class Server(uvicorn.Server):
        async def on_tick(self, counter: int) -> bool:
            app.state.patience.look(getattr(c, "transport", None) for c in list(self.server_state.connections))
            return await super().on_tick(counter)

    return Server(uvicorn.Config(app, host=host, port=port, log_level="warning"))


def serve(app: FastAPI, host: str, port: int) -> None:
    """Serves until it is stopped."""
    server(app, host, port).run()


class Batcher:
    """Gathers the items of several requests into batches that one thread works on.

    Args:
      work: items -> as many results; runs in the thread.
      size: most items of a batch.
      wait_s: seconds that a batch waits for more items.
      most_waiting: items in the queue from which on a request is refused (503).
    """

    def __init__(
        self,
        work: Callable[[list[Any]], Sequence[Any]],
        size: int = 32,
        wait_s: float = 0.005,
        most_waiting: int = 8192,
    ) -> None:
        self.work, self.size, self.wait_s, self.most_waiting = work, size, wait_s, most_waiting
        self._queue: asyncio.Queue[tuple[Any, asyncio.Future[Any]]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._task: asyncio.Task[None] | None = None

    async def submit(self, items: Sequence[Any]) -> list[Any]:
        """The result of each item, in their order."""
        if self._queue.qsize() + len(items) > self.most_waiting:
            raise Refused(f"{self._queue.qsize()} texts are waiting already", 503)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in items]
        for item, future in zip(items, futures):
            self._queue.put_nowait((item, future))
        return list(await asyncio.gather(*futures))

    async def _run(self) -> None:
        while True:
            batch = await self._next()
            found = await self._worked([item for item, _ in batch])
            for (_, future), result in zip(batch, found, strict=True):
                if future.done():
                    continue
                if isinstance(result, Refused):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    async def _worked(self, items: list[Any]) -> list[Any]:
        """The result of each item, or its error: where a batch fails, each of its items is worked on alone."""
        loop = asyncio.get_running_loop()
        try:
            found = list(await loop.run_in_executor(self._thread, self.work, items))
            if len(found) != len(items):
                raise RuntimeError(f"{len(found)} results of {len(items)} texts")
            return found
        except Exception as error:
            if len(items) == 1:
                return [Refused(f"{type(error).__name__}: {error}", 500)]
        return [found for item in items for found in await self._worked([item])]

    async def _next(self) -> list[tuple[Any, "asyncio.Future[Any]"]]:
        batch = [await self._queue.get()]
        deadline = asyncio.get_running_loop().time() + self.wait_s
        while len(batch) < self.size:
            left = deadline - asyncio.get_running_loop().time()
            try:
                batch.append(self._queue.get_nowait() if left <= 0 else await asyncio.wait_for(self._queue.get(), left))
            except (TimeoutError, asyncio.QueueEmpty):
                break
        return batch
