"""A proxy of a vLLM server for learners on other hosts, which checks a token and passes on the requests that a learner needs.

    JAXRL_LLM_TOKEN=... python -m jaxrl_llm.samplers.vllm_proxy --server http://127.0.0.1:8000 --host 10.0.0.5 --port 9000

vLLM's development endpoints, through which weights are updated, require no key, so vLLM itself listens on loopback alone. Each
request to the proxy carries `Authorization: Bearer TOKEN`. It speaks plain HTTP: between hosts, use a private network.

    GET /health    GET /metrics                POST /pause?mode=keep&clear_cache=true    POST /resume
    POST /generate {"token_ids": ...} or {"prompt": ...}, as /inference/v1/generate or /v1/completions take it
    POST /tokens {"token_ids": ...}, as our own route in vLLM takes it (vllm_route)
    POST /stage {"path", "version"}            POST /stage_status                        POST /commit {"version", "mark"}

At SIGTERM it takes no more requests, has vLLM cut those in flight, whose tokens go to the learner, and ends; /health answers 503
meanwhile. So a host that is shut down returns its unfinished requests.
"""

import asyncio
import contextlib
import ipaddress
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from jaxrl_llm import command_line, serving
from jaxrl_llm.publication import vllm_route
from jaxrl_llm.serving import Patience

