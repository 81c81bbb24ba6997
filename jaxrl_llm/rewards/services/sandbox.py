"""Runs programs against tests over HTTP: `python -m jaxrl_llm.rewards.services.sandbox`; JSON in, JSON out, nothing is unpickled.

    GET  /health                {"status", "isolation", "workers"}
    POST /test_program          {"program", "tests": ["assert ..."], "max_execution_time": 1.0}
    POST /test_program_stdio    {"program", "tests": [{"input", "output"}], "max_execution_time": 1.0}

Both answer {"results": [0 | 1], "runtimes": [seconds, -1 where not passed], "verdicts": [str], "details": [str]}, an
entry a test; `tests` may be a list or its JSON text. Each test runs in a process of its own (rewards/sandbox_run.py).
Output is compared line by line, white space at line ends and at both ends of the text aside.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request

from jaxrl_llm.rewards.services import http_service
from jaxrl_llm.rewards.services.http_service import Refused
from jaxrl_llm.rewards.services.sandbox_run import Outcome, Sandbox, Unsafe

MOST_TESTS = 1000
MOST_SECONDS = 120.0
WEAK = (
    "warning: namespaces cannot be had here: programs can read what everyone may read, and may write where their user "
    "may; they have resource limits and no sockets"
)


def application(sandbox: Sandbox, token: str = "") -> FastAPI:
    """The service of `sandbox`, which is tried out before the first request."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        if await sandbox.prepare() != "namespaces":
            print(WEAK, flush=True)
        yield
        sandbox.close()

    app = http_service.guarded(token, lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "healthy", "isolation": sandbox.isolation, "workers": sandbox.workers}

    @app.post("/test_program")
    async def test_program(request: Request) -> dict[str, Any]:
        program, tests, limit_s = asked(await http_service.body_of(request))
        if not all(isinstance(test, str) for test in tests):
            raise Refused("`tests` must hold texts of Python, such as assertions")
        return answer(await together(sandbox.run(program, test=test, limit_s=limit_s) for test in tests))

    @app.post("/test_program_stdio")
    async def test_program_stdio(request: Request) -> dict[str, Any]:
        program, tests, limit_s = asked(await http_service.body_of(request))
        if not all(isinstance(t, dict) and all(isinstance(t.get(k), str) for k in ("input", "output")) for t in tests):
            raise Refused("`tests` must hold objects with the texts `input` and `output`")
        outcomes = await together(sandbox.run(program, stdin=test["input"], limit_s=limit_s) for test in tests)
        return answer([compared(outcome, test["output"]) for outcome, test in zip(outcomes, tests)])

    return app


def asked(body: dict[str, Any]) -> tuple[str, list[Any], float]:
    """(program, tests, seconds of a test) of a request; raises Refused for anything else."""
    program, tests, limit_s = body.get("program"), body.get("tests"), body.get("max_execution_time", 1.0)
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise Refused(f"`tests` is no JSON: {error}") from error
    if not isinstance(program, str):
        raise Refused("`program` must be a text")
    if not isinstance(tests, list) or len(tests) > MOST_TESTS:
        raise Refused(f"`tests` must be a list of at most {MOST_TESTS}")
    if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s <= MOST_SECONDS:
        raise Refused(f"`max_execution_time` must be a number of seconds in (0, {MOST_SECONDS:g}]")
    return program, tests, float(limit_s)


async def together(runs: Any) -> list[Outcome]:
    """The outcomes of all runs, as many at a time as the sandbox has workers."""
    try:
        return list(await asyncio.gather(*runs))
    except Unsafe as error:
        raise Refused(str(error), 500) from error


def compared(outcome: Outcome, output: str) -> Outcome:
    """The outcome, failed where what was printed is not `output`."""
    if outcome.status != "passed" or lines(outcome.stdout) == lines(output):
        return outcome
    return outcome._replace(status="failed", detail="another output was expected")


def lines(text: str) -> list[str]:
    """The lines of a text without what is not compared."""
    return [line.rstrip() for line in text.strip().splitlines()]


def answer(outcomes: list[Outcome]) -> dict[str, Any]:
    """What a request is answered."""
    passed = [outcome.status == "passed" for outcome in outcomes]
    return {
        "results": [int(ok) for ok in passed],
        "runtimes": [outcome.seconds if ok else -1 for outcome, ok in zip(outcomes, passed)],
        "verdicts": [outcome.status for outcome in outcomes],
        "details": [outcome.detail for outcome in outcomes],
    }


def main() -> None:
    """Reads the command line and serves."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.rewards.services.sandbox")
    parser.add_argument("--workers", type=int, default=2, help="programs at a time")
    parser.add_argument("--memory_mb", type=int, default=1024, help="address space of a process")
    parser.add_argument("--disk_mb", type=int, default=64, help="size of a file, and of all files of a run together")
    parser.add_argument("--processes", type=int, default=16, help="processes and threads of a run")
    parser.add_argument("--isolation", choices=["namespaces", "limits"], help="without it, the strongest that works")
    http_service.options(parser, port=8001)
    given = parser.parse_args()
    token = http_service.token_of(given.host, given.token_env)
    sandbox = Sandbox(
        isolation=given.isolation, workers=given.workers, memory_mb=given.memory_mb, disk_mb=given.disk_mb,
        processes=given.processes,
    )  # fmt: skip
    print(f"serving the sandbox on http://{given.host}:{given.port}", flush=True)
    http_service.serve(application(sandbox, token), given.host, given.port)


if __name__ == "__main__":
    main()
