"""The gateway: one HTTP server through which any agent calls the policy, each with the address and the secret of its session.

POST {base}/chat/completions    GET {base}/models                  base = http://HOST:PORT/s/SESSION/v1
POST http://HOST:PORT/s/SESSION/inference/v1/generate              GET http://HOST:PORT/health
"""

import asyncio
import hashlib
import hmac
import json
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from jaxrl_llm import components, serving
from jaxrl_llm.agents import chat_request, chat_route, generate_route
from jaxrl_llm.agents.chat_route import Chat, ChatRenderer
from jaxrl_llm.agents.service import COLLECTIONS, TokenService
from jaxrl_llm.agents.session import Session
from jaxrl_llm.agents.wire import Answer, BadRequest, Once, events, failure
from jaxrl_llm.protocols import Endpoint

_MOST_BYTES = 1 << 26  # most bytes of a request, as of a conversation of millions of tokens
_SHORTEST_TOKEN = 16
_AT_ONCE = 8  # most connections and requests that are accepted in one turn of the event loop
_WAITING = 4096  # most connections that wait

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """Settings of the gateway: where it listens, and how it serves.

    Attributes:
      host: address to listen on; agents on other machines need a token.
      port: port to listen on; 0 takes a free one.
      token_variable: environment variable of a token that precedes each session's secret; empty for none.
      passed: names of unknown sampling parameters that the generate route accepts.
      silence_s: seconds without an event after which a comment keeps a stream open.
      grace_s: seconds for which a request goes on after its client has gone, so that a retry can take it over.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token_variable: str = ""
    passed: tuple[str, ...] = ()
    silence_s: float = 15.0
    grace_s: float = 2.0

    def __post_init__(self) -> None:
        components.within(self, "[0, 65535]", "port")
        components.above(self, 0, "silence_s", "grace_s")

    def token(self) -> str:
        """Returns the token; raises ValueError where it is not set, too short, or missing on an address that other machines reach."""
        token = os.environ.get(self.token_variable, "") if self.token_variable else ""
        if self.token_variable and len(token) < _SHORTEST_TOKEN:
            raise ValueError(
                f"Gateway.token_variable names {self.token_variable!r}, which must hold a random token of at least {_SHORTEST_TOKEN} "
                f"characters (got {len(token)})"
            )
        if not token and not serving.loopback(self.host):
            raise ValueError(
                f"Gateway.host {self.host!r} can be reached from other machines: set Gateway.token_variable to an environment variable "
                "that holds a token, or listen on 127.0.0.1"
            )
        return token

    async def start(self, service: TokenService, rendering: ChatRenderer | None = None) -> "RunningGateway":
        """Listens, and returns the running gateway; without `rendering` it has the generate route alone.

        Raises:
          ValueError: see `token`.
          OSError: the port cannot be used.
        """
        running = RunningGateway(service=service, rendering=rendering, config=self, token=self.token())
        await running.open()
        return running


@dataclass(eq=False, kw_only=True)
class RunningGateway:
    """A gateway that listens."""

    service: TokenService
    rendering: ChatRenderer | None
    config: Gateway
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        self.chat = None if self.rendering is None else Chat(service=self.service, rendering=self.rendering)
        self._once: dict[str, Once[Answer]] = {}
        self._patience = serving.Patience()
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._runner: web.AppRunner | None = None
        self._watch: asyncio.Task[None] | None = None
        self.port = 0

    # -- the server ----------------------------------------------------------------------------------------------------

    def application(self) -> web.Application:
        """Returns the application with the gateway's routes."""
        names = None if self.token else serving.LOOPBACK_NAMES
        app = web.Application(
            client_max_size=_MOST_BYTES, middlewares=[serving.middleware(self._patience), _shaped, serving.guard(names)]
        )  # fmt: skip
        app.router.add_get("/health", _health)
        app.router.add_get("/s/{session}/v1/models", self._models)
        app.router.add_post(f"/s/{{session}}{generate_route.PATH}", self._generate)
        if self.chat is not None:
            app.router.add_post("/s/{session}/v1/chat/completions", self._chat)
        return app

    async def open(self) -> None:
        """Starts to listen; raises OSError where the port cannot be used."""
        runner = web.AppRunner(self.application(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        family = socket.AF_INET6 if ":" in self.config.host else socket.AF_INET
        try:
            listening = socket.create_server((self.config.host, self.config.port), family=family)
        except OSError:
            await runner.cleanup()
            raise
        await web.SockSite(runner, listening, backlog=_AT_ONCE).start()
        listening.listen(_WAITING)  # more may wait than are accepted in one turn of the event loop
        assert runner.server is not None
        self._runner, self.port = runner, runner.addresses[0][1]
        self._watch = asyncio.create_task(serving.looking(runner.server, self._patience))
        COLLECTIONS.begin()

    async def close(self) -> None:
        """Ends all requests and stops listening; sessions stay open."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._runner is not None:
            COLLECTIONS.end()
            runner, self._runner = self._runner, None
            await runner.cleanup()
        if self.chat is not None:
            self.chat.close()

    def endpoint(self, session: Session) -> Endpoint:
        """Returns the address and key with which an agent on this machine calls the policy for a session."""
        host = serving.reachable(self.config.host)
        base = f"http://{host}:{self.port}/s/{session.id}/v1"
        return Endpoint(base_url=base, key=self._key(session), model=self.service.model)

    def _key(self, session: Session) -> str:
        return f"{self.token}.{session.key}" if self.token else session.key

    # -- requests ------------------------------------------------------------------------------------------------------

    def _session(self, request: web.Request) -> Session:
        """Returns the session of a request; raises BadRequest (401) unless the request names one and has its secret."""
        session = self.service.session(request.match_info["session"])
        given = request.headers.get("authorization", "").encode()
        if session is None or not hmac.compare_digest(given, f"Bearer {self._key(session)}".encode()):
            raise BadRequest("no session has this address and this key", code="invalid_api_key", status=401)
        return session

    async def _read(
        self, request: web.Request, read: Callable[[dict[str, Any], Session, str], T]
    ) -> tuple[T, Session, bytes]:
        """Returns the parsed request, its session, and a digest of its body.

        Few are read at a time, with a turn of the event loop between them, so that simultaneous requests do not block it.
        """
        session = self._session(request)
        text = await serving.body(request, self._patience.body_s)
        async with self._turns:
            await asyncio.sleep(0)
            body = _object(text)
            asked = read(body, session, self._adapter(body.get("model")))
            return asked, session, hashlib.blake2b(request.path.encode() + b"\0" + text, digest_size=16).digest()

    def _adapter(self, model: Any) -> str:
        """Returns the name of the loaded adapters that a request's `model` names, "" for the policy; raises BadRequest (404) for others."""
        policy, adapters = self.service.model, self.service.adapters
        if model is None or model == policy:
            return ""
        if model not in adapters:
            names = ", ".join(map(repr, (policy, *adapters)))
            raise BadRequest(f"there is no model {model!r}: choose {names}", "model", "model_not_found", status=404)
        return str(model)

    async def _models(self, request: web.Request) -> web.Response:
        """Lists the policy, and the loaded adapters, whose parent it is as in vLLM's list."""
        session, policy = self._session(request), self.service.model
        shared = {"object": "model", "created": 0, "owned_by": "jaxrl_llm", "max_model_len": session.max_length}
        parents = {policy: None} | dict.fromkeys(self.service.adapters, policy)
        return web.json_response(
            {"object": "list", "data": [{"id": name, **shared, "parent": parent} for name, parent in parents.items()]}
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        read = partial(generate_route.read, passed=frozenset(self.config.passed))
        asked, session, digest = await self._read(request, read)
        work = self._answered(request, session, digest, lambda: generate_route.generate(self.service, session, asked))
        if not asked.stream:
            return web.Response(text=(await work).text, content_type="application/json")

        async def said() -> Any:
            return generate_route.chunks((await work).body)

        return await events(request, said(), self.config.silence_s)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        assert self.chat is not None
        chat = self.chat
        asked, session, digest = await self._read(request, chat_request.read)
        work = self._answered(request, session, digest, lambda: chat.answer(session, asked))
        if not asked.stream:
            return web.Response(text=(await work).text, content_type="application/json")

        async def said() -> Any:
            return chat_route.chunks((await work).body, asked.counted)

        return await events(request, said(), self.config.silence_s)

    async def _answered(
        self, request: web.Request, session: Session, digest: bytes, work: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """Returns the answer to a request, or the first one where it is a retry."""
        key = request.headers.get("idempotency-key", "")
        again = bool(key) or request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        return await self._retries(session).get((key, digest), again, work)

    def _retries(self, session: Session) -> Once[Answer]:
        """Returns the requests of a session, and forgets those of closed sessions."""
        if session.id not in self._once:
            for old in [name for name in self._once if (s := self.service.session(name)) is None or s.closed]:
                del self._once[old]
                if self.chat is not None:
                    self.chat.forget(old)

            self._once[session.id] = Once(
                drop=lambda answer: session.drop(*answer.calls),
                restore=lambda answer: session.restore(*answer.calls),
                retried=lambda: session.counters.update(retries=1),
                grace_s=self.config.grace_s,
            )
        return self._once[session.id]


def _object(text: bytes) -> dict[str, Any]:
    """Parses the JSON object of a body; raises BadRequest for anything else."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"the body is a JSON object (got {type(body).__name__})")
    return body


async def _health(request: web.Request) -> web.Response:
    del request
    return web.json_response({"status": "ok"})


@web.middleware
async def _shaped(request: web.Request, handler: serving.Handler) -> web.StreamResponse:
    """Gives every error OpenAI's shape."""
    try:
        return await handler(request)
    except (ConnectionResetError, asyncio.CancelledError):
        raise
    except Exception as error:
        return failure(error)
