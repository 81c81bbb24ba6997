"""The sandbox's service under clients that go away, loop, flood it or come from other sites."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI

from jaxrl_llm.rewards.services.sandbox import application
from jaxrl_llm.rewards.services.sandbox_run import Sandbox, Unsafe
from jaxrl_llm.rewards.services.turns import Turns

Serve = Callable[[FastAPI], str]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="programs are shut in on Linux alone"),
    pytest.mark.xdist_group("sandbox"),
]

LOOP = {"program": "while True: pass", "tests": [{"input": "", "output": ""}] * 20}
HONEST = {"program": "print(7)", "tests": [{"input": "", "output": "7"}], "max_execution_time": 60}
STDIO = "/test_program_stdio"


async def ask(
    url: str, body: Any, headers: Mapping[str, str] | None = None, limit_s: float = 100.0
) -> tuple[int, Any, Mapping[str, str]]:
    """(status, JSON, headers) of a call; `body` is JSON, or bytes as they are."""
    given = {"data": body} if isinstance(body, bytes) else {"json": body}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=limit_s)) as session:
        async with session.post(url, headers=headers, **given) as answer:
            return answer.status, json.loads(await answer.text()), answer.headers


def loops() -> int:
    """Programs that run on this machine and began as those of the sandbox do."""
    found = 0
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += b"jaxrl" not in file.read_bytes()[:40] and b"room = type(sys)" in file.read_bytes()
        except OSError:
            continue
    return found


def test_a_client_that_goes_away_ends_its_runs(serve: Serve) -> None:
    url = serve(application(Sandbox(workers=2)))
    before = loops()

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await ask(url + STDIO, {**LOOP, "max_execution_time": 60}, limit_s=1.5)
        deadline = time.monotonic() + 10
        while loops() > before:
            assert time.monotonic() < deadline, "the program runs on though nobody waits for it"
            await asyncio.sleep(0.1)
        began = time.monotonic()
        assert (await ask(url + STDIO, HONEST))[1]["results"] == [1]
        assert time.monotonic() - began < 20, "the 19 tests that had not begun are done nevertheless"

    asyncio.run(leave())


def test_the_loops_of_one_client_do_not_keep_another_waiting(serve: Serve) -> None:
    """Six programs that loop through 20 tests of a second each would hold both workers for a minute."""
    url = serve(application(Sandbox(workers=2)))

    async def both() -> list[int]:
        looping = [
            asyncio.create_task(ask(url + STDIO, {**LOOP, "max_execution_time": 1.0}, {"X-Client": "loops"}))
            for _ in range(6)
        ]
        await asyncio.sleep(0.5)
        answers = await asyncio.gather(
            *(ask(url + STDIO, HONEST, {"X-Client": "honest"}, limit_s=20.0) for _ in range(10))
        )
        for task in looping:
            task.cancel()
        await asyncio.gather(*looping, return_exceptions=True)
        return [answer[1]["results"] for answer in answers]

    assert asyncio.run(both()) == [[1]] * 10


def test_tests_after_the_first_failure_are_not_run_where_that_is_asked_for(serve: Serve) -> None:
    url = serve(application(Sandbox(workers=1)))
    tests = [{"input": "", "output": out} for out in ("7", "8", "7", "7")]

    async def run() -> None:
        _, answer, _ = await ask(url + STDIO, {**HONEST, "tests": tests, "stop_at_failure": True})
        assert answer["verdicts"] == ["passed", "failed", "skipped", "skipped"] and answer["results"] == [1, 0, 0, 0]
        _, answer, _ = await ask(url + STDIO, {**HONEST, "tests": tests})
        assert answer["results"] == [1, 0, 1, 1]

    asyncio.run(run())


def test_a_service_that_is_full_refuses_and_says_when_to_come_again(serve: Serve) -> None:
    url = serve(application(Sandbox(workers=1), most_waiting=4))

    async def run() -> None:
        filling = asyncio.create_task(ask(url + STDIO, {**LOOP, "tests": LOOP["tests"][:5], "max_execution_time": 60}))
        await asyncio.sleep(1.0)
        status, answer, headers = await ask(url + STDIO, HONEST)
        assert status == 503 and "4 runs are waiting" in answer["error"] and headers["Retry-After"] == "1"
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)
        await asyncio.sleep(1.0)
        assert (await ask(url + STDIO, HONEST))[1]["results"] == [1]

    asyncio.run(run())


def test_other_sites_other_names_plain_texts_and_deep_nests_are_refused(serve: Serve) -> None:
    url = serve(application(Sandbox(workers=1)))
    text, deep = json.dumps(HONEST).encode(), b"[" * 100_000
    nested = json.dumps({"program": "", "tests": "[" * 100_000}).encode()
    kind = {"Content-Type": "application/json"}
    own = {**kind, "Origin": url}

    async def run() -> list[int]:
        cases = [
            (text, {**kind, "Host": "evil.example"}), (text, {**kind, "Origin": "http://evil.example"}), (text, {**kind, "Origin": "null"}),
            (text, {"Content-Type": "text/plain"}), (text, {"Content-Type": "application/x-www-form-urlencoded"}),
            (deep, kind), (nested, kind), (text, own),
        ]  # fmt: skip
        return [(await ask(url + STDIO, body, headers))[0] for body, headers in cases]

    assert asyncio.run(run()) == [403, 403, 403, 415, 415, 400, 400, 200]


def test_turns_go_to_whom_has_had_least() -> None:
    order: list[tuple[str, int]] = []

    async def one(turns: Turns, who: tuple[str, int], seconds: float) -> None:
        async with turns.turn(who):
            order.append(who)
            await asyncio.sleep(seconds)

    async def run() -> None:
        turns = Turns(1)
        waiting = [asyncio.create_task(one(turns, ("long", n), 0.05)) for n in (1, 2, 3, 4)]
        await asyncio.sleep(0.01)
        waiting += [asyncio.create_task(one(turns, ("short", n), 0.001)) for n in (1, 2, 3)]
        await asyncio.sleep(0.01)
        gone = asyncio.create_task(one(turns, ("gone", 1), 0.0))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(*waiting)
        assert turns.waiting == 0

    asyncio.run(run())
    assert order == [("long", 1), ("short", 1), ("short", 2), ("short", 3), ("long", 2), ("long", 3), ("long", 4)]


def test_weak_isolation_is_never_had_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="allow_weak_isolation"):
        Sandbox(isolation="limits")
    tried = []

    async def run(self: Sandbox, *_: Any, **__: Any) -> Any:
        tried.append(self.isolation)
        raise Unsafe("refused by the kernel")

    monkeypatch.setattr(Sandbox, "run", run)
    with pytest.raises(
        Unsafe, match=r"^programs cannot be shut in here \(.*\)\. Run the service as .*--allow_weak_isolation"
    ) as refusal:
        asyncio.run(Sandbox().prepare())
    assert set(tried) == {"namespaces", "landlock"} and "\n" not in str(refusal.value)
    with pytest.raises(Unsafe):
        asyncio.run(Sandbox(allow_weak_isolation=True).prepare())
    assert tried[-1] == "limits"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up capabilities")
def test_a_root_without_capabilities_is_served(tmp_path: Path) -> None:
    """As in a container that drops all of them."""
    program = "import asyncio\nfrom jaxrl_llm.rewards.services.sandbox_run import Sandbox\nprint(asyncio.run(Sandbox().prepare()))"
    command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", program]

    async def run() -> str:
        made = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await made.communicate()
        return (out or err).decode().strip().splitlines()[-1]

    found = asyncio.run(run())
    assert found == "landlock" or "Run the service as" in found
