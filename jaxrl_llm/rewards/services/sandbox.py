"""Runs programs against tests over HTTP: `python -m jaxrl_llm.rewards.services.sandbox`; JSON in, JSON out, nothing is unpickled.

    GET  /health                {"status", "isolation", "workers"}
    POST /test_program          {"program", "tests": ["assert ..."], "max_execution_time": 1.0, "stop_at_failure": false}
    POST /test_program_stdio    {"program", "tests": [{"input", "output"}], ...}
    POST /run                   {"program", "stdin": "", "max_execution_time": 1.0}
    POST /sessions              {"idle_s": 600, "memory_mb": 1024} -> {"id"}
    POST /sessions/ID/cells     {"code", "max_execution_time": 1.0}
    DELETE /sessions/ID

`/run` and a cell answer {"status", "detail", "seconds", "stdout", "stderr", "truncated"}, a cell also `value`, the repr of a last
expression. A session is an interpreter that keeps names and files between its cells; a status other than "passed" and "error" has ended
it, as `idle_s` seconds without a cell do, and its next cell is answered with 410. Its output is cut in the middle; that of `/run` ends it.

The first two answer {"results": [0 | 1], "runtimes": [seconds, -1 where not passed], "verdicts": [str], "details": [str]}, an
entry for each test; `tests` may be a list or its JSON text. With `stop_at_failure` tests run one after another, and those after the first
one that is not passed are "skipped". Each test runs in a process of its own (untrusted/guard.py), and is judged in another.
Output is compared line by line, white space at line ends and at both ends of the text aside.

A test in Python may call the program's functions and classes and compare plain values (None, numbers, texts, bytes, lists, dicts, sets,
dates, ...) that they return; it may compare the program's objects with each other. It imports the modules that it compares
with. It cannot replace the program's globals, capture what the program prints, or read its source: untrusted/judge.py says why.

Clients take turns, each by the header X-Client or its address: the one that has been served least is next. Where a client goes away
its runs are ended; where too many runs wait, a request is refused with 503.
"""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request

from jaxrl_llm import command_line
from jaxrl_llm.rewards.services import http_service
from jaxrl_llm.rewards.services.http_service import Refused
from jaxrl_llm.rewards.services.sandbox_run import ISOLATIONS, Outcome, Sandbox, Unsafe
from jaxrl_llm.rewards.services.sandbox_sessions import Full, Gone, Sessions
from jaxrl_llm.rewards.services.turns import Who

MOST_TESTS = 1000
MOST_SECONDS = 120.0
MOST_WAITING = 4096  # runs
IDLE_S, MOST_IDLE_S = 600.0, 86400.0
LONGEST_NAME = 200  # characters of a client's name
WEAK = (
    "warning: weak isolation was allowed and nothing better can be had: programs can read, write and end whatever their user may; "
    "they have resource limits and no sockets"
)
SKIPPED = Outcome("skipped", "an earlier test was not passed", 0.0, "")

Run = Callable[[Any], Coroutine[Any, Any, Outcome]]


