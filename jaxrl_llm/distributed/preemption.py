"""Preemption: SIGTERM and SIGINT end a run after its current step with everything saved, or by force after a time limit.

Several processes stop after the same step, whichever of them got the signal; they agree on it by JAX's preemption sync point.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable
from types import FrameType
from typing import TypeVar

from jax.experimental import multihost_utils

from jaxrl_llm.distributed import rendezvous
from jaxrl_llm.distributed.processes import Processes

Found = TypeVar("Found")

STOPPED = 75  # exit status: a signal, a service that is down or a full disk ended the run, all is saved, and the same command resumes it
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopping(Exception):
    """Raised where a signal ends the run before its step is over, with nothing of the step learned yet."""


class Preemption:
    """The listener for signals, from `listen` to `close`, which says whether the run is to stop.

    A thread listens for them, since Python's own handlers wait for the main thread, which may be in a long computation.

    Args:
      limit_s: seconds from the first signal to the end of the process, saved or not.
      processes: the processes of the run.
    """

    def __init__(self, limit_s: float, processes: Processes) -> None:
        self._limit_s, self.processes = limit_s, processes
        self._given, self._elsewhere = threading.Event(), threading.Event()
        self._before: dict[int, object] = {}
        self._interrupts = 0
        self._woken: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self) -> None:
        """Takes over the signals; does nothing outside the main thread, where Python delivers none."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._theirs = theirs
        # JAX's own handler informs its sync point; C's signal() is the only way to get hold of that handler.
        jaxs = rendezvous.c_signal()(signal.SIGTERM, None) if self.processes.count > 1 else None
        self._tell_jax = ctypes.CFUNCTYPE(None, ctypes.c_int)(jaxs) if jaxs else lambda number: None
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self.processes.when_signalled = self._hear_of
        self._fd = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._hear, daemon=True, name="preemption")
        self._thread.start()

    def close(self) -> None:
        """Restores the earlier handlers; from then on no limit ends the process."""
        if not self._before:
            return
        self.processes.when_signalled = None
        signal.set_wakeup_fd(self._fd)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
        self._theirs.close()
        self._thread.join()
        self._ours.close()

    def stop(self) -> None:
        """Stops the run of one process as a signal would, from any thread and without a time limit."""
        self._given.set()
        self._wake()

    def reached(self, step: int) -> bool:
        """Returns whether the run stops after this step; all processes call this once per step and get the same answer."""
        if self.processes.count == 1:
            return self._given.is_set()
        return multihost_utils.reached_preemption_sync_point(step)

    async def unless(self, work: Awaitable[Found]) -> Found:
        """Returns the result of `work`, which a signal cancels at any moment.

        Raises:
          Stopping: a signal came first, to this process or to another one of the run.
        """
        self._loop, self._woken = asyncio.get_running_loop(), asyncio.Event()
        if self._given.is_set() or self._elsewhere.is_set():
            self._woken.set()
        task, signalled = asyncio.ensure_future(work), asyncio.ensure_future(self._woken.wait())
        try:
            await asyncio.wait((task, signalled), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return await task
        finally:
            self._woken = None
            for one in (task, signalled):
                one.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise Stopping

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Counts interrupts: the second SIGINT ends the run at once."""
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt

    def _hear(self) -> None:
        """Runs in a thread: acts on the first signal and ends the process at the limit; returns when the handlers are restored."""
        first, deadline = 0, 0.0
        while True:
            self._ours.settimeout(max(deadline - time.monotonic(), 1e-3) if first else None)
            try:
                data = self._ours.recv(64)
            except TimeoutError:
                rendezvous.end(
                    128 + first,
                    f"{signal.Signals(first).name} came {self._limit_s:g} s ago (train.Run.stop_limit_s), and the step or its save is "
                    "not over; the same command goes on from the last checkpoint",
                )
            if not data:
                return
            wanted = [number for number in data if number in SIGNALS]
            if wanted and not first:
                first, deadline = wanted[0], time.monotonic() + self._limit_s
                self._take(signal.Signals(first))

    def _take(self, number: signal.Signals) -> None:
        limit = f"at most {self._limit_s:g} s (train.Run.stop_limit_s)"
        os.write(2, f"{number.name}: saves and ends, after the step where one is being learned; {limit}\n".encode())
        self._given.set()
        self.processes.signalled = True
        self._tell_jax(signal.SIGTERM)
        self._wake()

    def _hear_of(self) -> None:
        """Records that another process was signalled."""
        self._elsewhere.set()
        self._wake()

    def _wake(self) -> None:
        loop, woken = self._loop, self._woken
        if loop is not None and woken is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(woken.set)