_LARGEST_BODY = 1 << 26  # bytes; a prompt of a million tokens fits
_CONNECT_S = 5.0
_QUIET_S = 1.0  # seconds in which a learner asks for the weights that an answer came from
_TO_THE_END = ("/stage_status", "/metrics")  # routes that a leaving server still answers
_PAUSE_ARGUMENTS = ("mode", "clear_cache")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """The proxy of one server.

    Attributes:
      server: address of the vLLM server, on loopback.
      token: token that a request must carry, of at least 16 characters.
      api_key: vLLM's own key, or "" where it has none.
      generate_s: most seconds that a generation may take.
      control_s: most seconds that any other step may take.
      leave_s: most seconds between SIGTERM and the end.
      patience: limits of connections that do not complete a request.
    """

    server: str
    token: str
    api_key: str = ""
    generate_s: float = 3600.0
    control_s: float = 600.0
    leave_s: float = 8.0
    patience: Patience = field(default_factory=Patience, repr=False)

    def __post_init__(self) -> None:
        serving.check_token(self.token)
        if not _on_loopback(self.server):
            raise ValueError(
                f"--server {self.server!r} is not on loopback: start vLLM with --host 127.0.0.1, "
                "its development endpoints ask for no key"
            )

    def application(self) -> web.Application:
        """Returns the application, whose routes all require the token."""
        app = web.Application(
            client_max_size=_LARGEST_BODY,
            middlewares=[
                serving.middleware(self.patience),
                serving.token_guard(self.token),
                self._explained,
                serving.guard(None),
            ],
        )
        app[_LEAVING], app[_FLYING] = asyncio.Event(), _Flying()
        app.cleanup_ctx.append(self._connections)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/tokens", self._generate)
        app.router.add_post("/stage", self._method("stage", "path", "version"))
        app.router.add_post("/stage_status", self._method("stage_status"))
        app.router.add_post("/commit", self._commit)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        return app

    async def _connections(self, app: web.Application) -> AsyncIterator[None]:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)  # vLLM closes idle connections after 5 s
        async with aiohttp.ClientSession(self.server, headers=headers, connector=connector) as session:
            app[_SESSION] = session
            yield

    @property
    def _explained(self) -> Any:
        """A middleware that refuses requests while the server leaves, and names vLLM in errors where vLLM fails."""

        @web.middleware
        async def explained(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.app[_LEAVING].is_set() and request.path not in _TO_THE_END:
                raise web.HTTPServiceUnavailable(text=vllm_route.LEAVING)
            task = asyncio.current_task()
            assert task is not None
            request.app[_FLYING].tasks.add(task)
            try:
                return await handler(request)
            except TimeoutError:
                raise web.HTTPGatewayTimeout(text=f"vLLM at {self.server} did not answer in time") from None
            except aiohttp.ClientError as failure:
                raise web.HTTPBadGateway(text=f"vLLM at {self.server} is not reached: {failure!r}") from None
            finally:
                request.app[_FLYING].tasks.discard(task)

        return explained

    async def leave(self, app: web.Application) -> None:
        """Has vLLM cut requests in flight, and returns when the learner has their tokens and has checked the weights, after `leave_s` at most."""
        app[_LEAVING].set()
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(self.leave_s):
                cut = {"mode": "abort", "clear_cache": "true"}
                async with app[_SESSION].post("/pause", params=cut) as answer:
                    await answer.read()
                while app[_FLYING].tasks:
                    await asyncio.wait(app[_FLYING].tasks)
                await asyncio.sleep(_QUIET_S)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        health = await self._ask(request, "GET", "/health")
        if health.status != 200:
            return health
        return await self._ask(request, "GET", "/version")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """Passes the answer on as it comes; a client that goes away closes the request to vLLM, which ends it."""
        content = await self._json(request)
        route = "/inference/v1/generate" if "token_ids" in content else "/v1/completions"
        route = vllm_route.ROUTE if request.path == "/tokens" else route
        limit = aiohttp.ClientTimeout(total=self.generate_s, sock_connect=_CONNECT_S)
        async with request.app[_SESSION].post(route, json=content, timeout=limit) as answer:
            passed = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await passed.prepare(request)
            try:
                async for chunk in answer.content.iter_any():
                    await passed.write(chunk)
                await passed.write_eof()
            except (TimeoutError, aiohttp.ClientError):
                if (
                    request.transport is not None
                ):  # the status is sent: only a broken connection shows that the rest is missing
                    request.transport.abort()
            return passed

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        arguments = {name: request.query[name] for name in _PAUSE_ARGUMENTS if name in request.query}
        return await self._ask(request, "POST", "/pause", params=arguments)

    async def _resume(self, request: web.Request) -> web.StreamResponse:
        return await self._ask(request, "POST", "/resume")

    def _method(self, name: str, *arguments: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Returns a handler that calls a method of the plugin on every rank."""

        async def handler(request: web.Request) -> web.Response:
            content = await self._json(request) if arguments else {}
            missing = [argument for argument in arguments if argument not in content]
            if missing:
                raise web.HTTPBadRequest(text=f"{request.path} needs {missing} in its JSON body")
            given = {argument: str(content[argument]) for argument in arguments}
            body = {"method": name, "kwargs": given}
            answer = await self._ask(request, "POST", "/collective_rpc", json=body)
            if answer.status in (404, 405):
                raise web.HTTPConflict(
                    text=f"vLLM at {self.server} runs without its development endpoints, through which weights are "
                    "updated: start it with VLLM_SERVER_DEV_MODE=1 (on loopback alone)"
                )
            return answer

        return handler

    async def _commit(self, request: web.Request) -> web.StreamResponse:
        """Commits and, where vLLM stores a number of its weights (0.30 and newer), sets that too."""
        answer = await self._method("commit", "version", "mark")(request)
        if answer.status == 200 and not any(rank["error"] for rank in json.loads(answer.text or "{}")["results"]):
            version = str((await self._json(request))["version"])
            label = await self._ask(request, "POST", "/update_weight_version", json={"new_version": version})
            if label.status not in (200, 404, 405):
                return label
        return answer

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        """Returns vLLM's counters, by which the learner checks its progress."""
        return await self._ask(request, "GET", "/metrics")

    async def _json(self, request: web.Request) -> Mapping[str, Any]:
        try:
            content = json.loads(await serving.body(request, self.patience.body_s))
        except (ValueError, RecursionError) as wrong:
            raise web.HTTPBadRequest(text=f"the body is no JSON: {wrong}") from None
        if not isinstance(content, dict):
            raise web.HTTPBadRequest(text="the body is no JSON object")
        return content

    async def _ask(self, request: web.Request, verb: str, route: str, **content: Any) -> web.Response:
        limit = aiohttp.ClientTimeout(total=self.control_s, sock_connect=_CONNECT_S)
        async with request.app[_SESSION].request(verb, route, timeout=limit, **content) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)


@dataclass(eq=False, kw_only=True)
class _Flying:
    """The requests that are being answered."""

    tasks: set[asyncio.Task[Any]] = field(default_factory=set)


_SESSION = web.AppKey("session", aiohttp.ClientSession)
_LEAVING = web.AppKey("leaving", asyncio.Event)
_FLYING = web.AppKey("flying", _Flying)


def _on_loopback(address: str) -> bool:
    parts = urlsplit(address)
    try:
        host = ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        return parts.scheme == "http" and parts.hostname == "localhost"
    return parts.scheme == "http" and host.is_loopback


def main() -> None:
    """Serves until the process is ended."""
    parser = command_line.parser("samplers.vllm_proxy", (__doc__ or "").partition("\n")[0])
    parser.add_argument("--server", required=True, help="address of the vLLM server, on loopback")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=9000, help="port to listen on")
    given = parser.parse_args()
    try:
        proxy = Proxy(
            server=given.server,
            token=os.environ.get(serving.TOKEN_VARIABLE, ""),
            api_key=os.environ.get("VLLM_API_KEY", ""),
        )
    except ValueError as wrong:
        parser.error(str(wrong))
    app = proxy.application()
    serving.serve(app, proxy.patience, given.host, given.port, lambda: proxy.leave(app))


if __name__ == "__main__":
    command_line.ended(main)
