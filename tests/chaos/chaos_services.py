"""Our services under malformed requests, wrong tokens and clients that never finish a request."""

import asyncio
import json
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chaos_fuzz
from aiohttp import web
from aiohttp.test_utils import TestServer
from chaos_table import Row, Stopwatch, Trial
from tiny_classifier import write_bert
from viewer_rows import rollout, write_run

from jaxrl_llm import serving
from jaxrl_llm.eval.viewer.folders import find
from jaxrl_llm.eval.viewer.server import Pages
from jaxrl_llm.rewards.services import classifier_server, http_service, sandbox
from jaxrl_llm.rewards.services.hf_classifier import HfClassifier
from jaxrl_llm.rewards.services.sandbox_run import Sandbox
from jaxrl_llm.samplers.vllm_proxy import Proxy
from jaxrl_llm.serving import Patience

TOKEN = "a token of more than sixteen letters"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
IMPATIENT_S = 0.5  # what connections may take where slow ones are tried


@dataclass(frozen=True, kw_only=True)
class Up:
    """A service that runs.

    Attributes:
      port: of loopback.
      headers: what its requests carry.
      bodies: (path, valid body) of its routes.
      right: (raw request, what its answer must hold) of a request that works.
      open_paths: paths that need no token; None where no path does.
      reached: requests that got through to what is behind it.
    """

    port: int
    headers: dict[str, str]
    bodies: list[tuple[str, Any]]
    right: tuple[bytes, bytes]
    open_paths: tuple[str, ...] | None
    reached: list[Any]


def raw(verb: str, path: str, headers: dict[str, str], content: Any = None) -> bytes:
    text = b"" if content is None else json.dumps(content).encode()
    lines = [
        f"{verb} {path} HTTP/1.1",
        "Host: localhost",
        "Connection: close",
        "Content-Type: application/json",
        *(f"{n}: {v}" for n, v in headers.items()),
    ]
    return "\r\n".join([*lines, f"Content-Length: {len(text)}", "", ""]).encode() + text


@asynccontextmanager
async def by_aiohttp(app: web.Application, patience: Patience) -> AsyncIterator[int]:
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    assert runner.server is not None
    watch = asyncio.create_task(serving.looking(runner.server, patience))
    try:
        yield runner.addresses[0][1]
    finally:
        watch.cancel()
        await runner.cleanup()


@asynccontextmanager
async def by_uvicorn(app: Any) -> AsyncIterator[int]:
    server = http_service.server(app, "127.0.0.1", 0)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it writes a line for each malformed request
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await asyncio.to_thread(thread.join, 30)


@asynccontextmanager
async def proxy(folder: Path, patience_s: float) -> AsyncIterator[Up]:
    """The proxy before a server that notes what reaches it."""
    reached: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        text = await request.read()
        content = json.loads(text) if text else None
        reached.append((request.path, content))
        if request.path == "/collective_rpc":
            return web.json_response({"results": [{"version": 1, "error": ""}]})
        return web.json_response({"choices": [], "version": "0.32.0"})

    upstream = web.Application(client_max_size=1 << 27)
    upstream.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(upstream) as server:
        address = str(server.make_url("/")).rstrip("/")
        one = Proxy(server=address, token=TOKEN, patience=Patience(limit_s=patience_s, body_s=patience_s))
        async with by_aiohttp(one.application(), one.patience) as port:
            generate = {
                "token_ids": [1, 2, 3],
                "sampling_params": {"n": 2, "max_tokens": 5},
                "stream": False,
                "model": "policy",
            }
            yield Up(
                port=port, headers=BEARER, open_paths=(), reached=reached,
                bodies=[("/generate", generate), ("/stage", {"path": "/p/v1", "version": 1}), ("/commit", {"version": 1})],
                right=(raw("POST", "/stage", BEARER, {"path": "/p", "version": 1}), b'"results"'),
            )  # fmt: skip


