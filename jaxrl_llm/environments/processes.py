"""Ends programs with all that they started, those included that left their process group.

Where the run itself is killed, a keeper does: a process of this file, which sees its standard input end with the run.
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

MARK = "JAXRL_LLM_STARTED_BY"  # environment variable that what a program starts inherits
LIMIT_S = 10.0
STARTING_S = 0.5  # within which a process that the run was starting has its variables


def mark() -> str:
    """A random value for the variable MARK, which tells the processes of one program from others, and those of this run."""
    return f"{_kept()}.{secrets.token_hex(16)}"


@functools.cache
def _kept() -> str:
    """What the marks of this process begin with; its keeper is started at the first call."""
    own = secrets.token_hex(16)
    if sys.platform == "linux":
        keeper = subprocess.Popen(
            [sys.executable, "-I", __file__, own], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
            start_new_session=True,
        )  # fmt: skip
        atexit.register(keeper.communicate)
    return own


async def end(process: asyncio.subprocess.Process, marked: str) -> None:
    """Kills a program that leads a process group, and on Linux every process that has its mark; then waits for the program."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.to_thread(_end_marked, marked)
    await process.wait()


def _end_marked(marked: str) -> None:
    """Kills the processes with a mark until there are none: one may have started another meanwhile."""
    deadline = time.monotonic() + LIMIT_S
    while found := list(_marked(marked)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the processes {found} of an agent did not end within {LIMIT_S:g} s")
        for one in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        time.sleep(0.01)


def _marked(marked: str) -> Iterator[int]:
    """The processes whose mark begins so and that have not ended; none where the system does not show them (other than Linux)."""
    entry = f"{MARK}={marked}".encode()
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as held:
            if any(variable.startswith(entry) for variable in held.read().split(b"\0")):
                yield int(name)


def main() -> None:
    """Waits for the end of the run, and ends what it left."""
    sys.stdin.buffer.read()
    _end_marked(sys.argv[1])
    time.sleep(STARTING_S)
    _end_marked(sys.argv[1])


if __name__ == "__main__":
    main()
