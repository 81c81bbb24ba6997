"""Runs untrusted Python programs, each in a process of its own that is shut in by rewards/sandbox_guard.py."""

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

GUARD = Path(__file__).with_name("sandbox_guard.py")
SLACK_S = 30.0  # over the limit, before the guard itself is given up
FIRST_UID = 1 << 20  # users without an account, one for each run that goes on at a time
SLOTS = (
    256  # users of one server: the end of a run by limits kills all that its user runs, in any server of the machine
)
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
NO_SOCKETS = """
import socket
try:
    socket.socket()
except OSError:
    pass
else:
    raise RuntimeError("sockets can be opened")
"""

Isolation = Literal["namespaces", "limits"]


class Unsafe(RuntimeError):
    """This machine cannot shut programs in."""


class Outcome(NamedTuple):
    """What came of a run.

    Attributes:
      status: "passed", "failed" (an assertion), "error" (an exception, or an early end), "timeout", "memory", "output"
        (too much of it).
      detail: the error, in words.
      seconds: how long it took.
      stdout: what it printed.
    """

    status: str
    detail: str
    seconds: float
    stdout: str


class Sandbox:
    """A place to run programs in.

    Args:
      isolation: "namespaces" (own files, processes and network), "limits" (an own folder, resource limits, no sockets),
        or None for the strongest that works here.
      workers: runs at a time.
      memory_mb: address space of a process, in MiB.
      disk_mb: of each file, and where there are namespaces of all files together, in MiB.
      processes: processes and threads of a run.
      output_kb: printed text, in KiB, beyond which a run is ended.
    """

    def __init__(
        self, *, isolation: Isolation | None = None, workers: int = 2, memory_mb: int = 1024, disk_mb: int = 64,
        processes: int = 16, output_kb: int = 1024,
    ) -> None:  # fmt: skip
        numbers = {
            "workers": workers,
            "memory_mb": memory_mb,
            "disk_mb": disk_mb,
            "processes": processes,
            "output_kb": output_kb,
        }
        for name, value in numbers.items():
            if value < 1:
                raise ValueError(f"{name} of a sandbox must be >= 1 (got {value})")
        self.workers = workers
        self.limits = {
            "memory": memory_mb * 2**20,
            "disk": disk_mb * 2**20,
            "processes": processes,
            "output": output_kb * 2**10,
        }
        self.isolation, self.python = isolation, ""
        self._asked = isolation
        self._slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(workers):
            self._slots.put_nowait(slot)

    async def prepare(self) -> Isolation:
        """Finds an isolation and an interpreter that work here, by trying them.

        Raises:
          Unsafe: none does; programs are never run without.
        """
        if sys.platform != "linux":
            raise Unsafe(f"programs can be shut in on Linux alone (this is {sys.platform})")
        problems = []
        kinds: tuple[Isolation, ...] = ("namespaces", "limits") if self._asked is None else (self._asked,)
        for self.isolation in kinds:
            for self.python in interpreters():
                try:
                    tried = await self.run(NO_SOCKETS, limit_s=60.0)
                except Unsafe as problem:
                    problems.append(f"{self.isolation}, {self.python}: {problem}")
                    continue
                if tried.status == "passed":
                    return self.isolation
                problems.append(f"{self.isolation}, {self.python}: {tried.status} {tried.detail}")
        raise Unsafe("programs cannot be shut in here: " + "; ".join(problems))

    async def run(self, program: str, test: str | None = None, stdin: str = "", limit_s: float = 5.0) -> Outcome:
        """The outcome of `program`, and then of `test` in its names; without a test the program is the main one.

        Raises:
          Unsafe: the run could not be shut in, so it did not begin.
        """
        slot = await self._slots.get()
        folder = tempfile.mkdtemp(prefix="sandbox")
        job = {
            **self.limits, "program": program, "test": test, "stdin": stdin, "limit_s": limit_s, "folder": folder,
            "isolation": self.isolation, "python": self.python, "paths": visible(self.python), "uid": user(slot),
        }  # fmt: skip
        try:
            found = await self._guarded(job, limit_s)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self._slots.put_nowait(slot)
        if found.status == "setup":
            raise Unsafe(f"a run could not be shut in: {found.detail}")
        return found

    async def _guarded(self, job: Mapping[str, object], limit_s: float) -> Outcome:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-B", str(GUARD), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, start_new_session=True, env={"PATH": os.defpath},
        )  # fmt: skip
        try:
            out, err = await asyncio.wait_for(process.communicate(json.dumps(job).encode()), limit_s + SLACK_S)
        except TimeoutError:
            return Outcome("timeout", "out of time", limit_s, "")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        try:
            return Outcome(**json.loads(out))
        except (ValueError, TypeError):
            return Outcome("setup", f"the guard ended: {err.decode(errors='replace')[-500:]}", 0.0, "")


def user(slot: int) -> int:
    """The user of a run: no other run of this machine has it, in this server or in another one."""
    return FIRST_UID + os.getpid() * SLOTS + slot % SLOTS


def interpreters() -> list[str]:
    """Python interpreters to try: this one's, without its virtual environment, and the system's."""
    own = getattr(sys, "_base_executable", None) or sys.executable
    found = [
        os.path.realpath(own),
        *filter(None, (shutil.which("python3", path=p) for p in ("/usr/local/bin", "/usr/bin"))),
    ]
    return list(dict.fromkeys(found))


def visible(python: str) -> list[str]:
    """The paths of the machine that a program may read: the system's libraries and the interpreter's own folder."""
    prefix = str(Path(python).parent.parent)
    own = [] if any(prefix == p or prefix.startswith(f"{p}/") for p in SYSTEM) or prefix == "/" else [prefix]
    return [path for path in (*SYSTEM, *own) if os.path.lexists(path)]
