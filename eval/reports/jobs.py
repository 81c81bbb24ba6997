"""Runs several jobs at a time, each on its own CPU cores; jobs that have ended are not run again.

A job is a list of commands, each an argument list, and starts once the jobs for which it waits have succeeded. OUT/logs/NAME.txt
holds its output; RUNS/ended/NAME marks it as done: after a stop, the same jobs continue where they stopped. A job that
fails leaves the others running. What runs are commands that make run folders, whose metrics.jsonl is read here too.
"""

import argparse
import heapq
import itertools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jaxrl_llm

Outcome = Literal["done", "failed", "stopped", "waits"]
ARCHIVE = "results.tgz"
KEPT = ("metrics.jsonl", "run.json", "config.gin")  # files of a run folder that go into the archive
GIN = Path(jaxrl_llm.__file__).resolve().parent / "gin"
# Variables of runs that use the CPU only and share a compilation cache.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Commands that run one after another.

    Attributes:
      name: unique name, which also names its log.
      commands: argument lists, in order.
      after: names of the jobs that must have succeeded before.
      folder: a folder that must not exist before a command runs, such as that of an export; remains of a stopped job are removed from
        it, and a job is run again where its folder is missing.
    """

    name: str
    commands: Sequence[Sequence[str]]
    after: Sequence[str] = ()
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where a job runs.

    Attributes:
      cores: numbers of its CPU cores.
      environment: variables of its commands.
    """

    cores: Sequence[int]
    environment: Mapping[str, str]


