"""Ends programs with all processes that they started, those included that left their process group.

Where the run itself is killed, a keeper does so: a process that runs this file, and whose standard input ends with the run.
"""

import asyncio
import atexit
import contextlib
import functools
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

MARK = "JAXRL_LLM_STARTED_BY"  # environment variable that all processes of a program inherit
LIMIT_S = 10.0
STARTING_S = 0.5  # seconds within which a process that the run was starting has its variables


def mark() -> str:
    """Returns a random value for the variable MARK, which identifies the processes of one program and those of this run."""
    return f"{_kept()}.{secrets.token_hex(16)}"


@functools.cache
def _kept() -> str:
    """Returns the prefix of this process's marks; the first call starts its keeper."""
    own = secrets.token_hex(16)
    if sys.platform == "linux":
        keeper = subprocess.Popen(
            [sys.executable, "-I", __file__, own], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
            start_new_session=True,
        )  # fmt: skip
        atexit.register(keeper.communicate)
    return own


async def end(process: asyncio.subprocess.Process, marked: str) -> None:
    """Kills a program that leads a process group, and on Linux every process with its mark; then waits for the program."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.to_thread(_end_marked, marked)
    await process.wait()


def _end_marked(marked: str) -> None:
    """Kills the processes with a mark until there are none, since one may have started another meanwhile."""
    deadline = time.monotonic() + LIMIT_S
    while found := list(_marked(marked)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the processes {found} of an agent did not end within {LIMIT_S:g} s")
        for one in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        time.sleep(0.01)


def _marked(marked: str) -> Iterator[int]:
    """Yields the ids of live processes whose mark begins with `marked`; none where the system has no /proc (other than Linux)."""
    entry = f"{MARK}={marked}".encode()
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as held:
            if any(variable.startswith(entry) for variable in held.read().split(b"\0")):
                yield int(name)


def main() -> None:
    """Waits for the end of the run, and ends the processes that it left."""
    sys.stdin.buffer.read()
    _end_marked(sys.argv[1])
    time.sleep(STARTING_S)
    _end_marked(sys.argv[1])


if __name__ == "__main__":
    main()
