"""Runs verifiers in processes under a time limit; a call that takes too long ends with its process, which is replaced.

The processes are started as programs of their own, not forked and not through multiprocessing's spawn: they share no
state with JAX, they do not import the main module, and they end when the pipe to them closes. The limit needs no
signal, so calls may come from any thread and any event loop. They may evaluate what a model wrote: they get none of the
parent's secrets, can change nothing (confine.py), and answer in JSON.
"""

import asyncio
import functools
import json
import os
import queue
import subprocess
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from typing import Any

from jaxrl_llm import serving
from jaxrl_llm.distributed.xla_flags import cores
from jaxrl_llm.protocols import Down
from jaxrl_llm.rewards.wrap import Failed

STARTUP_S = 120.0
MOST_BYTES = 2**20  # size of the largest answer
WEAK = "JAXRL_LLM_ALLOW_WEAK_ISOLATION"  # environment variable that lets verifiers run without the kernel's filter


class Pool:
    """Worker processes, started at the first call.

    Args:
      workers: number of processes, and so of calls at a time; None takes one for each core of this process, from 2 to 16.
      limit_s: seconds that one call may take.
      memory_gb: address space of a process in GiB (Linux).
      warm: (module, function, arguments ...) that a new process calls first, so that its imports do not count as the
        time of a response.

    Raises:
      ValueError: a limit that is not positive.
    """

    def __init__(
        self, *, workers: int | None, limit_s: float, memory_gb: float = 4.0, warm: Sequence[Any] = ()
    ) -> None:
        workers = min(max(cores(), 2), 16) if workers is None else workers
        for name, value in {"workers": workers, "limit_s": limit_s, "memory_gb": memory_gb}.items():
            if value <= 0:
                raise ValueError(f"{name} of a verifier's processes must be > 0 (got {value})")
        self.workers, self.limit_s, self.memory_gb, self.warm = workers, limit_s, memory_gb, warm
        self._seats: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    async def call(self, module: str, function: str, *arguments: Any) -> Any:
        """Calls `module.function(*arguments)` in a worker process.

        Raises:
          Failed: it raised, took longer than the limit, or ended its process.
          Down: processes cannot be isolated on this machine, and weak isolation is not allowed.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="verifier")
            self._seats = queue.SimpleQueue()
            for _ in range(self.workers):
                self._seats.put(None)
            self._finalizer = weakref.finalize(self, _shut, self._threads, self._seats, self.workers)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._call, module, function, arguments)

    def isolation(self) -> str:
        """Returns how the processes are isolated here, which one process tries."""
        shut = f"processes of their own, {self.limit_s:g} s and {self.memory_gb:g} GiB a call"
        return f"{shut}, {shut_in_here()}"

    def close(self) -> None:
        """Ends the processes, once their calls are done; a later call starts new ones."""
        if self._threads is not None:
            self._finalizer()
            self._threads = None

    def _call(self, module: str, function: str, arguments: tuple[Any, ...]) -> Any:
        seat = self._seats.get()
        worker = None
        try:
            worker = seat if seat is not None else _Worker(self.memory_gb, self.warm)
            good, value = worker.ask((module, function, arguments), self.limit_s)
        except BaseException:
            if worker is not None:
                worker.kill()
            worker = None
            raise
        finally:
            self._seats.put(worker)
        if not good:
            raise Failed(value)
        return value


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, memory_gb: float, warm: Sequence[Any]) -> None:
        self.pipe, theirs = Pipe()
        command = [sys.executable, "-m", "jaxrl_llm.rewards.services.worker", str(theirs.fileno()), str(memory_gb)]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=_environment()
        )
        theirs.close()
        try:
            if problem := self.ask(None, STARTUP_S):
                _accept(str(problem))
            if warm:
                module, function, *arguments = warm
                good, message = self.ask((module, function, arguments), STARTUP_S)
                if not good:
                    raise Failed(message)
        except Down:
            self.kill()
            raise
        except Failed as error:
            self.kill()
            raise Failed(f"a verifier process did not start: {error}") from error

    def ask(self, message: Any, limit_s: float) -> Any:
        """Sends `message` (nothing for None) and returns the answer, if it comes in time."""
        try:
            if message is not None:
                self.pipe.send(message)
            if not self.pipe.poll(limit_s):
                raise Failed(f"no answer within {limit_s} s")
            return json.loads(self.pipe.recv_bytes(MOST_BYTES))
        except (EOFError, OSError) as error:
            raise Failed("the verifier process ended during the call") from error
        except ValueError as error:
            raise Failed(f"the verifier process answered no JSON: {error}") from error

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()


def _accept(problem: str) -> None:
    """Continues without the kernel's filter where that is allowed, and says so once; raises Down where it is not."""
    if os.environ.get(WEAK) != "1":
        raise Down(
            f"verifiers evaluate what models write, and cannot be shut in here: {problem}. Mend that, or set {WEAK}=1 to let "
            "what a model writes do whatever this user can"
        )
    if not _said:
        _said.append(problem)
        print(f"warning: verifiers are not shut in ({WEAK}=1): {problem}", file=sys.stderr, flush=True)


_said: list[str] = []


def _environment() -> dict[str, str]:
    """Returns the environment of a worker, with the parent's import path, so that the package is found, and without an accelerator."""
    return {
        **serving.bare_environment(),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
        "JAX_PLATFORMS": "cpu",
    }


@functools.cache
def shut_in_here() -> str:
    """Returns how a verifier's process is isolated on this machine, tried by one that confines itself."""
    if sys.platform != "linux":
        return f"NOT shut in: {sys.platform} has no seccomp"
    command = [sys.executable, "-c", "from jaxrl_llm.rewards.services.confine import confine; confine()"]
    try:
        done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=STARTUP_S)
    except (OSError, subprocess.SubprocessError) as error:
        return f"NOT shut in: {error}"
    problem = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return f"NOT shut in: {problem}" if done.returncode else "shut in by seccomp"


def _shut(threads: ThreadPoolExecutor, seats: "queue.SimpleQueue[_Worker | None]", workers: int) -> None:
    threads.shutdown(wait=True)
    for _ in range(workers):
        worker = seats.get()
        if worker is not None:
            worker.kill()
