"""Sessions of the sandbox keep names and files from cell to cell, see nothing of each other, and end with their limits."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI

from jaxrl_llm.rewards.services.sandbox import application
from jaxrl_llm.rewards.services.sandbox_run import Sandbox
from jaxrl_llm.rewards.services.sandbox_sessions import Sessions
from jaxrl_llm.rewards.services.untrusted import process_tree

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="programs are shut in on Linux alone"),
    pytest.mark.xdist_group("sandbox"),
]

Serve = Callable[[FastAPI], str]


class Client:
    """Asks a service, one call after another."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, verb: str = "POST", **body: Any) -> tuple[int, Any]:
        async def asked() -> tuple[int, Any]:
            async with aiohttp.ClientSession() as session:
                async with session.request(verb, self.url + path, json=body) as answer:
                    return answer.status, await answer.json()

        return asyncio.run(asked())

    def open(self, **body: Any) -> str:
        status, found = self.ask("/sessions", **body)
        assert status == 200, found
        return str(found["id"])

    def cell(self, id: str, code: str, limit_s: float = 20.0) -> Any:
        status, found = self.ask(f"/sessions/{id}/cells", code=code, max_execution_time=limit_s)
        assert status == 200, found
        return found


@pytest.fixture(scope="module")
def client(serve_for_module: Serve) -> Iterator[Client]:
    sandbox = Sandbox(workers=1, memory_mb=256)
    yield Client(serve_for_module(application(sandbox, sessions=Sessions(sandbox, 4, output_kb=4))))


@pytest.fixture
def session(client: Client) -> Iterator[str]:
    id = client.open()
    yield id
    client.ask(f"/sessions/{id}", "DELETE")


def interpreters() -> int:
    """Interpreters of sandboxes that come from this process."""
    found = 0
    for process in process_tree.descendants(os.getpid()):
        with contextlib.suppress(OSError):
            found += b"room = type(sys)" in Path(f"/proc/{process}/cmdline").read_bytes()
    return found


def test_names_and_files_stay_from_cell_to_cell(client: Client, session: str) -> None:
    assert client.cell(session, "x = 40\nopen('kept', 'w').write('abc')")["status"] == "passed"
    found = client.cell(session, "print(open('kept').read())\nx + 2")
    assert (found["status"], found["stdout"], found["value"], found["truncated"]) == ("passed", "abc\n", "42", False)
    assert client.cell(session, "def f(n):\n    return n * x\nNone")["value"] == ""
    assert client.cell(session, "f(2)")["value"] == "80"


def test_an_error_is_told_with_the_cells_own_frames_and_the_session_goes_on(client: Client, session: str) -> None:
    client.cell(session, "kept = 1")
    found = client.cell(session, "import sys\nprint('out')\nprint('err', file=sys.stderr)\n1 / 0")
    assert (found["status"], found["stdout"], found["stderr"]) == ("error", "out\n", "err\n")
    assert found["detail"].splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert found["detail"].count("File ") == 1 and 'File "<cell>", line 4' in found["detail"]
    assert "SyntaxError" in client.cell(session, "def")["detail"]
    assert "SystemExit" in client.cell(session, "exit(3)")["detail"]
    assert client.cell(session, "input()")["detail"].endswith("EOFError: EOF when reading a line")
    assert client.cell(session, "kept")["value"] == "1"


def test_sessions_do_not_see_each_other_nor_the_machine(client: Client, session: str) -> None:
    other = client.open()
    client.cell(session, "secret = 7\nopen('mine', 'w').write('x')\nimport os; place = os.path.abspath('mine')")
    place = client.cell(session, "place")["value"]
    assert "NameError" in client.cell(other, "secret")["detail"]
    assert client.cell(other, "import os; os.listdir('.')")["value"] == "[]"
    if Path(place.strip("'")).is_absolute():
        assert (
            client.cell(other, f"try:\n    found = open({place}).read()\nexcept OSError:\n    found = None\nfound")[
                "value"
            ]
            == ""
        )
    for attempt in ("__import__('socket').socket()", "open('/etc/passwd')", f"__import__('os').kill({os.getpid()}, 0)"):
        assert client.cell(other, attempt)["status"] == "error", attempt
    client.ask(f"/sessions/{other}", "DELETE")


