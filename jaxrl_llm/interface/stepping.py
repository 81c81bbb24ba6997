"""Trains a run in a thread of its own, which continues with the next step when its reader asks for it.

The thread has its own event loop, so that a run works where an event loop already runs, as in a notebook. Leaving the reader's loop, an
interrupt or SIGTERM ends the run as a signal ends a launched one: after the current step, with a checkpoint.
"""

import atexit
import contextlib
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.distributed.preemption import STOPPED, Preemption
from jaxrl_llm.distributed.processes import Processes
from jaxrl_llm.train.run import Run

Row = dict[str, Any]


class Relay:
    """The writer that passes each step's metrics to the reader, and lets the run wait until the next one is asked for."""

    def __init__(self) -> None:
        self.rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._asked, self._let_go = threading.Semaphore(0), threading.Event()

    def open(self, run_dir: Path, resume_step: int | None, total_steps: int | None = None) -> "Relay":
        return self

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if values and not self._let_go.is_set():
            self.rows.put({"step": step, **values})
            self._asked.acquire()

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Does nothing, since the run folder has them."""

    def text(self, name: str, text: str) -> None:
        """Does nothing, since the run folder has it."""

    def close(self) -> None:
        """Does nothing, since the thread reports the run's end."""

    def ask(self) -> None:
        """Lets the run continue with the next step."""
        self._asked.release()

    def let_go(self) -> None:
        """Lets the run continue without waiting for the reader any more."""
        self._let_go.set()
        self._asked.release()


def steps(run: Run, config: str) -> Iterator[Row]:
    """Trains, and yields {"step": number, metric: value} of each step; step 0 is the evaluation of the untrained policy.

    Raises:
      ValueError, OSError: the run folder is another run's, or cannot be written; other errors that end the run are raised too.
    """
    relay, preemption, failures = Relay(), Preemption(run.stop_limit_s, Processes()), []

    def work() -> None:
        try:
            run.run(config, preemption=preemption, beside=(relay,))
        except BaseException as error:  # raised again in the reader's thread
            failures.append(error)
        finally:
            relay.rows.put(None)

    thread = threading.Thread(target=work, name="run", daemon=True)

    def end() -> None:
        preemption.stop()
        relay.let_go()
        thread.join()

    atexit.register(end)
    try:
        with _terminated():
            thread.start()
            while (row := relay.rows.get()) is not None:
                yield row
                relay.ask()
    except KeyboardInterrupt:
        print("interrupted: the step in progress is ended and saved; once more leaves it", file=sys.stderr, flush=True)
        raise
    finally:
        end()
        atexit.unregister(end)
        if failures:
            raise failures[0]


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """Makes SIGTERM raise SystemExit with the status of a stopped run, where nothing else handles the signal."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(STOPPED)

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