@asynccontextmanager
async def classifier(folder: Path, patience_s: float) -> AsyncIterator[Up]:
    """The classifier server with a random BERT."""
    if not (folder / "config.json").is_file():
        write_bert(folder)
    model = HfClassifier(model=str(folder), label="safe", max_tokens=24)
    model.load()
    app = classifier_server.application(model, TOKEN, wait_s=0.0)
    app.state.patience.limit_s = app.state.patience.body_s = patience_s
    async with by_uvicorn(app) as port:
        texts = ["the cat sat", ["a mat", "good"], [{"role": "user", "content": "it was"}]]
        yield Up(
            port=port, headers=BEARER, open_paths=("/health",), reached=[],
            bodies=[("/score", {"texts": texts}), ("/classify", {"input": texts})],
            right=(raw("POST", "/score", BEARER, {"texts": ["the cat"]}), b'"count":1'),
        )  # fmt: skip


@asynccontextmanager
async def programs(folder: Path, patience_s: float) -> AsyncIterator[Up]:
    """The sandbox; what is varied has no tests, so that few programs run."""
    app = sandbox.application(Sandbox(workers=2), TOKEN)
    app.state.patience.limit_s = app.state.patience.body_s = patience_s
    async with by_uvicorn(app) as port:
        empty = {"program": "x = 1", "tests": [], "max_execution_time": 1.0}
        works = {"program": "x = 1", "tests": ["assert x == 1", "assert x == 2"], "max_execution_time": 20.0}
        yield Up(
            port=port, headers=BEARER, open_paths=("/health",), reached=[],
            bodies=[("/test_program", empty), ("/test_program_stdio", empty)],
            right=(raw("POST", "/test_program", BEARER, works), b'"results":[1,0]'),
        )  # fmt: skip


@asynccontextmanager
async def viewer(folder: Path, patience_s: float) -> AsyncIterator[Up]:
    """The viewer of a run, which takes queries and no bodies."""
    write_run(folder / "run", {1: [rollout("a", "text", 1.0)]})
    pages = Pages(find([folder / "run"]))
    pages.patience.limit_s = patience_s
    for one in pages.shown.values():
        one.log.update()
        list(one.index.update())
    async with by_aiohttp(pages.application(), pages.patience) as port:
        # Under its own host name: the viewer refuses others.
        query = "/api/groups?run=run&step=1&after=%s&kind=%s&q=%s"
        yield Up(
            port=port, headers={}, open_paths=None, reached=[], bodies=[(query, {"after": "0"}), ("/api/%s?run=%s&names=%s", {})],
            right=(raw("GET", "/api/runs", {}), b'"reward": 1'),
        )  # fmt: skip


SERVICES: dict[str, Callable[[Path, float], Any]] = {
    "vllm_proxy": proxy, "classifier server": classifier, "sandbox service": programs, "viewer": viewer,
}  # fmt: skip


async def works(up: Up) -> bool:
    """Whether a right request gets the right answer."""
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
        writer.write(up.right[0])
        answer = await reader.read(-1)
        writer.close()
    return answer.startswith(b"HTTP/1.1 200") and up.right[1] in answer


def on(name: str, trial: Trial, act: Callable[[Up], Awaitable[Row]], patience_s: float = serving.HEAD_S) -> Row:
    """Runs a trial against a service, which must work afterwards."""

    async def run() -> Row:
        async with SERVICES[name](trial.folder, patience_s) as up:
            assert await works(up)
            row = await act(up)
            watch = Stopwatch()
            assert await works(up), f"{name} does not answer as before"
            row.recovered_s.append(watch.seconds)
            return row

    return asyncio.run(run())


def fuzzed(name: str) -> Callable[[Trial], Row]:
    def fault(trial: Trial) -> Row:
        """Every malformed request is answered without a 5xx, or its connection closed; none keeps the service."""
        rng, said = random.Random(trial.seed), Counter[str]()

        async def one(up: Up, turns: asyncio.Semaphore, path: str, valid: Any) -> None:
            if "%s" in path:
                path = path.replace("%s", "{}").format(*(_odd_query(rng) for _ in range(path.count("%s"))))
            sent, malformed = chaos_fuzz.request(rng, path, valid, up.headers)
            if name == "viewer" and rng.random() < 0.7:
                sent = sent.replace(b"POST ", b"GET ", 1)
            async with turns:
                found = await chaos_fuzz.status("127.0.0.1", up.port, sent, ends=malformed)
            assert found is None or found < 500, f"{name} answered {found} to {sent[:900]!r} (seed {trial.seed})"
            said["closed" if found is None else f"{found // 100}xx"] += 1

        async def act(up: Up) -> Row:
            turns = asyncio.Semaphore(16)
            await asyncio.gather(*(one(up, turns, *up.bodies[i % len(up.bodies)]) for i in range(trial.times)))
            assert all(content is None or isinstance(content, dict) for _, content in up.reached)
            outcome = ", ".join(f"{n} {kind}" for kind, n in sorted(said.items()))
            return Row(tried=trial.times, outcome=outcome, into=trial.times, out=said.total())

        return on(name, trial, act)

    return fault


