"""The sandbox: verdicts of tests, hostile programs that are held, the service and the reward that asks it."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from jaxrl_llm.experience import Scores
from jaxrl_llm.rewards.code_tests import CodeTests, block
from jaxrl_llm.rewards.service import Service
from jaxrl_llm.rewards.services.sandbox import application
from jaxrl_llm.rewards.services.sandbox_run import Outcome, Sandbox, Unsafe

Score = Callable[..., Scores]
Serve = Callable[[FastAPI], str]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="programs are shut in on Linux alone"),
    pytest.mark.xdist_group("sandbox"),  # hostile programs one at a time
]

LONG_S = 60.0  # a limit that a slow machine does not meet
PROCESSES = 8
DISK_MB = 1
JSON = {"Content-Type": "application/json"}


def runs(isolation: Any, programs: dict[str, tuple[Any, ...]]) -> tuple[str, dict[str, Outcome]]:
    """The isolation that was had, and the outcome of each (program, test, stdin, limit_s)."""

    async def run() -> tuple[str, dict[str, Outcome]]:
        box = Sandbox(
            isolation=isolation,
            allow_weak_isolation=isolation == "limits",
            memory_mb=512,
            disk_mb=DISK_MB,
            processes=PROCESSES,
        )
        had = await box.prepare()
        found = await asyncio.gather(*(box.run(*program) for program in programs.values()))
        return had, dict(zip(programs, found))

    return asyncio.run(run())


FORKS = """
import os, time
started = 0
try:
    while started < 100:
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        started += 1
except OSError:
    pass
print(started)
"""
LEAVES = "import subprocess; subprocess.Popen(['sleep', '{mark}'], start_new_session=True); print('left')"


@pytest.mark.parametrize("isolation", ["namespaces", "landlock", "limits"])
def test_hostile_programs_are_held_and_the_others_judged(
    isolation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_A_TEST", "secret")
    outside, mark = tmp_path / "outside", f"{600 + os.getpid()}.125"
    programs: dict[str, tuple[Any, ...]] = {
        "right": ("def f(x): return x + 1", "assert f(1) == 2", "", LONG_S),
        "wrong": ("def f(x): return x + 1", "assert f(1) == 3", "", LONG_S),
        "broken": ("def f(x) return", "assert f(1) == 2", "", LONG_S),
        "exit": ("import os; os._exit(0)", "assert False", "", LONG_S),
        "echo": ("print(2 * int(input()))", None, "21\n", LONG_S),
        "loop": ("while True: pass", "", "", 1.0),
        "sleep": ("import time; time.sleep(600)", "", "", 1.0),
        "memory": ("x = bytearray(2**34)", "", "", LONG_S),
        "forks": (FORKS, None, "", LONG_S),
        "leaves": (LEAVES.format(mark=mark), None, "", LONG_S),
        "disk": (f"open('a', 'wb').write(bytes({2 * DISK_MB * 2**20}))", "", "", LONG_S),
        "file": ("open('a', 'w').write('b'); print(open('a').read())", None, "", LONG_S),
        "socket": ("import socket; socket.create_connection(('127.0.0.1', 9))", "", "", LONG_S),
        "output": ("while True: print('x' * 4096)", None, "", LONG_S),
        "environment": ("import os; print(os.environ.get('SECRET_OF_A_TEST'))", None, "", LONG_S),
        "outside": (f"open({str(outside)!r}, 'w').write('b')", "", "", LONG_S),
        "group": ("import os, signal; os.kill(0, signal.SIGKILL)", "", "", LONG_S),
        "exits": ("exit()", None, "", LONG_S),
        "surrogate": ("a = '\ud800'", "", "", LONG_S),
    }
    try:
        had, found = runs(isolation, programs)
    except Unsafe as problem:
        if isolation == "limits":
            raise
        pytest.skip(f"this kernel gives no {isolation}: {problem}")
    assert had == isolation
    expected = {
        "right": "passed", "wrong": "failed", "broken": "error", "exit": "error", "echo": "passed", "loop": "timeout",
        "sleep": "timeout", "memory": "memory", "forks": "passed", "leaves": "passed", "disk": "error",
        "file": "passed", "socket": "error", "output": "output", "environment": "passed",
        "group": "passed" if isolation == "namespaces" else "error",  # the first process of a namespace outlives it
        "exits": "passed", "surrogate": "error",
    }  # fmt: skip
    assert {name: found[name].status for name in expected} == expected, found
    printed = {name: found[name].stdout for name in ("echo", "file", "environment")}
    assert printed == {"echo": "42\n", "file": "b\n", "environment": "None\n"}
    assert int(found["forks"].stdout) < 100 and "Operation not permitted" in found["socket"].detail
    if isolation == "namespaces":
        assert int(found["forks"].stdout) < PROCESSES
    if isolation != "limits" or os.getuid() == 0:  # else the program has this very user's rights
        assert found["outside"].status == "error" and not outside.exists()
    assert mark not in commands(), "a process outlived its run"


def commands() -> str:
    """The command lines of all processes."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(entry.read_text(errors="replace"))
        except OSError:
            continue
    return "\n".join(found)


def guards() -> list[int]:
    """The processes of this one that hold runs."""
    found = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # a thread, or a child, that has ended meanwhile
            children = Path(f"/proc/self/task/{thread}/children").read_text().split()
            found += [int(c) for c in children if b"guard.main" in Path(f"/proc/{c}/cmdline").read_bytes()]
    return found


