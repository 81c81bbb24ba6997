"""A server that speaks vLLM's HTTP and draws from a toy distribution, with faults on request.

The toy policy: version v's log-prob of a token depends on the token before it alone, by the table `table(v)`.
"""

import asyncio
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from connections import broken_off

from jaxrl_llm.publication import vllm_route

VOCABULARY = 24


def table(version: int) -> np.ndarray:
    """Log-probs [V, V] of version `version`: row = the token before."""
    logits = np.random.default_rng(100 + version).normal(0, 1.5, (VOCABULARY, VOCABULARY))
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@dataclass(eq=False, kw_only=True)
class FakeVllm:
    """One server.

    Attributes:
      release: the vLLM version it plays.
      step_s: seconds a token takes.
      room: most sequences that are drawn at a time; further ones wait.
      dev: whether the development endpoints are there.
      extension: whether the worker extension is there.
      lists: whether our own route is there.
      status: {route: HTTP status} that is answered in place of the work.
      slow: {route, or "*" for any: seconds} before the answer.
      garbage: answers generations with something else.
      noise: what everything but /health is answered with, as it stands.
      stage_error: why nothing can be staged.
      commit_error: why nothing can be committed.
      commit_failures: how many commits fail from now on.
      commit_adds: what is added to the version that a commit says it loaded.
      off: added to every log-prob of a prompt.
      holds: a version whose table it scores prompts by, whatever was committed; None is the committed one.
      checks: whether its plugin compares what the model holds.
      off_drawn: {version: what is added to the log-probs of tokens that it draws}.
      adapters: {name: version} of adapters that it has loaded; None where it loads none.
      context: most tokens of a prompt and its response.
      host: address to listen on.
      bodies: generations that were asked for.
      begun: (prefix, seed) of the sequences that have a token.
      calls: control calls in order.
      counts: answered requests by route.
    """

    release: str = "0.32.0"
    step_s: float = 0.0
    room: int = 1 << 30
    dev: bool = True
    extension: bool = True
    lists: bool = False
    status: dict[str, int] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    garbage: bool = False
    noise: bytes | None = None
    stage_error: str = ""
    commit_error: str = ""
    commit_failures: int = 0
    commit_adds: int = 0
    off: float = 0.0
    holds: int | None = None
    checks: bool = True
    off_drawn: dict[int, float] = field(default_factory=dict)
    adapters: dict[str, int] | None = None
    context: int = 2**31
    host: str = "127.0.0.1"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    begun: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    port: int = 0
    version: int = -1
    label: str = "none"
    mark: str = ""
    frozen: bool = False  # it answers, and draws nothing
    repeats: bool = True  # whether equal seeds give equal draws
    counts_tokens: bool = True
    drawn: int = 0

    def __post_init__(self) -> None:
        self.going = asyncio.Event()
        self.going.set()
        self.active: dict[Any, None] = {}  # sequences that are being drawn, or wait
        self.aborted: set[object] = set()
        self.memory: dict[str, Any] = {}
        self.staged: tuple[int, str] = (-1, "idle")
        self.runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def spans(self) -> bool:
        return self.release >= "0.32"

    async def start(self) -> "FakeVllm":
        app = web.Application(middlewares=[self._fault])
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/version", lambda _: answer({"version": self.release}))
        app.router.add_post("/inference/v1/generate", self._generate)
        if self.lists:
            app.router.add_post(vllm_route.ROUTE, self._lists)
        app.router.add_post("/v1/completions", self._generate)
        if self.adapters is not None:
            app.router.add_get("/v1/models", self._models)
            app.router.add_post("/v1/load_lora_adapter", self._load)
            app.router.add_post("/v1/unload_lora_adapter", self._unload)
        if self.dev:
            for name in ("collective_rpc", "pause", "resume", "update_weight_version"):
                app.router.add_post(f"/{name}", getattr(self, f"_{name}"))
        self.runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)  # as vLLM does
        await self.runner.setup()
        site = web.TCPSite(self.runner, self.host, self.port, reuse_address=True)
        await site.start()
        self.port = self.runner.addresses[0][1]
        return self

    async def kill(self) -> None:
        """Breaks every connection and forgets everything, as a killed process does."""
        if self.runner is None:
            return
        await broken_off(self.runner)
        self.runner = None
        self.version, self.staged, self.label, self.mark = -1, (-1, "idle"), "none", ""
        if self.adapters is not None:
            self.adapters.clear()
        self.going.set()

    @web.middleware
    async def _fault(self, request: web.Request, handler: Any) -> web.StreamResponse:
        route = request.path
        self.counts[route] += 1
        await asyncio.sleep(self.slow.get(route, self.slow.get("*", 0.0)))
        if route in self.status:
            return web.Response(status=self.status[route], text="a fault of the test")
        if self.noise is not None and route != "/health":
            return web.Response(body=self.noise, content_type="application/json")
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.counts_tokens:
            return web.Response(status=404)
        return web.Response(text=f'# HELP\nvllm:generation_tokens_total{{model_name="policy"}} {self.drawn}.0\n')

    # -- adapters ------------------------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        return await answer({"data": [{"id": name} for name in ("policy", *(self.adapters or ()))]})

    async def _load(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if not asked or asked["lora_name"] in (self.adapters or ()):
            return web.Response(status=400, text="missing fields, or already loaded")
        manifest = json.loads((Path(asked["lora_path"]) / "manifest.json").read_text())
        assert self.adapters is not None
        self.adapters[asked["lora_name"]] = manifest["version"]
        self.calls.append(f"load {manifest['version']}")
        return web.Response(text="Success")

    async def _unload(self, request: web.Request) -> web.Response:
        assert self.adapters is not None
        self.calls.append(f"unload {self.adapters.pop((await request.json())['lora_name'])}")
        return web.Response(text="Success")

    # -- generation ----------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        native = request.path.startswith("/inference")
        if not body:
            return web.Response(status=422, text="missing fields")
        sampling = body["sampling_params"] if native else body
        prefix = body["token_ids"] if native else body["prompt"]
        if self.adapters is not None and body["model"] not in {"policy", *self.adapters}:
            return web.Response(status=404, text=f"The model {body['model']} does not exist.")
        if self.garbage:
            return await answer({"choices": [{"index": 0, "token_ids": [VOCABULARY + 7], "logprobs": None}]})
        if sampling.get("prompt_logprobs") is not None:
            return await self._score(
                prefix, sampling["prompt_logprobs"], (self.adapters or {}).get(body.get("model", ""))
            )
        self.bodies.append(body)
        named = (self.adapters or {}).get(body.get("model", ""))
        choices = [Choice(self, native, prefix, sampling, i, named) for i in range(sampling["n"])]
        if not body["stream"]:
            await asyncio.gather(*(choice.draw() for choice in choices))
            if native and not self.spans and sampling.get("output_kind") != 2:
                choices = choices[-1:]  # vLLM 0.26 answers with what its last step changed
            return await answer({"choices": [choice.said() for choice in choices]})
        stream = web.StreamResponse()
        await stream.prepare(request)
        for choice in choices:  # one after the other: enough for a test
            async for event in choice.events():
                await stream.write(f"data: {json.dumps({'choices': [event]})}\n\n".encode())
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def _lists(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not body:
            return web.Response(status=400, text="KeyError: 'token_ids'")
        self.bodies.append(body)
        sampling = body["sampling_params"]
        choices = [Choice(self, True, body["token_ids"], sampling, i) for i in range(sampling["n"])]
        await asyncio.gather(*(choice.draw() for choice in choices))
        return await answer({"choices": [choice.said() | {"logprobs": choice.logprobs} for choice in choices]})

    async def _score(self, prefix: list[int], listed: int, version: int | None) -> web.Response:
        await self.going.wait()
        log = table(next(v for v in (self.holds, version, self.version) if v is not None)) + self.off
        found: list[Any] = [None]
        for a, b in pairwise(prefix):
            named = {*np.argsort(-log[a])[:listed].tolist(), b}  # vLLM's are the most likely and the prompt's own
            found.append({str(token): {"logprob": float(log[a, token])} for token in named})
        return await answer({"prompt_logprobs": found, "choices": [{"index": 0, "prompt_logprobs": found}]})

    # -- control -------------------------------------------------------------------------------------------------------

    async def _pause(self, request: web.Request) -> web.Response:
        mode, clear = request.query["mode"], request.query["clear_cache"]
        self.calls.append(f"pause {mode} {clear}")
        if mode == "wait":
            while self.active:
                await asyncio.sleep(0.001)
        self.going.clear()
        if mode == "abort":
            self.aborted |= self.active.keys()
            self.going.set()
            while self.active:
                await asyncio.sleep(0.001)
            self.going.clear()
        await asyncio.sleep(0.02)
        return await answer({})

    async def _resume(self, request: web.Request) -> web.Response:
        self.calls.append("resume")
        self.going.set()
        return await answer({})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        self.calls.append(f"label {self.label}")
        return await answer({})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "method" not in body:
            return web.Response(status=400, text="Missing 'method'")
        given = body.get("kwargs", {})
        name = body["method"]
        if not self.extension:
            why = f"Call to collective_rpc method failed: Method '{name}' is not implemented."
            return web.json_response({"error": {"message": why}}, status=500)
        if name == "stage":
            self.calls.append(f"stage {given['version']}")
            manifest = json.loads((Path(given["path"]) / "manifest.json").read_text())
            assert manifest["version"] == int(given["version"])
            self.staged = (manifest["version"], "failed" if self.stage_error else "staged")
        if name == "commit_ipc":
            self.calls.append(f"commit_ipc {given['version']}")
            self.memory = json.loads(given["memory"])
            self.staged = (int(given["version"]), "staged")
        if name in ("commit", "commit_ipc"):
            self.calls += [f"commit {given['version']}"] * (name == "commit")
            assert not self.going.is_set(), "committed while it generates"
            self.commit_failures -= 1
            if self.staged != (int(given["version"]), "staged") or self.commit_error or self.commit_failures >= 0:
                why = self.commit_error or "nothing staged"
                return await answer({"results": [{"version": self.version, "error": why, "seconds": 0.1}]})
            self.version = int(given["version"])
            held = {"checked": 3, "unchecked": 0, "was": self.mark} if self.checks else {}
            self.mark = given["mark"]
            return await answer(
                {"results": [{"version": self.version + self.commit_adds, "error": "", "seconds": 0.1} | held]}
            )
        version, state = self.staged
        status = {"version": version, "state": state, "error": self.stage_error, "seconds": 0.1, "bytes": 8}
        return await answer({"results": [status | {"mark": self.mark, "unchanged": 3}]})


class Choice:
    """One sequence in the making."""

    def __init__(
        self,
        server: FakeVllm,
        native: bool,
        prefix: list[int],
        sampling: dict[str, Any],
        index: int,
        version: int | None = None,
    ):
        self.version, self.server, self.native, self.sampling, self.index = version, server, native, sampling, index
        self.prefix, self.last = tuple(prefix), prefix[-1]
        self.most = min(sampling["max_tokens"], server.context - len(prefix))
        self.seed = (sampling.get("seed") or np.random.randint(1 << 30)) + index  # as vLLM gives it to sample `index`
        self.rng = np.random.default_rng(self.seed if server.repeats else None)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.labels: list[str] = []
        self.finish: str | None = None

    async def draw(self) -> None:
        async for _ in self.events():
            pass

    async def events(self) -> Any:
        server = self.server
        server.active[self] = None
        try:
            while self.finish is None:
                await asyncio.sleep(server.step_s)
                await server.going.wait()
                if server.frozen and self not in server.aborted:
                    continue
                if self in server.aborted:
                    self.finish = "abort"
                    if server.spans:
                        yield self.said(len(self.tokens))
                    return
                if self not in islice(server.active, server.room):
                    continue
                self.step()
                yield self.said(len(self.tokens) - 1)
        finally:
            server.active.pop(self)
            server.aborted.discard(self)

    def step(self) -> None:
        self.server.drawn += 1
        log = table(self.server.version if self.version is None else self.version)[self.last]
        if not self.tokens:
            self.server.begun.append((self.prefix, self.seed))
        if self.sampling["temperature"] == 0:
            token = int(np.argmax(log))
        else:
            token = int(np.argmax(log + self.rng.gumbel(size=VOCABULARY)))
        self.tokens.append(token)
        self.logprobs.append(float(log[token]) + self.server.off_drawn.get(self.server.version, 0.0))
        self.labels.append(self.server.label)
        self.last = token
        if token in self.sampling["stop_token_ids"]:
            self.finish = "stop"
        elif len(self.tokens) == self.most:
            self.finish = "length"

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        """A token's log-prob: 0.32 and later give its number, and versions before its text."""
        named = {"token_id": token} if self.server.release >= "0.32" else {"token": f"token_id:{token}", "bytes": None}
        return {**named, "logprob": logprob, "top_logprobs": []}

    def said(self, start: int = 0) -> dict[str, Any]:
        tokens, logprobs = self.tokens[start:], self.logprobs[start:]
        spans = [{"version": x, "start": i, "end": i + 1} for i, x in enumerate(self.labels)]
        if self.native:
            listed: dict[str, Any] = {"content": [self.entry(t, x) for t, x in zip(tokens, logprobs, strict=True)]}
        else:
            listed = {"token_logprobs": logprobs}
        said = {"index": self.index, "token_ids": tokens, "logprobs": listed, "finish_reason": self.finish}
        return said | ({"weight_versions": spans} if self.server.spans else {})


async def answer(content: Any) -> web.Response:
    return web.json_response(content)


async def serve(port: int) -> None:
    """Serves until the process is ended: `python fake_vllm.py --port PORT`."""
    await FakeVllm(port=port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[sys.argv.index("--port") + 1])))
