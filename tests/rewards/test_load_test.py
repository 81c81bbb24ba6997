"""The load test counts what it sent, what failed, and how long answers took."""

import asyncio
import time
from collections.abc import Callable

import aiohttp
import pytest
from fastapi import FastAPI, Request, Response

from jaxrl_llm.rewards.services.load_test import Call, load, main

Serve = Callable[[FastAPI], str]


def test_latency_throughput_and_failures_are_counted(serve: Serve) -> None:
    app, seen = FastAPI(), []

    @app.post("/score")
    async def score() -> Response:
        seen.append(1)
        number = len(seen)
        await asyncio.sleep(0.02)
        return Response("abc", status_code=500 if number % 5 == 0 else 200)

    @app.get("/page")
    async def page(request: Request) -> Response:
        await asyncio.sleep(0.1)
        return Response("ab", status_code=200 if request.headers["authorization"] == "Bearer t" else 401)

    url = serve(app)
    found = asyncio.run(load(url, Call(path="/score", body={"texts": ["a"]}), 20, 4))
    assert len(seen) == found["requests"] == 20 and found["failed"] == 4 and found["bytes"] == 3
    assert found["p50_ms"] > 19 and found["p99_ms"] >= found["p50_ms"]
    assert found["requests_per_s"] < 1.1 * 4 / 0.02
    found = asyncio.run(load(url, Call(path="/page", token="t"), 1000, 2, limit_s=0.15))
    assert 2 <= found["requests"] <= 4 and found["failed"] == 0 and found["bytes"] == 2


def test_an_answer_that_comes_too_late_is_a_failure(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()
    app.post("/score")(lambda: time.sleep(0.3))
    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.05))
    assert asyncio.run(load(serve(app), Call(path="/score", body={}), 2, 2))["failed"] == 2


def test_nothing_to_send_and_nobody_to_ask_are_refused() -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        asyncio.run(load("http://127.0.0.1:1", Call(path="/x"), 0, 1))
    assert asyncio.run(load("http://127.0.0.1:1", Call(path="/x", body={}), 2, 1))["failed"] == 2
    with pytest.raises(SystemExit):
        main(["score"])