def test_a_cell_that_runs_out_of_time_ends_its_session(client: Client) -> None:
    id, before = client.open(), interpreters()
    found = client.cell(id, "print('begun', flush=True)\nwhile True: pass", limit_s=1.0)
    assert (found["status"], found["stdout"]) == ("timeout", "begun\n") and 1.0 <= found["seconds"] < 5.0
    status, refused = client.ask(f"/sessions/{id}/cells", code="1")
    assert status == 410 and id in refused["error"]
    assert interpreters() == before - 1


@pytest.mark.parametrize(
    ("code", "status"),
    [("x = bytearray(400 * 2**20)", "error"), ("import os; os._exit(0)", "ended"), ("import os; os.write(4, b'no record\\n')", "ended")],
)  # fmt: skip
def test_what_is_too_much_or_breaks_the_interpreter_is_told(client: Client, code: str, status: str) -> None:
    id = client.open()
    found = client.cell(id, code)
    assert found["status"] == status, found
    gone = client.ask(f"/sessions/{id}/cells", code="1")[0] == 410
    assert gone == (status == "ended")
    client.ask(f"/sessions/{id}", "DELETE")


def test_a_long_output_is_cut_in_the_middle_and_an_endless_one_ends_with_its_time(client: Client, session: str) -> None:
    found = client.cell(session, "print('a' * 5000 + 'b' * 5000)")
    head, mark, tail = found["stdout"].split("\n", 2)
    assert found["truncated"] and head == "a" * 2048 and tail == "b" * 2047 + "\n" and "5905 bytes left out" in mark
    endless = client.cell(session, "while True: print('y' * 1000)", limit_s=1.5)
    assert endless["status"] == "timeout" and len(endless["stdout"]) < 5000


def test_a_program_that_starts_threads_and_processes_leaves_none(client: Client) -> None:
    before = interpreters()
    id = client.open()
    client.cell(id, "import os, threading, time\nif not os.fork():\n    time.sleep(600)")
    assert interpreters() == before + 2
    client.ask(f"/sessions/{id}", "DELETE")
    deadline = time.monotonic() + 10
    while interpreters() > before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_more_sessions_than_there_may_be_are_refused(client: Client) -> None:
    ids = [client.open() for _ in range(4)]
    status, refused = client.ask("/sessions")
    assert status == 429 and "4 sessions are open" in refused["error"]
    client.ask(f"/sessions/{ids[0]}", "DELETE")
    ids[0] = client.open()
    for id in ids:
        client.ask(f"/sessions/{id}", "DELETE")


def test_abandoned_sessions_are_gone_after_their_time(serve: Serve) -> None:
    sandbox, before = Sandbox(workers=1), interpreters()
    sessions = Sessions(sandbox, 50)
    client = Client(serve(application(sandbox, sessions=sessions)))
    for _ in range(50):
        client.open(idle_s=2.0)
    deadline = time.monotonic() + 30
    while sessions.count or interpreters() > before:
        assert time.monotonic() < deadline, (sessions.count, interpreters() - before)
        time.sleep(0.2)


def test_a_run_tells_what_was_printed(client: Client) -> None:
    status, found = client.ask(
        "/run", program="import sys\nprint(input())\nprint('e', file=sys.stderr)", stdin="hi", max_execution_time=20
    )
    assert status == 200
    assert (found["status"], found["stdout"], found["stderr"], found["truncated"]) == ("passed", "hi\n", "e\n", False)
    assert client.ask("/run", program=3)[1] == {"error": "`program` must be a text"}
    assert "in (0, 120]" in client.ask("/run", program="", max_execution_time=0)[1]["error"]
    assert "idle_s" in client.ask("/sessions", idle_s=-1)[1]["error"]
