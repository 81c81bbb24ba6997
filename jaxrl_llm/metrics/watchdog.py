"""The watchdog of a run, which writes a health file, a log of JSON lines, and stack dumps where the run makes no progress.

A separate thread writes RUN_DIR/health.json and checks for progress, so that it costs the training loop an assignment only. Progress is
any change of the run's activity: publishing, collecting, scoring, updating, evaluating, saving.
"""

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from traceback import FrameSummary as Frame
from typing import Any

from jaxrl_llm import components
from jaxrl_llm.metrics.run_folder import JsonLines, replace_text

STALLED = 75  # exit code of a process that does not respond (EX_TEMPFAIL: the same command resumes the run)
GRACE_S = 30.0
_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple({sysconfig.get_paths()[place] for place in ("stdlib", "purelib", "platlib")})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The current activity of a run.

    Attributes:
      doing: current activity, such as "updating".
      stage: name of the stage; empty before the first.
      step: global step, counted from 1.
      version: policy version that the sampler serves; -1 before the first.
    """

    doing: str = "starting"
    stage: str = ""
    step: int = 0
    version: int = -1

    def __str__(self) -> str:
        return f"{self.doing} (stage {self.stage or '-'}, step {self.step})"


@dataclass(frozen=True, kw_only=True)
class Watchdog:
    """Settings of the watchdog. With several processes, each process after the first appends its number to the file names.

    Attributes:
      every_s: seconds between checks, and between health files.
      warn_after_s: seconds without progress after which a warning names the wait and every stack is written to RUN_DIR/stacks.txt;
        None never warns. A first compilation counts as a wait.
      stop_after_s: seconds without progress after which SIGTERM asks the run to end, as at a preemption; the process is ended with
        exit code 75 where it does not end within half a minute. None never stops it.
    """

    every_s: float = 10.0
    warn_after_s: float | None = 900.0
    stop_after_s: float | None = None

    def __post_init__(self) -> None:
        components.above(self, 0, "every_s", "warn_after_s", "stop_after_s")

    def start(self, run_dir: Path, rank: int = 0) -> "Watching":
        """Starts to watch process `rank` of a run in `run_dir`."""
        return Watching(self, run_dir, rank)


class Watching:
    """A watched run, from construction to `end`."""

    def __init__(self, config: Watchdog, run_dir: Path, rank: int) -> None:
        suffix = f".{rank}" if rank else ""
        self.config, self.rank, self.place = config, rank, Place()
        self.health, self.stacks = run_dir / f"health{suffix}.json", run_dir / f"stacks{suffix}.txt"
        self.outcome: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stalled = ""
        self._handler = JsonLines(run_dir / f"log{suffix}.jsonl", rank, lambda: asdict(self.place))
        self._progress = (time.monotonic(), time.time())
        self._warned: tuple[float, float] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._handler.attach()
        _log.info("the run begins: process %d on %s", os.getpid(), socket.gethostname())
        self._thread.start()

    def at(self, doing: str, **known: Any) -> None:
        """Records that the run does `doing` from now on; `known` are other fields of its `Place`."""
        self.place = replace(self.place, doing=doing, **known)
        self._progress = (time.monotonic(), time.time())
        if self._loop is None:
            with contextlib.suppress(RuntimeError):  # no event loop runs before the run starts its own
                self._loop = asyncio.get_running_loop()

    def end(self, error: BaseException | None = None) -> None:
        """Writes how the run ended: with `error`, or normally."""
        self._over.set()
        self._thread.join(GRACE_S)
        text = " ".join(str(error).split())
        self.outcome = self._stalled or ("ended" if error is None else f"{type(error).__name__}: {text}"[:500])
        _log.info("the run is over: %s", self.outcome)
        self._write()
        self._handler.detach()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        while True:
            self._write()
            if self._over.wait(self.config.every_s):
                return
            progress = self._progress
            still, config = time.monotonic() - progress[0], self.config
            late = config.warn_after_s is not None and still >= config.warn_after_s and self._warned != progress
            stop = config.stop_after_s is not None and still >= config.stop_after_s
            if late or stop:
                self._warned = progress
                wait = f"no progress for {still:.0f} s while {self.place}: {self._wait()}"
                _log.warning("%s; stacks are in %s", wait, self._dump(wait))
                if stop:
                    self._stop(wait)
                    return

    def _stop(self, wait: str) -> None:
        self._stalled = (
            f"{wait}; stacks are in {self.stacks}. Stopped by train.Watchdog.stop_after_s = {self.config.stop_after_s:g}: the same "
            "command goes on from the last checkpoint"
        )
        self.outcome = self._stalled
        self._write()
        print(f"error: {self._stalled}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._over.wait(GRACE_S):
            os._exit(STALLED)

    def _write(self) -> None:
        """Replaces the health file; a full disk must not stop the run."""
        facts = {
            "time": time.time(), "progress": self._progress[1], **asdict(self.place), "rank": self.rank,
            "pid": os.getpid(), "host": socket.gethostname(), "outcome": self.outcome,
        }  # fmt: skip
        try:
            replace_text(self.health, json.dumps(facts) + "\n")
        except OSError as error:
            _log.warning("the health file %s cannot be written: %s", self.health, error)

    def _wait(self) -> str:
        """Returns the main thread's position in the code or, where it waits for events, the positions of the run's tasks."""
        main = threading.main_thread().ident
        assert main is not None
        frames = list(traceback.extract_stack(sys._current_frames()[main]))
        if not frames[-1].filename.endswith("selectors.py"):
            return f"in {innermost(frames)}"
        waits = list(dict.fromkeys(innermost(chain) for chain in self._tasks() if chain))
        return f"awaits {'; '.join(waits[:3])}" if waits else "awaits nothing"

    def _tasks(self) -> list[list[Frame]]:
        """Returns the chain of awaits of each task, outermost first; the longest chains come first."""
        if self._loop is None:
            return []
        for _ in range(5):
            try:
                tasks = asyncio.all_tasks(self._loop)
                return sorted((list(awaits(task.get_coro())) for task in tasks), key=len, reverse=True)
            except RuntimeError:  # the set of tasks changed during the call
                continue
        return []

    def _dump(self, wait: str) -> Path:
        try:
            with self.stacks.open("a") as file:
                print(f"--- {time.strftime('%Y-%m-%dT%H:%M:%S%z')} {wait}", file=file)
                for chain in self._tasks():
                    print("task:", *map(_named, chain), sep="\n  ", file=file)
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            _log.warning("stacks cannot be written: %s", error)
        return self.stacks


def awaits(waiting: Any) -> Iterator[Frame]:
    """Yields the position of a coroutine and of everything that it awaits, outermost first."""
    while waiting is not None:
        for frame_of, next_of in (("cr_frame", "cr_await"), ("ag_frame", "ag_await"), ("gi_frame", "gi_yieldfrom")):
            if hasattr(waiting, frame_of):
                frame, waiting = getattr(waiting, frame_of), getattr(waiting, next_of)
                if frame is not None:
                    yield Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname, lookup_line=False)
                break
        else:
            return


def innermost(frames: Sequence[Frame]) -> str:
    """Returns the last position outside of libraries, and the function that was called from there."""
    own = [f for f in frames if f.filename.startswith(_PACKAGE) or not f.filename.startswith(_LIBRARIES)] or frames
    called = "" if own[-1] is frames[-1] else f" in {frames[-1].name}"
    return f"{_named(own[-1])}{called}"


def _named(frame: Frame) -> str:
    return f"{frame.name} ({frame.filename.removeprefix(_PACKAGE + os.sep)}:{frame.lineno})"