def application(
    sandbox: Sandbox, token: str = "", most_waiting: int = MOST_WAITING, sessions: Sessions | None = None
) -> FastAPI:
    """Returns the service of `sandbox`, which is tried out before the first request; `most_waiting` runs wait at a time."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        if not sandbox.prepared:
            await sandbox.prepare()
        yield
        if sessions is not None:
            await sessions.close_all()
        sandbox.close()

    app = http_service.guarded(token, lifespan=lifespan)
    numbers = itertools.count()

    async def tested(request: Request, tests: list[Any], stops: bool, run: Callable[[Any, Who], Any]) -> list[Outcome]:
        waiting = sandbox.turns.waiting
        if waiting and waiting + (1 if stops else len(tests)) > most_waiting:
            raise Refused(f"{waiting} runs are waiting already, at most {most_waiting} may: try again later", 503)
        address = request.client.host if request.client else ""
        who = (request.headers.get("x-client", address)[:LONGEST_NAME], next(numbers))
        return await http_service.while_there(request, outcomes(tests, stops, lambda test: run(test, who)))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        most = sessions.most if sessions is not None else 0
        return {"status": "healthy", "isolation": sandbox.isolation, "workers": sandbox.workers, "sessions": most}

    @app.post("/test_program")
    async def test_program(request: Request) -> dict[str, Any]:
        program, tests, limit_s, stops = asked(await http_service.body_of(request))
        if not all(isinstance(test, str) for test in tests):
            raise Refused("`tests` must hold texts of Python, such as assertions")

        async def run(test: str, who: Who) -> Outcome:
            return await sandbox.run(program, test=test, limit_s=limit_s, who=who)

        return answer(await tested(request, tests, stops, run))

    @app.post("/test_program_stdio")
    async def test_program_stdio(request: Request) -> dict[str, Any]:
        program, tests, limit_s, stops = asked(await http_service.body_of(request))
        if not all(isinstance(t, dict) and all(isinstance(t.get(k), str) for k in ("input", "output")) for t in tests):
            raise Refused("`tests` must hold objects with the texts `input` and `output`")

        async def run(test: dict[str, str], who: Who) -> Outcome:
            return compared(await sandbox.run(program, stdin=test["input"], limit_s=limit_s, who=who), test["output"])

        return answer(await tested(request, tests, stops, run))

    @app.post("/run")
    async def run_once(request: Request) -> dict[str, Any]:
        body = await http_service.body_of(request)
        program, stdin = text_of(body, "program"), text_of({"stdin": "", **body}, "stdin")
        limit_s = seconds_of(body)

        async def run(given: str, who: Who) -> Outcome:
            return await sandbox.run(program, stdin=given, limit_s=limit_s, who=who)

        (found,) = await tested(request, [stdin], False, run)
        return {**found._asdict(), "truncated": found.status == "output"}

    if sessions is not None:
        add_sessions(app, sessions)
    return app


def add_sessions(app: FastAPI, sessions: Sessions) -> None:
    """Adds the routes of sessions."""

    @app.post("/sessions")
    async def begin(request: Request) -> dict[str, str]:
        body = await http_service.body_of(request)
        idle_s, memory_mb = body.get("idle_s", IDLE_S), body.get("memory_mb")
        if isinstance(idle_s, bool) or not isinstance(idle_s, int | float) or not 0 < idle_s <= MOST_IDLE_S:
            raise Refused(f"`idle_s` must be a number of seconds in (0, {MOST_IDLE_S:g}]")
        if memory_mb is not None and (isinstance(memory_mb, bool) or not isinstance(memory_mb, int) or memory_mb < 1):
            raise Refused("`memory_mb` must be a number of MiB, at least 1")
        try:
            return {"id": await http_service.while_there(request, sessions.open(float(idle_s), memory_mb))}
        except Unsafe as error:
            raise Refused(str(error), 500) from error
        except Full as error:
            raise Refused(str(error), 429) from error

    @app.post("/sessions/{id}/cells")
    async def cell(id: str, request: Request) -> dict[str, Any]:
        body = await http_service.body_of(request)
        code, limit_s = text_of(body, "code"), seconds_of(body)
        try:
            return await http_service.while_there(request, sessions.cell(id, code, limit_s))
        except Gone as error:
            raise Refused(str(error), 410) from error

    @app.delete("/sessions/{id}")
    async def end(id: str) -> dict[str, bool]:
        await sessions.close(id)
        return {"closed": True}


def text_of(body: dict[str, Any], name: str) -> str:
    """Returns a text of a request; raises Refused for anything else."""
    if not isinstance(body.get(name), str):
        raise Refused(f"`{name}` must be a text")
    return str(body[name])


def seconds_of(body: dict[str, Any]) -> float:
    """Returns the seconds that a request allows; raises Refused for anything else."""
    limit_s = body.get("max_execution_time", 1.0)
    if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s <= MOST_SECONDS:
        raise Refused(f"`max_execution_time` must be a number of seconds in (0, {MOST_SECONDS:g}]")
    return float(limit_s)


def asked(body: dict[str, Any]) -> tuple[str, list[Any], float, bool]:
    """Returns (program, tests, seconds of a test, stops at a failure) of a request; raises Refused for anything else."""
    tests, stops = body.get("tests"), body.get("stop_at_failure", False)
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError) as error:
            raise Refused(f"`tests` is no JSON: {error}") from error
    program = text_of(body, "program")
    if not isinstance(tests, list) or len(tests) > MOST_TESTS:
        raise Refused(f"`tests` must be a list of at most {MOST_TESTS}")
    limit_s = seconds_of(body)
    if not isinstance(stops, bool):
        raise Refused("`stop_at_failure` must be true or false")
    return program, tests, limit_s, stops


async def outcomes(tests: Sequence[Any], stops: bool, run: Run) -> list[Outcome]:
    """Runs tests one after another up to the first that is not passed, or as many at a time as there are workers; returns their outcomes."""
    try:
        if not stops:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(run(test)) for test in tests]
            return [task.result() for task in running]
        found: list[Outcome] = []
        for test in tests:
            found.append(await run(test))
            if found[-1].status != "passed":
                break
        return found + [SKIPPED] * (len(tests) - len(found))
    except* Unsafe as errors:
        raise Refused(str(errors.exceptions[0]), 500) from errors


def compared(outcome: Outcome, output: str) -> Outcome:
    """Returns the outcome, as failed where the printed text is not `output`."""
    if outcome.status != "passed" or lines(outcome.stdout) == lines(output):
        return outcome
    return outcome._replace(status="failed", detail="another output was expected")


def lines(text: str) -> list[str]:
    """Returns the lines of a text without the white space that is not compared."""
    return [line.rstrip() for line in text.strip().splitlines()]


def answer(outcomes: list[Outcome]) -> dict[str, Any]:
    """Returns the answer to a request."""
    passed = [outcome.status == "passed" for outcome in outcomes]
    return {
        "results": [int(ok) for ok in passed],
        "runtimes": [outcome.seconds if ok else -1 for outcome, ok in zip(outcomes, passed)],
        "verdicts": [outcome.status for outcome in outcomes],
        "details": [outcome.detail for outcome in outcomes],
    }


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line and serves; returns 1 where programs cannot be isolated here, with a line that says what to do."""
    parser = command_line.parser("rewards.services.sandbox", __doc__)
    parser.add_argument("--workers", type=int, default=2, help="programs at a time")
    parser.add_argument("--memory_mb", type=int, default=1024, help="of all processes of a run together")
    parser.add_argument("--disk_mb", type=int, default=64, help="of all files of a run together")
    parser.add_argument("--processes", type=int, default=16, help="processes and threads of a run")
    parser.add_argument(
        "--sessions", type=int, default=32, help="sessions at a time, each an interpreter of its own; 0 for none"
    )
    parser.add_argument(
        "--isolation", choices=ISOLATIONS, help="without it, the first of these that works; the last must be allowed"
    )
    parser.add_argument(
        "--allow_weak_isolation", action="store_true",
        help="where neither namespaces nor Landlock can be had, run programs with resource limits alone: they reach what their user can",
    )  # fmt: skip
    http_service.options(parser, port=8001)
    given = parser.parse_args(argv)
    token = http_service.token_of(given.host, given.token_env)
    sandbox = Sandbox(
        isolation=given.isolation, workers=given.workers, memory_mb=given.memory_mb, disk_mb=given.disk_mb,
        processes=given.processes, allow_weak_isolation=given.allow_weak_isolation,
    )  # fmt: skip
    try:
        isolation = asyncio.run(sandbox.prepare())
    except Unsafe as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if isolation == "limits":
        print(WEAK, file=sys.stderr, flush=True)
    print(f"serving the sandbox on http://{given.host}:{given.port}, programs shut in by {isolation}", flush=True)
    sessions = Sessions(sandbox, given.sessions) if given.sessions else None
    http_service.serve(application(sandbox, token, sessions=sessions), given.host, given.port)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
