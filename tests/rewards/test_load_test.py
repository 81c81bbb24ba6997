"""The load test counts what it sent, what failed, and how long answers took."""

import asyncio
import time
from collections.abc import Callable

import aiohttp
import pytest
from fastapi import FastAPI, Response

from jaxrl_llm.rewards.load_test import load, main

Serve = Callable[[FastAPI], str]


def test_latency_throughput_and_failures_are_counted(serve: Serve) -> None:
    app, seen = FastAPI(), []

    @app.post("/score")
    async def score() -> Response:
        seen.append(1)
        number = len(seen)
        await asyncio.sleep(0.02)
        return Response(status_code=500 if number % 5 == 0 else 200)

    found = asyncio.run(load(serve(app), "/score", {"texts": ["a"]}, 20, 4))
    assert len(seen) == 20 and found["failed"] == 4
    assert found["p50_ms"] > 19 and found["p99_ms"] >= found["p50_ms"]
    assert found["requests_per_s"] < 1.1 * 4 / 0.02


def test_an_answer_that_comes_too_late_is_a_failure(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()
    app.post("/score")(lambda: time.sleep(0.3))
    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.05))
    assert asyncio.run(load(serve(app), "/score", {}, 2, 2))["failed"] == 2


def test_nothing_to_send_and_nobody_to_ask_are_refused() -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        asyncio.run(load("http://127.0.0.1:1", "/x", {}, 0, 1))
    assert asyncio.run(load("http://127.0.0.1:1", "/x", {}, 2, 1))["failed"] == 2
    with pytest.raises(SystemExit):
        main(["score"])
