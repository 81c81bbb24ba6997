"""Runs untrusted Python programs, each in a process of its own that untrusted/guard.py isolates."""

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

from jaxrl_llm.rewards.services import confine
from jaxrl_llm.rewards.services.turns import Turns, Who
from jaxrl_llm.rewards.services.untrusted import process_tree

GUARD = "import sys; sys.path += {paths!r}\nfrom jaxrl_llm.rewards.services.untrusted import {name}\n{name}.main()"
GUARDS_ENVIRONMENT = {"PATH": os.defpath}
SLACK_S = 30.0  # seconds over the limit, before the guard itself is given up
END_S = 5.0  # seconds for a guard to end its run when nobody waits for it any more
FIRST_UID = 1 << 20  # users without an account, two for each concurrent run: the program's and its judge's
SLOTS = 256
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
SHUT_IN = """
import socket
for attempt in (socket.socket, lambda: open("/etc/passwd")):
    try:
        attempt()
    except OSError:
        continue
    raise RuntimeError("programs are not shut in")
"""
NO_SOCKETS = SHUT_IN.replace(', lambda: open("/etc/passwd")', ",")
TESTED = ("def f(x): return x + 1", "assert f(1) == 2")
ADVICE = (
    "programs cannot be shut in here ({problems}). Run the service as an ordinary user where user namespaces are allowed, or with "
    "CAP_SYS_ADMIN, or on Linux 6.2 and newer with Landlock (which a container's seccomp profile must allow); "
    "--allow_weak_isolation runs them with resource limits alone, where they can read and end whatever their user can"
)

Isolation = Literal["namespaces", "landlock", "limits"]
ISOLATIONS: tuple[Isolation, ...] = ("namespaces", "landlock", "limits")  # the last is weak


class Unsafe(RuntimeError):
    """Raised where this machine cannot isolate programs."""


class Outcome(NamedTuple):
    """The outcome of a run.

    Attributes:
      status: "passed", "failed" (an assertion), "error" (an exception, or an early end), "timeout", "memory", "output"
        (too much of it), "cancelled".
      detail: the error as text.
      seconds: duration of the run in seconds.
      stdout: the text printed to standard output.
      stderr: the text printed to standard error.
    """

    status: str
    detail: str
    seconds: float
    stdout: str
    stderr: str = ""


class Sandbox:
    """A place to run programs in.

    Args:
      isolation: "namespaces" (own files, processes and network), "landlock" (an own folder and the interpreter's files alone;
        files cannot be removed), "limits" (an own folder, resource limits, no sockets: weak), or None for the first of these that
        works here; "limits" is never taken without `allow_weak_isolation`.
      workers: number of runs at a time.
      memory_mb: memory of all processes of a run together, and address space of each, in MiB.
      disk_mb: size of all files of a run together, in MiB.
      processes: number of processes and threads of a run.
      output_kb: printed text, in KiB, beyond which a run is ended.
      allow_weak_isolation: whether programs may run where they can reach whatever their user can.

    Raises:
      ValueError: a number below 1, or weak isolation that is not allowed.
    """

    def __init__(
        self, *, isolation: Isolation | None = None, workers: int = 2, memory_mb: int = 1024, disk_mb: int = 64,
        processes: int = 16, output_kb: int = 1024, allow_weak_isolation: bool = False,
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
        if workers > SLOTS // 2:
            raise ValueError(f"workers of a sandbox must be at most {SLOTS // 2} (got {workers})")
        if isolation == "limits" and not allow_weak_isolation:
            raise ValueError(
                "isolation 'limits' is weak: programs reach whatever their user can; allow it by allow_weak_isolation"
            )
        self.workers = workers
        self.limits = {
            "memory": memory_mb * 2**20, "disk": disk_mb * 2**20, "processes": processes, "output": output_kb * 2**10,
        }  # fmt: skip
        self.isolation, self.python, self.prepared = isolation, "", False
        self._asked, self._weak = isolation, allow_weak_isolation
        self.turns = Turns(workers)
        self._guards = [Guard() for _ in range(workers)]
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="guards")
        self.close = weakref.finalize(self, _end, self._guards, self._threads)  # at the latest when it is collected

    async def prepare(self) -> Isolation:
        """Finds an isolation and an interpreter that work here, by trying them; returns the isolation.

        Raises:
          Unsafe: none does, in one line that says what to do; programs are never run without.
        """
        if sys.platform != "linux":
            raise Unsafe(f"programs can be shut in on Linux alone (this is {sys.platform})")
        problems = []
        sound_or_allowed = ISOLATIONS if self._weak else ISOLATIONS[:-1]
        kinds = (self._asked,) if self._asked else sound_or_allowed
        for self.isolation in kinds:
            for self.python in interpreters():
                try:
                    tried = [
                        await self.run(SHUT_IN if self.isolation != "limits" else NO_SOCKETS, limit_s=60.0),
                        await self.run(*TESTED, limit_s=60.0),
                    ]
                except Unsafe as problem:
                    problems.append(f"{self.isolation}, {self.python}: {problem}")
                    continue
                if all(one.status == "passed" for one in tried):
                    self.prepared = True
                    return self.isolation
                problems.append(f"{self.isolation}, {self.python}: {[(one.status, one.detail) for one in tried]}")
        raise Unsafe(ADVICE.format(problems="; ".join(dict.fromkeys(problems))))

    async def run(
        self, program: str, test: str | None = None, stdin: str = "", limit_s: float = 5.0, who: Who = ("", 0)
    ) -> Outcome:
        """Runs `program`, and then `test` on its names, and returns the outcome; without a test the program is the main module.

        Where the caller is cancelled, the run is ended.

        Args:
          who: the client and its request, which decide whose turn it is.

        Raises:
          Unsafe: the run could not be isolated, so it did not begin.
        """
        async with self.turns.turn(who) as slot:
            folder = tempfile.mkdtemp(prefix="sandbox")
            job = {
                **self.limits, "program": program, "test": test, "stdin": stdin, "limit_s": limit_s, "folder": folder,
                "isolation": self.isolation, "python": self.python, "uid": user(slot), "cancels": True,
                "paths": visible(self.python), "judge_paths": visible(interpreters()[0]),
            }  # fmt: skip
            try:
                found = await self._guarded(self._guards[slot], job, limit_s)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        if found.status == "setup":
            raise Unsafe(f"a run could not be shut in: {found.detail}")
        return found

    async def _guarded(self, guard: "Guard", job: Mapping[str, object], limit_s: float) -> Outcome:
        loop = asyncio.get_running_loop()
        held = loop.run_in_executor(self._threads, guard.hold, job, limit_s + SLACK_S)
        try:
            return await asyncio.shield(held)
        except asyncio.CancelledError:
            guard.cancel()  # and the run with it; the slot is free when the thread has read the end of its answers
            if held not in (await asyncio.wait([held], timeout=END_S))[0]:
                guard.end()
            raise