def test_a_run_that_is_given_up_ends_and_the_next_one_has_a_new_guard() -> None:
    mark = f"{700 + os.getpid()}.125"
    waiting = f"import subprocess; subprocess.run(['sleep', '{mark}'])"

    async def run() -> list[Any]:
        box, found = Sandbox(workers=1), []
        await box.prepare()
        first = guards()
        assert (await box.run("print(1)")).stdout == "1\n" and guards() == first and len(first) == 1, "it is kept"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(box.run(waiting, limit_s=LONG_S), 1.5)
        found.append(await box.run("print(2)"))
        going = asyncio.create_task(box.run(waiting, limit_s=LONG_S))
        await asyncio.sleep(0.5)
        (guard,) = guards()
        assert guard not in first
        os.kill(guard, signal.SIGKILL)
        with pytest.raises(Unsafe, match="the guard ended with code -9"):
            await going
        found.append(await box.run("print(3)"))
        box.close()
        return found

    had = guards()
    assert had == []
    assert [outcome.stdout for outcome in asyncio.run(run())] == ["2\n", "3\n"]
    assert mark not in commands() and guards() == [], "a process outlived its sandbox"


@pytest.fixture(scope="module")
def url(serve_for_module: Serve) -> str:
    return serve_for_module(application(Sandbox()))


def post(url: str, body: Any) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), JSON), timeout=120
        ) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_service_answers_an_entry_a_test(url: str) -> None:
    body = {"program": "def f(x): return 2 * x", "tests": ["assert f(1) == 2", "assert f(1) == 3"]}
    status, answer = post(f"{url}/test_program", body | {"max_execution_time": 60})
    assert status == 200 and answer["results"] == [1, 0] and answer["verdicts"] == ["passed", "failed"]
    assert answer["runtimes"][0] > 0 and answer["runtimes"][1] == -1
    tests = [{"input": "1 2", "output": "3 \n\n"}, {"input": "1 2", "output": "4"}, {"input": "x", "output": ""}]
    body = {"program": "print(sum(map(int, input().split())))", "tests": json.dumps(tests), "max_execution_time": 60}
    assert post(f"{url}/test_program_stdio", body)[1]["verdicts"] == ["passed", "failed", "error"]


def test_bad_requests_are_refused_with_a_reason(url: str) -> None:
    for path, body, reason in [
        ("/test_program", {"tests": []}, "`program` must be a text"),
        ("/test_program", {"program": "", "tests": {"a": 1}}, "`tests` must be a list"),
        ("/test_program", {"program": "", "tests": "gASVAAAA"}, "`tests` is no JSON"),
        ("/test_program", {"program": "", "tests": [1]}, "must hold texts of Python"),
        ("/test_program", {"program": "", "tests": [], "max_execution_time": 1e9}, "`max_execution_time` must be"),
        ("/test_program_stdio", {"program": "", "tests": ["assert 1"]}, "`input` and `output`"),
    ]:
        status, answer = post(url + path, body)
        assert status == 400 and reason in answer["error"]


def test_the_reward_is_the_share_of_tests_that_the_last_block_passes(url: str, score: Score) -> None:
    right, half = "```python\ndef f(x):\n    return x\n```", "```\ndef f(x): return 1\n```"
    texts = [f"first {half} then {right} done", half, "def f(x): return x", ""]
    extra = {"tests": ["assert f(1) == 1", "assert f(2) == 2"]}
    service = Service(urls=(url,), limit_s=120.0)
    found = score(CodeTests(service=service, test_limit_s=60.0), texts, extra=extra)
    assert found.parts["code"].tolist() == [1, 0, 0, 0] and found.valid["code"].all()
    assert found.parts["log/pass_rate"].tolist() == [1, 0.5, 0, 0]
    partly = CodeTests(service=service, test_limit_s=60.0, least=0.0)
    assert score(partly, [half], extra=extra).parts["code"].tolist() == [0.5]
    with pytest.raises(ValueError, match=r"prompt 'p' has no tests in the column 'tests'"):
        score(partly, [half])


def test_a_sandbox_that_is_down_is_invalid_not_wrong(score: Score) -> None:
    dead = CodeTests(service=Service(urls=("http://127.0.0.1:9",), tries=1))
    found = score(dead, ["```python\n1\n```", "no program"], extra={"tests": ["assert True"]})
    assert found.valid["code"].tolist() == [False, True]


def test_a_block_of_another_language_is_no_program() -> None:
    assert block("```bash\nls\n```") is None
    assert block("```Python\na = 1\n```\n```json\n{}\n```") == "a = 1\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a run a user of its own")
def test_the_end_of_a_run_leaves_the_runs_of_another_server_alone() -> None:
    """What a run of one server does reaches no run of another: no two of them share a user."""
    elsewhere = (
        "import asyncio\nfrom jaxrl_llm.rewards.services.sandbox_run import Sandbox\n"
        "async def main():\n    box = Sandbox(isolation='landlock')\n    await box.prepare()\n    print('ready', flush=True)\n"
        "    found = await box.run('import time; time.sleep(3); a = 1', test='assert a == 1', limit_s=60)\n"
        "    print(found.status, found.detail)\nasyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", elsewhere], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        time.sleep(1)

        async def here() -> Outcome:
            box = Sandbox(isolation="landlock")
            await box.prepare()
            return await box.run("a = 1", test="assert a == 1", limit_s=LONG_S)

        assert asyncio.run(here()).status == "passed"
        assert server.stdout.read().split() == ["passed"]


def test_the_command_serves_until_it_is_stopped() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jaxrl_llm.rewards.services.sandbox", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as response:
                    health = json.load(response)
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.1)
        assert health["status"] == "healthy" and health["isolation"] in ("namespaces", "landlock")
        body = {"program": "a = 1", "tests": ["assert a == 1"], "max_execution_time": 60}
        assert post(f"http://127.0.0.1:{port}/test_program", body)[1]["results"] == [1]
    finally:
        server.terminate()
        server.wait(30)
