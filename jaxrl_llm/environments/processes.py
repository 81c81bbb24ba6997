"""Ends programs with all that they started, those included that left their process group."""

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator

MARK = "JAXRL_LLM_STARTED_BY"  # environment variable that what a program starts inherits
LIMIT_S = 10.0


def mark() -> str:
    """A random value for the variable MARK, which tells the processes of one program from others."""
    return secrets.token_hex(16)


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
    """The processes that have a mark and have not ended; none where the system does not show them (other than Linux)."""
    entry = f"{MARK}={marked}".encode()
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as held:
            if entry in held.read().split(b"\0"):
                yield int(name)
