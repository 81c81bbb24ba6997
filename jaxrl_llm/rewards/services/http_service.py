"""Shared parts of the reward servers: whom they answer, a bearer token, bodies of bounded size, a queue."""

import argparse
import asyncio
import hmac
import json
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.datastructures import Headers
from fastapi.responses import JSONResponse

from jaxrl_llm import serving
from jaxrl_llm.serving import Patience

T = TypeVar("T")
MOST_BYTES = 32 * 2**20


class Refused(Exception):
    """Raised for a request that is answered with a status and a reason."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


def guarded(token: str = "", lifespan: Any = None, most_bytes: int = MOST_BYTES) -> FastAPI:
    """Returns an application without pages, which refuses foreign sites, and whose every path but /health asks for `token`, if there is one.

    Args:
      lifespan: context around the serving, as FastAPI takes it.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.patience = Patience()

    app.add_middleware(_Door, token=token, most_bytes=most_bytes, patience=app.state.patience)

    @app.exception_handler(Refused)
    async def refuse(request: Request, error: Refused) -> Response:
        del request
        later = {"Retry-After": "1"} if error.status == 503 else None
        return JSONResponse({"error": str(error)}, error.status, later)

    return app


class _Door:
    """The outermost layer of an application, before anything of a body is read: foreign sites, the token, the body's size.

    With a token every host name is answered, as a foreign site cannot know it; without, the names of loopback alone.
    """

    def __init__(self, app: Any, token: str, most_bytes: int, patience: Patience) -> None:
        self.app, self.token, self.most_bytes, self.patience = app, token, most_bytes, patience

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        peer = tuple(scope.get("client") or ())
        self.patience.begin(peer)
        try:
            if refused := self._refused(Headers(scope=scope), scope):
                await JSONResponse({"error": refused[1]}, refused[0])(scope, receive, send)
            else:
                await self.app(scope, receive, send)
        finally:
            self.patience.end(peer)

    def _refused(self, headers: Headers, scope: Any) -> tuple[int, str] | None:
        posts = scope["method"] == "POST"
        if scope["path"] != "/health" and self.token:
            given = headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
                return 401, "a bearer token is needed"
        if refused := serving.refusal(headers, posts, None if self.token else serving.LOOPBACK_NAMES):
            return refused
        size = headers.get("content-length", "")
        if posts and not size.isdigit():
            return 411, "the header Content-Length is needed"
        if posts and int(size) > self.most_bytes:
            return 413, f"a body has at most {self.most_bytes} bytes (got {size})"
        return None


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, which is cancelled where the client goes away; the body of the request has been read."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Refused("the client went away", 499)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def body_of(request: Request) -> dict[str, Any]:
    """Returns the JSON object of a request; raises Refused for anything else."""
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
    """Adds the options for a server's address and token."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; others than loopback need a token")
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--token_env", default="", help="environment variable that holds the bearer token")


def token_of(host: str, token_env: str) -> str:
    """Returns the token that the variable holds; raises ValueError where it is unset, or missing on an open address."""
    token = os.environ.get(token_env, "") if token_env else ""
    if token_env and not token:
        raise ValueError(f"--token_env: the environment variable {token_env} is not set")
    if not token and not serving.loopback(host):
        raise ValueError(f"--host {host} can be reached from other machines: give a token by --token_env")
    return token


def server(app: FastAPI, host: str, port: int) -> Any:
    """Returns a uvicorn server of an application of `guarded`, which closes connections that keep it waiting; `run` serves."""
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
    """A queue that gathers the items of several requests into batches that one thread works on.

    It is written by hand for three reasons: items of callers that have gone are left out, items are refused where too many wait,
    and where a batch fails, only the items that fail alone get the error.

    Args:
      work: items -> as many results; runs in the thread.
      size: largest number of items of a batch.
      wait_s: seconds that a batch waits for more items.
      most_waiting: number of items in the queue from which on a request is refused (503).
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
        """Returns the result of each item, in their order."""
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
            batch = [(item, future) for item, future in await self._next() if not future.done()]
            if not batch:
                continue  # those who asked have gone
            found = await self._worked([item for item, _ in batch])
            for (_, future), result in zip(batch, found, strict=True):
                if future.done():
                    continue
                if isinstance(result, Refused):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    async def _worked(self, items: list[Any]) -> list[Any]:
        """Returns the result of each item, or its error: where a batch fails, each of its items is worked on alone."""
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
