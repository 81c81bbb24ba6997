"""Sandboxes of every isolation and user for the tests that attack them."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEMORY_MB, DISK_MB, PROCESSES = 256, 4, 12
SECRET = secrets.token_hex(8)  # in the tests of attacks, where a program must not find it
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
BARE = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
# Runs each line of standard input, (program, test, stdin, limit_s), and answers with the outcome.
SERVER = f"""
import asyncio, json, sys
from jaxrl_llm.rewards.services.sandbox_run import Sandbox, Unsafe

async def main():
    box = Sandbox(isolation=sys.argv[1], memory_mb={MEMORY_MB}, disk_mb={DISK_MB}, processes={PROCESSES}, output_kb=64)
    try:
        print(json.dumps(await box.prepare()), flush=True)
    except Unsafe as problem:
        print(json.dumps(["refused", str(problem)]), flush=True)
        return
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await box.run(*json.loads(line))), flush=True)
    box.close()

asyncio.run(main())
"""

Attack = Callable[..., tuple[str, str, str]]


def python_of(user: list[str]) -> str:
    """An interpreter that the user can start."""
    found = [sys.executable] if user != NOBODY else []
    found += [p for p in (shutil.which("python3", path=place) for place in ("/usr/local/bin", "/usr/bin")) if p]
    for python in found:
        if (
            subprocess.run(
                [*user, python, "-c", "import sys; assert sys.version_info >= (3, 11)"], capture_output=True
            ).returncode
            == 0
        ):
            return python
    raise NotOffered("no interpreter of this machine can be started by an ordinary user")


def offered() -> dict[str, tuple[list[str], str]]:
    """(user, isolation) of every kind that is offered, by name; namespaces need a capability or an ordinary user."""
    if os.geteuid() != 0:
        return {f"{mode}-user": ([], mode) for mode in ("namespaces", "landlock")}
    users: dict[str, list[str]] = {"root": [], "nobody": NOBODY, "bare": BARE}
    kinds = [
        (name, mode) for name in users for mode in ("namespaces", "landlock") if (name, mode) != ("bare", "namespaces")
    ]
    return {f"{mode}-{name}": (users[name], mode) for name, mode in kinds}


@contextmanager
def environment() -> Iterator[dict[str, str]]:
    """Variables under which any user imports the sandbox: its pyseccomp is a copy, since a venv may be its owner's alone."""
    import pyseccomp

    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        os.chmod(shutil.copy(pyseccomp.__file__, folder), 0o644)
        yield {"PATH": os.defpath + ":/usr/sbin:/sbin", "PYTHONPATH": f"{ROOT}:{folder}"}


class NotOffered(Exception):
    """An isolation that this kernel, or this user, does not have; says why."""


@contextmanager
def attacked(user: list[str], mode: str) -> Iterator[Attack]:
    """(program, test, stdin, limit_s) -> (status, detail, stdout), in one isolation and as one user; NotOffered where there is none."""
    command = [*user, python_of(user), "-B", "-c", SERVER, mode]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with environment() as env, subprocess.Popen(command, text=True, cwd="/", env=env, **pipes) as server:
        assert server.stdin is not None and server.stdout is not None
        began = json.loads(server.stdout.readline())
        if began != mode:
            server.stdin.close()
            raise NotOffered(f"this kernel does not offer {mode} here: {began}")

        def run(program: str, test: str | None = None, stdin: str = "", limit_s: float = 20.0) -> tuple[str, str, str]:
            server.stdin.write(json.dumps([program, test, stdin, limit_s]) + "\n")
            server.stdin.flush()
            status, detail, _, stdout, _ = json.loads(server.stdout.readline())
            return status, detail, stdout

        yield run
        server.stdin.close()
        server.wait(30)


@pytest.fixture(scope="module", params=offered().values(), ids=offered())
def attack(request: pytest.FixtureRequest) -> Iterator[Attack]:
    """`attacked`, in each isolation and as each user that is offered."""
    with ExitStack() as stack:
        try:
            run = stack.enter_context(attacked(*request.param))
        except NotOffered as why:
            pytest.skip(str(why))
        yield run


def printed(attack: Attack, program: str, stdin: str = "") -> str:
    """What an honest program prints, which must pass."""
    status, detail, stdout = attack(program, None, stdin)
    assert status == "passed", (status, detail)
    return stdout


def refused(attack: Attack, statements: str) -> None:
    """Each line of `statements` raises an OSError in a program; one that does nothing forbidden goes on."""
    lines = statements.strip().splitlines()
    head = "import ctypes, mmap, os, signal, socket, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    head += "def call(*a):\n    r = libc.syscall(*a)\n    if r < 0: raise OSError(ctypes.get_errno(), 'refused')\n    return r\n"
    body = "".join(
        f"try:\n    {line}\n    print('done', {line!r})\nexcept OSError:\n    print('refused')\n" for line in lines
    )
    assert printed(attack, head + body).splitlines() == ["refused"] * len(lines)
