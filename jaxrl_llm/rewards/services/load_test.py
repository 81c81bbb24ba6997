"""Measures how many requests a second a reward service answers, and how long they take.

    python -m jaxrl_llm.rewards.services.load_test sandbox  [--url URL] [--requests 400] [--concurrency 16]
    python -m jaxrl_llm.rewards.services.load_test score    --url URL | --model FOLDER
    python -m jaxrl_llm.rewards.services.load_test classify --url URL | --model FOLDER

Without --url the service is started on a free port of loopback and stopped at the end. Requests are sent by `concurrency`
clients, each its next as soon as it has an answer. The result is one line of JSON: requests_per_s, p50_ms, p99_ms, failed.
`python -m tests.chaos.load_services`, in the repository, loads every service and prints a table.
"""

import asyncio
import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from jaxrl_llm import command_line

STARTUP_S = 120.0
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 8
# {name: (path, body, module of the server)}.
SERVICES: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "sandbox": (
        "/test_program",
        {"program": "def f(x):\n    return x + 1\n", "tests": ["assert f(1) == 2", "assert f(2) == 3"]},
        "jaxrl_llm.rewards.services.sandbox",
    ),
    "score": ("/score", {"texts": [TEXT]}, "jaxrl_llm.rewards.services.classifier_server"),
    "classify": ("/classify", {"input": [[TEXT, TEXT[::-1]]]}, "jaxrl_llm.rewards.services.classifier_server"),
}


@dataclass(frozen=True, kw_only=True)
class Call:
    """The request that is sent repeatedly.

    Attributes:
      path: path from the server's root.
      body: JSON that is posted; None gets the path.
      token: the bearer token; empty sends none.
    """

    path: str
    body: Mapping[str, Any] | None = None
    token: str = ""


async def load(url: str, call: Call, requests: int, concurrency: int, limit_s: float = math.inf) -> dict[str, float]:
    """Measures latencies and throughput of equal calls, `requests` of them or as many as begin within `limit_s` seconds.

    A status other than 200 is a failure; bytes are the mean of the answers' bodies.

    Raises:
      ValueError: nothing to send.
    """
    if requests < 1 or concurrency < 1 or limit_s <= 0:
        raise ValueError(
            f"requests and concurrency must be >= 1 and limit_s > 0 (got {requests}, {concurrency} and {limit_s})"
        )
    taken: list[float] = []
    left, failed, size = iter(range(requests)), 0, 0
    headers = {"Authorization": f"Bearer {call.token}"} if call.token else {}
    verb = "GET" if call.body is None else "POST"

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal failed, size
        for _ in left:
            sent = time.perf_counter()
            if sent - begin > limit_s:
                return
            try:
                async with session.request(verb, url.rstrip("/") + call.path, json=call.body) as answer:
                    got = await answer.read()
                    size += len(got)
                    failed += answer.status != 200
            except (aiohttp.ClientError, TimeoutError):
                failed += 1
            taken.append(time.perf_counter() - sent)

    connector = aiohttp.TCPConnector(limit=concurrency)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        begin = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(concurrency)))
        seconds = time.perf_counter() - begin
    p50, p99 = np.percentile(taken, [50, 99]) * 1000
    return {
        "requests": float(len(taken)), "concurrency": float(concurrency), "requests_per_s": len(taken) / seconds,
        "p50_ms": float(p50), "p99_ms": float(p99), "failed": float(failed), "bytes": size / len(taken),
    }  # fmt: skip


@contextlib.contextmanager
def started(module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Runs a service on loopback and yields its address; `environment` is added to this process's.

    Raises:
      TimeoutError: it does not answer within two minutes.
      ChildProcessError: it ended.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", module, "--port", str(port), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **(environment or {})})
    try:
        deadline = time.monotonic() + STARTUP_S
        while not _answers(port):
            if process.poll() is not None:
                raise ChildProcessError(f"{' '.join(command)} ended with code {process.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{' '.join(command)} does not answer within {STARTUP_S:g} s")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser("rewards.services.load_test", __doc__)
    parser.add_argument("service", choices=sorted(SERVICES))
    parser.add_argument("--url", default="", help="a service that runs already")
    parser.add_argument("--model", default="", help="folder of the classifier to start")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--token_env", default="", help="environment variable that holds the service's token")
    given = parser.parse_args(argv)
    path, body, module = SERVICES[given.service]
    if not given.url and given.service != "sandbox" and not given.model:
        parser.error("--url of a classifier that runs, or --model of one to start, is needed")
    token = os.environ.get(given.token_env, "") if given.token_env else ""
    call = Call(path=path, body=body, token=token)
    arguments = ["--model", given.model] if given.model else []
    with contextlib.nullcontext(given.url) if given.url else started(module, arguments) as url:
        asyncio.run(load(url, call, min(8, given.requests), 1))  # loads what is loaded at the first call
        found = asyncio.run(load(url, call, given.requests, given.concurrency))
    print(json.dumps({"service": given.service, **found}))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