class Cores:
    """CPU cores, divided into slots of one job each; runners in several threads may share them.

    Args:
      jobs: number of slots.
      threads: number of CPU cores per slot.
      environments: variables of each slot's commands, such as the GPU that they see; None for none.
    """

    def __init__(
        self, jobs: int = 1, threads: int = 2, environments: Sequence[Mapping[str, str]] | None = None
    ) -> None:
        own = [{}] * jobs if environments is None else environments
        self._free = [Slot(cores=core_set(n, threads), environment=own[n]) for n in reversed(range(jobs))]
        self._waiting: list[tuple[int, int]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self.stopped = threading.Event()
        self._told = f"Cores(jobs={jobs}, threads={threads})"

    def __repr__(self) -> str:
        return self._told

    @contextmanager
    def slot(self, urgency: int) -> Iterator[Slot]:
        """Yields a free slot; the most urgent caller is served first, and among equals the earliest."""
        with self._changed:
            mine = (-urgency, next(self._numbers))
            heapq.heappush(self._waiting, mine)
            self._changed.wait_for(lambda: self._free and self._waiting[0] == mine)
            heapq.heappop(self._waiting)
            own = self._free.pop()
            self._changed.notify_all()
        try:
            yield own
        finally:
            with self._changed:
                self._free.append(own)
                self._changed.notify_all()


def core_set(number: int, threads: int) -> list[int]:
    """Returns the cores of the job in slot `number`; slots share cores where there are too few."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return [cores[(number * threads + i) % len(cores)] for i in range(min(threads, len(cores)))]


@dataclass(frozen=True, kw_only=True, eq=False)
class Runner:
    """Runs jobs on slots of cores.

    Attributes:
      logs: folder of the jobs' output.
      marks: folder of the marks of ended jobs.
      cores: cores on which jobs run.
      deadline: time.monotonic() at which running jobs are stopped.
      environment: variables of every command, in addition to those of this process.
    """

    logs: Path
    marks: Path
    cores: Cores = field(default_factory=Cores)
    deadline: float = float("inf")
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, jobs: Sequence[Job], ended: Callable[[str], object]) -> list[str]:
        """Runs every job, prints each outcome and calls `ended(name)` for each job that is done; returns the names of the others.

        A job whose `ended` raises counts among the others: its error is printed, and the rest continues.
        """
        if len({job.name for job in jobs}) < len(jobs):
            raise ValueError(f"jobs need names of their own (got {sorted(job.name for job in jobs)})")
        begin = time.monotonic()
        for folder in (self.logs, self.marks):
            folder.mkdir(parents=True, exist_ok=True)
        futures: dict[str, Future[Outcome]] = {}
        urgency, unread = chains(jobs), []
        with ThreadPoolExecutor(max(len(jobs), 1)) as pool:  # a waiting thread costs nothing: the cores are the limit
            for job in jobs:
                after = [futures[name] for name in job.after]
                futures[job.name] = pool.submit(self._job, job, after, urgency[job.name])
            names = {future: name for name, future in futures.items()}
            try:
                for future in as_completed(names):
                    self._say(names[future], future.result(), time.monotonic() - begin)
                    if future.result() == "done" and not survives(partial(ended, names[future])):
                        unread.append(names[future])
            except BaseException:
                self.cores.stopped.set()  # otherwise the pool would start the other jobs, since it waits for its threads
                raise
        return [name for name, future in futures.items() if name in unread or future.result() != "done"]

    def _say(self, name: str, outcome: Outcome, elapsed: float) -> None:
        log = self.logs / f"{name}.txt"
        lines = log.read_text(errors="replace").splitlines() if outcome == "failed" else []
        why = f": {lines[-1] if lines else 'it printed nothing'} (all of it in {log})" if outcome == "failed" else ""
        print(f"{elapsed:6.0f} s  {name}: {outcome}{why}", flush=True)

    def _job(self, job: Job, after: Sequence["Future[Outcome]"], urgency: int) -> Outcome:
        if any(future.result() != "done" for future in after):
            return "waits"
        mark = self.marks / job.name
        if mark.is_file() and (job.folder is None or job.folder.is_dir()):
            return "done"
        with self.cores.slot(urgency) as own:
            if job.folder is not None:
                shutil.rmtree(job.folder, ignore_errors=True)
            for command in job.commands:
                if (outcome := self._command(command, own, self.logs / f"{job.name}.txt")) != "done":
                    return outcome
        mark.touch()
        return "done"

    def _command(self, command: Sequence[str], slot: Slot, log: Path) -> Outcome:
        left = self.deadline - time.monotonic()
        if left <= 0 or self.cores.stopped.is_set():
            return "stopped"
        pinned = ["taskset", "-c", ",".join(map(str, slot.cores))] if shutil.which("taskset") else []
        environment = {**os.environ, "OMP_NUM_THREADS": str(len(slot.cores)), **self.environment, **slot.environment}
        with log.open("a") as output:
            process = subprocess.Popen([*pinned, *command], env=environment, stdout=output, stderr=output)
            try:
                return "failed" if process.wait(min(left, 1e6)) else "done"
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return "stopped"


def survives(call: Callable[[], object]) -> bool:
    """Returns whether a call succeeded; the error of a call that raised is printed and nothing else is stopped."""
    try:
        call()
    except Exception:
        traceback.print_exc()
        return False
    return True


def chains(jobs: Sequence[Job]) -> dict[str, int]:
    """Returns the urgency of each job: the number of jobs in the longest chain of waiting jobs that contains it.

    Jobs must be listed after those that they wait for.
    """
    before: dict[str, int] = {}
    for job in jobs:
        before[job.name] = 1 + max((before[name] for name in job.after), default=0)
    behind = dict.fromkeys(before, 0)
    for job in reversed(jobs):
        for name in job.after:
            behind[name] = max(behind[name], 1 + behind[job.name])
    return {name: before[name] + behind[name] for name in before}


def options(parser: argparse.ArgumentParser, runs: str) -> None:
    """Adds the flags of a command that runs jobs: --out, --runs (`runs` by default), --jobs, --threads, --minutes, --gin."""
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--runs", type=Path, default=Path(runs), help="folder of the run folders")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores of a run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop then; the same command goes on")
    parser.add_argument("--gin", action="append", default=[], metavar="BINDING", help="binding of every run")


def runner_of(given: argparse.Namespace, environment: Mapping[str, str], cores: Cores | None = None) -> Runner:
    """Returns the runner for the flags of `options`, with one compilation cache for all runs; `cores` replaces those of the flags."""
    return Runner(
        logs=given.out.absolute() / "logs", marks=given.runs.absolute() / "ended", deadline=time.monotonic() + 60 * given.minutes,
        cores=Cores(given.jobs, given.threads) if cores is None else cores,
        environment={"JAX_COMPILATION_CACHE_DIR": str(given.runs.absolute() / "compiled"), **environment},
    )  # fmt: skip


def archive(out: Path, runs: Path) -> Path:
    """Writes OUT/results.tgz: OUT as results/, and ended runs as runs/ with the small files of their run folders."""
    file = out / ARCHIVE
    small: list[Path] = []
    for marks in sorted(runs.rglob("ended")):
        small += sorted(marks.parent.glob("*.json"))
        for mark in sorted(marks.iterdir()):
            small += [mark, *(path for name in KEPT if (path := marks.parent / mark.name / name).is_file())]
    with tarfile.open(file, "w:gz") as tar:
        tar.add(out, "results", filter=lambda member: None if member.name.endswith(ARCHIVE) else member)
        for path in small:
            tar.add(path, Path("runs") / path.relative_to(runs))
    return file


# -- run folders -------------------------------------------------------------------------------------------------------


def rows(folder: Path) -> list[Row]:
    """Returns the lines of metrics.jsonl.

    Raises:
      FileNotFoundError: the run has not begun.
    """
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def by_line(found: Any, depth: int) -> str:
    """Returns JSON text with one line for each entry of the outer `depth` levels."""
    if depth == 0 or not isinstance(found, dict | list):
        return json.dumps(found)
    if isinstance(found, list):
        return "[\n" + ",\n".join(by_line(one, depth - 1) for one in found) + "\n]"
    return (
        "{\n" + ",\n".join(f"{json.dumps(str(name))}: {by_line(one, depth - 1)}" for name, one in found.items()) + "\n}"
    )


def seconds(found: Sequence[Row]) -> float:
    """Returns the wall time of a run's steps, in seconds."""
    return float(sum(row.get("time/step_s", 0.0) for row in found))


def launch(name: str, folder: Path, bindings: Sequence[str]) -> list[str]:
    """Returns the command that runs gin/NAME.gin in a folder."""
    flags = [f"--gin={b}" for b in (f"RUN_DIR={str(folder)!r}", *bindings)]
    return [sys.executable, "-m", "jaxrl_llm.launch", f"--gin_file={GIN / name}.gin", *flags]


def run_job(
    gin: str, folder: Path, bindings: Sequence[str], after: Sequence[str] = (), *, exported: bool = False
) -> Job:
    """Returns the job that runs gin/GIN.gin in a folder; with `exported` it also writes the policy to FOLDER/model."""
    commands, model = [launch(gin, folder, bindings)], folder / "model"
    if exported:
        commands.append([sys.executable, "-m", "jaxrl_llm.tools.export", str(folder), "--out", str(model)])
    return Job(name=folder.name, commands=commands, after=after, folder=model if exported else None)
