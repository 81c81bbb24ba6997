"""Runs untrusted Python programs, each in a process of its own that is shut in by rewards/sandbox_guard.py."""

import asyncio
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
        self._guards = [Guard() for _ in range(workers)]
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="guards")
        self.close = weakref.finalize(self, _end, self._guards, self._threads)  # at the latest where nobody holds it

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
            found = await self._guarded(self._guards[slot], job, limit_s)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self._slots.put_nowait(slot)
        if found.status == "setup":
            raise Unsafe(f"a run could not be shut in: {found.detail}")
        return found

    async def _guarded(self, guard: "Guard", job: Mapping[str, object], limit_s: float) -> Outcome:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, guard.hold, job, limit_s + SLACK_S)
        except asyncio.CancelledError:
            guard.end()  # and the run with it; the thread then reads the end of its answers
            raise


class Guard:
    """A process of rewards/sandbox_guard.py, which holds one run at a time; where it has ended, the next run starts another."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # an answer is that of the job before it

    def hold(self, job: Mapping[str, object], limit_s: float) -> Outcome:
        """The outcome of a job, "timeout" where there is none within `limit_s` seconds; waits for it."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps(job).encode() + b"\n")
                process.stdin.flush()
                if not select.select([process.stdout], [], [], limit_s)[0]:
                    self.end()
                    return Outcome("timeout", "out of time", limit_s - SLACK_S, "")
                return Outcome(**json.loads(process.stdout.readline()))
            except (OSError, ValueError, TypeError):
                self.end()
                return Outcome("setup", f"the guard ended with code {process.returncode}", 0.0, "")

    def end(self) -> None:
        """Ends the process, and with it what it started."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Ends the process, where nothing waits for it, and closes its pipes."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(BrokenPipeError), process:  # what it did not read is not needed
                pass

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(GUARD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                start_new_session=True, env={"PATH": os.defpath},
            )  # fmt: skip
        return self._process


def _end(guards: Sequence[Guard], threads: ThreadPoolExecutor) -> None:
    for guard in guards:
        guard.close()
    threads.shutdown(wait=False)


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