class Guard:
    """A process of untrusted/guard.py, which holds one run at a time; where it has ended, the next run starts another."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # so that each answer belongs to the job before it

    def hold(self, job: Mapping[str, object], limit_s: float) -> Outcome:
        """Waits for the outcome of a job and returns it, "timeout" where there is none within `limit_s` seconds."""
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

    def cancel(self) -> None:
        """Tells the process that nobody waits for its run any more: it ends the run, and then itself."""
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def end(self) -> None:
        """Ends the process and the processes that it started."""
        if self._process is not None:
            process_tree.end(self._process.pid)
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Ends the process, where nothing waits for it, and closes its pipes."""
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process_tree.end(process.pid)
            process.kill()
            with contextlib.suppress(BrokenPipeError), process:  # what it did not read is not needed
                pass

    def _running(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is not None and (process.poll() is not None or (process.stdin is not None and process.stdin.closed)):
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(
                guard_command("guard"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=GUARDS_ENVIRONMENT
            )  # fmt: skip
        return self._process


def _end(guards: Sequence[Guard], threads: ThreadPoolExecutor) -> None:
    for guard in guards:
        guard.close()
    threads.shutdown(wait=False)


def guard_command(name: str) -> list[str]:
    """Returns the command that starts a process of untrusted/`name`.py."""
    return [sys.executable, "-I", "-S", "-B", "-c", GUARD.format(paths=_paths(), name=name)]


def _paths() -> list[str]:
    """Returns the paths at which the guard finds this package, and pyseccomp."""
    return [
        str(Path(__file__).parents[3]),
        *({str(Path(confine.seccomp().__file__).parent)} if sys.platform == "linux" else ()),
    ]


def user(slot: int) -> int:
    """Returns the user of a run, whose judge has the next one: no other run of this machine has them, in this server or another."""
    return FIRST_UID + os.getpid() * SLOTS + 2 * slot % SLOTS


def interpreters() -> list[str]:
    """Returns the Python interpreters to try: this one's, without its virtual environment, and the system's."""
    own = getattr(sys, "_base_executable", None) or sys.executable
    found = [
        os.path.realpath(own),
        *filter(None, (shutil.which("python3", path=p) for p in ("/usr/local/bin", "/usr/bin"))),
    ]
    return list(dict.fromkeys(found))


def visible(python: str) -> list[str]:
    """Returns the paths of the machine that a program may read: the system's libraries and the interpreter's own folder."""
    prefix = str(Path(python).parent.parent)
    own = [] if any(prefix == p or prefix.startswith(f"{p}/") for p in SYSTEM) or prefix == "/" else [prefix]
    return [path for path in (*SYSTEM, *own) if os.path.lexists(path)]