def _odd_query(rng: random.Random) -> str:
    return rng.choice(
        ("", "0", "-1", "9" * 400, "1e9", "%00", "%ff%fe", "..%2f..", "run", "%F0%9F%98%80", "a" * 3000, "%s", "null")
    )


def wrong_token(name: str) -> Callable[[Trial], Row]:
    def fault(trial: Trial) -> Row:
        """401 for every token but the right one, and nothing reaches what is behind the door."""
        rng = random.Random(trial.seed)

        def token() -> str:
            i = rng.randrange(len(TOKEN))
            return rng.choice((
                "", "Bearer", "Bearer ", f"Bearer {TOKEN[:i]}", f"Bearer {TOKEN}x", f"bearer {TOKEN}", TOKEN, f"Basic {TOKEN}",
                f"Bearer {TOKEN[:i]}?{TOKEN[i + 1 :]}", f"Bearer  {TOKEN}", "Bearer \xe9\xff", "Bearer " + "a" * 5000,
            ))  # fmt: skip

        async def act(up: Up) -> Row:
            before = len(up.reached)
            for _ in range(trial.times):
                path, valid = rng.choice(up.bodies)
                given = token()
                sent = raw("POST", path, {"Authorization": given} if given else {}, valid)
                found = await chaos_fuzz.status("127.0.0.1", up.port, sent)
                assert found == 401, (name, given, found)
            assert len(up.reached) == before
            return Row(tried=trial.times, outcome="401 each, nothing got through", into=trial.times, out=trial.times)

        return on(name, trial, act)

    return fault


def slow_loris(name: str) -> Callable[[Trial], Row]:
    def fault(trial: Trial) -> Row:
        """Connections that send a letter at a time, of the head or of the body, are closed; others are answered meanwhile."""

        async def act(up: Up) -> Row:
            watch = Stopwatch()
            whole = raw("POST", up.bodies[0][0].replace("%s", "0"), up.headers, up.bodies[0][1]).replace(
                b"Connection: close\r\n", b""
            )

            async def drip(begin: bytes, letters: bytes) -> float:
                reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
                writer.write(begin)
                ended = asyncio.ensure_future(reader.read(-1))
                try:
                    for letter in letters:
                        writer.write(bytes([letter]))
                        await asyncio.wait({ended}, timeout=0.1)
                        if ended.done():
                            break
                    await asyncio.wait_for(ended, 20)
                except ConnectionError:
                    pass
                finally:
                    ended.cancel()
                    writer.transport.abort()
                return watch.seconds

            head = whole.index(b"\r\n\r\n") + 4
            kinds = [
                (b"", whole),
                (b"", whole[:3]),
                (whole[:head], whole[head:]),
            ]  # the head, a beginning alone, the body
            drips = [asyncio.create_task(drip(*kinds[i % 3])) for i in range(trial.times)]
            slowest = 0.0
            while not all(task.done() for task in drips):
                begin = time.monotonic()
                assert await works(up)
                slowest = max(slowest, time.monotonic() - begin)
                await asyncio.sleep(0.2)
            closed = [await task for task in drips]
            assert max(closed) < IMPATIENT_S + 4, "a connection outlived its time"
            outcome = (
                f"all closed after {max(closed):.1f} s (limit {IMPATIENT_S:g} s); others waited {slowest:.2f} s at most"
            )
            return Row(tried=trial.times, outcome=outcome, into=trial.times, out=len(closed))

        return on(name, trial, act, IMPATIENT_S)

    return fault
