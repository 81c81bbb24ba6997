"""A server that speaks SGLang 0.5.17's HTTP and draws from the toy policy of `fake_vllm`, with faults on request."""

import asyncio
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from connections import broken_off
from fake_vllm import VOCABULARY, table


@dataclass(eq=False, kw_only=True)
class FakeSglang:
    """One server.

    Attributes:
      step_s: seconds a token takes.
      key: API key; empty for none.
      room: most sequences that are drawn at a time; further ones wait.
      status: {route: HTTP status} that is answered in place of the work.
      refuses: whether the next update fails.
      context: its context; SGLang keeps six tokens of it free.
      late: requests that are still read when the next abort comes.
      retracted: whether requests that are aborted waited to go on.
      off: added to every log-prob of a prompt.
      ends: token ids at which the model's own configuration ends a text.
      garbage: what is answered to generations in place of samples; None for samples.
      metrics: whether it counts its tokens.
      bodies: generations that were asked for.
      calls: control calls in order.
      counts: answered requests by route.
    """

    step_s: float = 0.0
    key: str = ""
    room: int = 1 << 30
    status: dict[str, int] = field(default_factory=dict)
    refuses: bool = False
    context: int = 1 << 20
    late: int = 0
    retracted: bool = False
    off: float = 0.0
    ends: tuple[int, ...] = ()
    garbage: Any = None
    metrics: bool = True
    orphans: bool = False  # whether requests are drawn whose clients are gone
    bodies: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    port: int = 0
    version: int = -1
    mark: str = "default"
    drawn: int = 0

    def __post_init__(self) -> None:
        self.going = asyncio.Event()
        self.going.set()
        self.active: dict[object, None] = {}
        self.aborted: set[object] = set()
        self.runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> "FakeSglang":
        app = web.Application(middlewares=[self._door])
        for verb, route in (
            ("GET", "health"), ("GET", "model_info"), ("GET", "server_info"), ("GET", "metrics"), ("POST", "generate"),
            ("POST", "update_weights_from_disk"), ("POST", "pause_generation"), ("POST", "continue_generation"), ("POST", "abort_request"),
            ("POST", "flush_cache"),
        ):  # fmt: skip
            app.router.add_route(verb, f"/{route}", getattr(self, f"_{route}"))
        self.runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self.runner.addresses[0][1]
        return self

    async def kill(self) -> None:
        """Breaks every connection and forgets everything, as a killed process does."""
        if self.runner is None:
            return
        await broken_off(self.runner)
        self.runner, self.version, self.mark = None, -1, "default"
        self.going.set()

    @web.middleware
    async def _door(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.counts[request.path] += 1
        if (
            self.key
            and request.path != "/health"
            and request.path != "/metrics"
            and request.headers.get("Authorization") != f"Bearer {self.key}"
        ):
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path in self.status:
            return web.Response(status=self.status[request.path], text="a fault of the test")
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "toy", "is_generation": True, "weight_version": self.mark})

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.17", "internal_states": [{}], "max_req_input_len": self.context - 6})

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.metrics:
            return web.Response(status=404)
        labels = 'engine_type="unified",mode="decode"'
        return web.Response(text=f"# HELP\nsglang:realtime_tokens_total{{{labels}}} {self.drawn}.0\n")

    # -- generation ----------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.garbage is not None:
            return web.json_response(self.garbage)
        if body.get("logprob_start_len", -1) >= 0:
            return self._scored(body)
        asked = body["sampling_params"]
        if body["return_sampling_mask"] and asked["top_k"] < 1:
            return web.Response(status=400, text="return_sampling_mask requires finite top_k")
        if len(body["input_ids"]) + asked["max_new_tokens"] > self.context - 2:
            return web.Response(status=400, text="Requested token count exceeds the model's maximum context length")
        self.bodies.append(body)
        one = object()
        self.active[one] = None
        try:
            await self.going.wait()
            if one in self.aborted:  # it had not begun
                said = {"error": {"message": "Request 7f was aborted", "code": 499}}
                return web.json_response(said, status=499)
            return web.json_response(await self._sample(body, one))
        finally:
            self.active.pop(one)
            self.aborted.discard(one)

    async def _sample(self, body: dict[str, Any], one: object) -> dict[str, Any]:
        asked = body["sampling_params"]
        tokens: list[int] = []
        rows: list[list[Any]] = []
        finish: dict[str, Any] = {"type": "length", "length": asked["max_new_tokens"]}
        while len(tokens) < asked["max_new_tokens"]:
            await asyncio.sleep(self.step_s)
            if one in self.aborted:
                finish = {"type": "abort", "message": "Abort in waiting queue", "status_code": None, "err_type": None}
                if self.retracted:
                    break
                finish["message"] = "Aborted"  # in the step that draws one more token, whatever it is
                self._step(body, tokens, rows)
                break
            if list(self.active).index(one) >= self.room:
                continue
            last = self._step(body, tokens, rows)
            if not asked["ignore_eos"] and last in {*asked["stop_token_ids"], *self.ends}:  # which ignores both
                finish = {"type": "stop", "matched": last}
                break
        meta: dict[str, Any] = {"finish_reason": finish, "weight_version": self.mark, "output_token_logprobs": rows}
        if body["return_sampling_mask"] and not (finish["type"] == "abort" and self.retracted):
            meta["output_token_sampling_logprobs"] = [row[0] / 2 for row in rows]
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    def _step(self, body: dict[str, Any], tokens: list[int], rows: list[list[Any]]) -> int:
        """Draws a token."""
        log = table(self.version)[[*body["input_ids"], *tokens][-1]]
        noise = np.random.gumbel(size=VOCABULARY) if body["sampling_params"]["temperature"] else 0.0
        token = int(np.argmax(log + noise))
        self.drawn += 1
        tokens.append(token)
        rows.append([float(log[token]), token, None])
        return token

    def _scored(self, body: dict[str, Any]) -> web.Response:
        tokens, most = body["input_ids"], body["top_logprobs_num"]
        log = table(self.version) + self.off
        rows: list[Any] = [[None, tokens[0], None]]
        lists: list[Any] = [None]
        for a, b in pairwise(tokens):
            rows.append([float(log[a, b]), b, None])
            lists.append([[float(log[a, t]), int(t), None] for t in np.argsort(-log[a])[:most]])
        meta = {"finish_reason": {"type": "length"}, "input_token_logprobs": rows, "input_top_logprobs": lists}
        return web.json_response({"text": "", "output_ids": [0], "meta_info": meta})

    # -- control -------------------------------------------------------------------------------------------------------

    async def _update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert not self.going.is_set() and not self.active, "updated while it generates"
        file = Path(body["model_path"]) / "manifest.json"
        if self.refuses or not file.is_file():
            self.refuses = False
            return web.json_response({"success": False, "message": "Failed to update weights"}, status=400)
        self.version, self.mark = json.loads(file.read_text())["version"], body["weight_version"]
        self.calls.append(f"update {self.version}")
        return web.json_response({"success": True, "message": "Succeeded", "num_paused_requests": 0})

    async def _abort_request(self, request: web.Request) -> web.Response:
        assert (await request.json())["abort_all"]
        if self.calls[-1:] != ["abort"]:
            self.calls.append("abort")
        known = list(self.active)[: len(self.active) - self.late]
        self.late = 0
        self.aborted |= set(known)
        return web.Response()

    async def _flush_cache(self, request: web.Request) -> web.Response:
        assert float(request.query["timeout"]) > 0 and not self.going.is_set()
        self.calls.append("flush")
        return web.Response(status=200 if not self.orphans else 400, text="Flush cache failed." * self.orphans)

    async def _pause_generation(self, request: web.Request) -> web.Response:
        assert (await request.json())["mode"] == "abort"
        self.calls.append("pause")
        self.aborted |= self.active.keys()
        while any(one in self.active for one in self.aborted):
            await asyncio.sleep(0.001)
        self.going.clear()
        return web.json_response({"status": "ok"})

    async def _continue_generation(self, request: web.Request) -> web.Response:
        self.calls.append("continue")
        self.going.set()
        return web.json_response({"status": "ok"})


async def serve(port: int) -> None:
    """Serves until the process is ended: `python fake_sglang.py --port PORT`."""
    await FakeSglang(port=port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[sys.argv.index("--port") + 1])))
