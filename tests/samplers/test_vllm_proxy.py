"""The proxy lets a learner with the token through to what it needs of vLLM, and nobody to anything else."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from jaxrl_llm.samplers.vllm_proxy import Proxy

TOKEN = "a token of more than sixteen letters"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


class Upstream:
    """What vLLM answers, as recorded from 0.32; `calls` are (verb, path, query, body) in order."""

    def __init__(self, dev_mode: bool = True):
        self.calls: list[tuple[str, str, str, object]] = []
        self.ended = asyncio.Event()
        self.health = 200
        self.commits = 200
        self.error = ""
        self.delay_s = 0.0
        app = web.Application()
        app.router.add_get("/health", self.answer)
        app.router.add_get("/version", self.answer)
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_post("/v1/jaxrl_llm/generate", self.answer)
        app.router.add_post("/inference/v1/generate", self.stream)
        if dev_mode:
            for path in ("/collective_rpc", "/pause", "/resume", "/update_weight_version", "/sleep"):
                app.router.add_post(path, self.answer)
        self.app = app

    async def answer(self, request: web.Request) -> web.Response:
        text = await request.text()
        self.calls.append((request.method, request.path, request.query_string, json.loads(text) if text else None))
        await asyncio.sleep(self.delay_s)
        if request.path == "/health":
            return web.Response(status=self.health)
        if request.path == "/collective_rpc" and json.loads(text)["method"] == "commit" and self.commits != 200:
            return web.json_response({"error": {"message": "dead"}}, status=self.commits)
        if request.path == "/collective_rpc" and json.loads(text)["method"] == "commit":
            return web.json_response({"results": [{"version": 4, "error": ""}, {"version": 3, "error": self.error}]})
        return web.json_response({"from": request.path, "key": request.headers.get("Authorization")})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for i in range(200):
                await response.write(f"data: {i}\n\n".encode())
                await asyncio.sleep(0.02)
        except (ConnectionError, asyncio.CancelledError):
            self.ended.set()
            raise
        return response


@asynccontextmanager
async def behind_proxy(upstream: Upstream, **fields):
    """A session to a proxy before `upstream`."""
    async with TestServer(upstream.app, handler_cancellation=True) as server:
        proxy = Proxy(server=str(server.make_url("/")).rstrip("/"), token=TOKEN, api_key="vllm's own key", **fields)
        async with (
            TestServer(proxy.application(), handler_cancellation=True) as door,
            aiohttp.ClientSession(door.make_url("/"), headers=BEARER) as session,
        ):
            yield session


def run(check, upstream: Upstream | None = None, **fields) -> Upstream:
    async def inside():
        made = upstream or Upstream()
        async with asyncio.timeout(30), behind_proxy(made, **fields) as session:
            await check(session, made)
        return made

    return asyncio.run(inside())


WANTED = [
    ("POST", "/stage", {"path": "/p/v1", "version": 1}, "/collective_rpc",
     {"method": "stage", "kwargs": {"path": "/p/v1", "version": "1"}}),
    ("POST", "/stage_status", None, "/collective_rpc", {"method": "stage_status", "kwargs": {}}),
    ("POST", "/pause?mode=keep&clear_cache=true&other=1", None, "/pause", None),
    ("POST", "/resume", None, "/resume", None),
    ("POST", "/generate", {"prompt": [1, 2]}, "/v1/completions", {"prompt": [1, 2]}),
    ("POST", "/tokens", {"token_ids": [1, 2]}, "/v1/jaxrl_llm/generate", {"token_ids": [1, 2]}),
]  # fmt: skip


@pytest.mark.parametrize(("verb", "path", "sent", "route", "body"), WANTED, ids=lambda x: str(x)[:14])
def test_each_step_reaches_its_route_with_vllms_own_key(verb, path, sent, route, body):
    async def check(session, upstream):
        async with session.request(verb, path, json=sent) as answer:
            assert answer.status == 200
            assert await answer.json() == {"from": route, "key": "Bearer vllm's own key"}

    query = "mode=keep&clear_cache=true" if "?" in path else ""
    assert run(check).calls == [(verb, route, query, body)]


def test_health_says_vllms_version_and_passes_ill_health_on():
    async def check(session, upstream):
        async with session.get("/health") as answer:
            assert (answer.status, (await answer.json())["from"]) == (200, "/version")
        upstream.health = 503
        async with session.get("/health") as answer:
            assert answer.status == 503

    run(check)


def test_a_commit_also_sets_vllms_number_of_its_weights():
    async def check(session, upstream):
        async with session.post("/commit", json={"version": 4, "mark": "m"}) as answer:
            assert (await answer.json())["results"][0]["version"] == 4

    assert run(check).calls[1:] == [("POST", "/update_weight_version", "", {"new_version": "4"})]


def test_a_commit_that_failed_on_a_rank_sets_no_number():
    async def check(session, upstream):
        upstream.error = "torn"
        async with session.post("/commit", json={"version": 4, "mark": "m"}) as answer:
            assert (await answer.json())["results"][1]["error"] == "torn"
        upstream.commits = 500
        async with session.post("/commit", json={"version": 4, "mark": "m"}) as answer:
            assert (answer.status, "dead" in await answer.text()) == (500, True)

    assert [path for _, path, *_ in run(check).calls] == ["/collective_rpc"] * 2


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}])
def test_no_route_answers_without_the_token(header):
    async def check(session, upstream):
        async with aiohttp.ClientSession(session._base_url, headers=header) as stranger:
            for verb, path in (
                ("GET", "/health"), ("POST", "/generate"), ("POST", "/tokens"), ("POST", "/stage"), ("POST", "/stage_status"),
                ("POST", "/commit"), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/nothing"),
            ):  # fmt: skip
                async with stranger.request(verb, path) as answer:
                    assert answer.status == 401, path

    assert not run(check).calls


def test_a_token_that_is_no_utf_8_is_wrong_as_any_other():
    async def check(session, upstream):
        reader, writer = await asyncio.open_connection(session._base_url.host, session._base_url.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: proxy\r\nAuthorization: Bearer \xff\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"401"
        writer.close()

    assert not run(check).calls


def test_nothing_else_of_vllm_is_reachable():
    async def check(session, upstream):
        for path in ("/collective_rpc", "/sleep", "/update_weight_version", "/v1/completions", "/stage/../sleep"):
            async with session.post(path, json={"method": "stage"}) as answer:
                assert answer.status == 404, path

    assert not run(check).calls


def test_a_stream_passes_as_it_comes_and_ends_in_vllm_when_the_learner_leaves():
    async def check(session, upstream):
        async with session.post("/generate", json={"token_ids": [1]}) as answer:
            assert answer.content_type == "text/event-stream"
            assert await answer.content.readline() == b"data: 0\n"
        await upstream.ended.wait()

    run(check)


def test_a_server_without_its_development_endpoints_is_named_with_the_cure():
    async def check(session, upstream):
        for path, body in (
            ("/stage", {"path": "p", "version": 1}),
            ("/stage_status", None),
            ("/commit", {"version": 1, "mark": "m"}),
        ):
            async with session.post(path, json=body) as answer:
                assert answer.status == 409
                assert "VLLM_SERVER_DEV_MODE=1" in await answer.text()

    run(check, Upstream(dev_mode=False))


def test_a_server_that_is_gone_is_named():
    async def check():
        upstream = TestServer(Upstream().app)
        await upstream.start_server()
        address = str(upstream.make_url("/")).rstrip("/")
        await upstream.close()
        async with (
            TestServer(Proxy(server=address, token=TOKEN).application()) as door,
            aiohttp.ClientSession(door.make_url("/"), headers=BEARER) as session,
            session.post("/resume") as answer,
        ):
            assert (answer.status, address in await answer.text()) == (502, True)

    asyncio.run(check())


def test_a_generation_beyond_its_limit_breaks_off_and_is_not_taken_for_whole():
    async def check(session, upstream):
        async with session.post("/generate", json={"token_ids": [1]}) as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()

    run(check, generate_s=0.1)


def test_a_step_beyond_its_limit_is_named():
    async def check(session, upstream):
        upstream.delay_s = 5.0
        async with session.post("/resume") as answer:
            assert (answer.status, "did not answer in time" in await answer.text()) == (504, True)

    run(check, control_s=0.05)


@pytest.mark.parametrize("body", [b"", b"[1]", b"{"])
def test_bad_bodies_are_the_callers_fault(body):
    async def check(session, upstream):
        async with session.post("/stage", data=body, headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 400

    assert not run(check).calls


def test_missing_arguments_are_named():
    async def check(session, upstream):
        async with session.post("/stage", json={"path": "p"}) as answer:
            assert (answer.status, "version" in await answer.text()) == (400, True)

    run(check)


@pytest.mark.parametrize(
    "server", ["http://10.0.0.5:8000", "http://0.0.0.0:8000", "https://127.0.0.1", "127.0.0.1:8000"]
)
def test_only_a_server_on_loopback_is_accepted(server):
    with pytest.raises(ValueError, match="not on loopback"):
        Proxy(server=server, token=TOKEN)


def test_a_short_token_is_refused():
    with pytest.raises(ValueError, match="JAXRL_LLM_TOKEN"):
        Proxy(server="http://127.0.0.1:8000", token="secret")


def test_a_port_that_is_taken_is_an_error_of_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "jaxrl_llm.samplers.vllm_proxy", "--server", "http://127.0.0.1:8000"]
        done = subprocess.run(
            [*command, "--port", str(taken.getsockname()[1])], env={**os.environ, "JAXRL_LLM_TOKEN": TOKEN}, capture_output=True,
            text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    assert (
        done.stderr.startswith("error: ") and "address already in use" in done.stderr and done.stderr.count("\n") == 1
    )
