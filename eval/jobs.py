"""Jobs that run several at a time, each on CPU cores of its own, and that are not run again once they have ended.

A job is a list of commands, each an argument list, started when the jobs it waits for have ended well. OUT/logs/NAME.txt
holds what it printed, OUT/ended/NAME says that it is done: after a stop, the same jobs go on where they were.
"""

import argparse
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue


@dataclass(frozen=True, kw_only=True)
class Job:
    """Commands that run one after the other.

    Attributes:
      name: unique; names its log.
      commands: argument lists.
      after: names of the jobs that must have ended well.
      folder: a folder that a command refuses to find, such as that of an export; what a stopped job left there is removed.
    """

    name: str
    commands: Sequence[Sequence[str]]
    after: Sequence[str] = ()
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Runner:
    """Runs jobs.

    Attributes:
      out: folder of logs and marks.
      jobs: how many at a time.
      threads: CPU cores of each.
      deadline: time.monotonic() at which what still runs is stopped.
      environment: variables of every command, beside those of this process.
    """

    out: Path
    jobs: int = 1
    threads: int = 2
    deadline: float = float("inf")
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, jobs: Sequence[Job], ended: Callable[[str, bool], None]) -> list[str]:
        """Runs every job; calls `ended(name, well)` as each ends, and returns the names of those that did not end well."""
        for folder in ("logs", "ended"):
            (self.out / folder).mkdir(parents=True, exist_ok=True)
        cores: Queue[list[int]] = Queue()
        for number in range(self.jobs):
            cores.put(core_set(number, self.threads))
        futures: dict[str, Future[bool]] = {}
        with ThreadPoolExecutor(
            max(len(jobs), 1)
        ) as pool:  # a thread that waits costs nothing; cores are what is counted
            for job in jobs:
                futures[job.name] = pool.submit(self._job, job, [futures[name] for name in job.after], cores)
            names = {future: name for name, future in futures.items()}
            for future in as_completed(names):
                ended(names[future], future.result())
        return [name for name, future in futures.items() if not future.result()]

    def _job(self, job: Job, after: Sequence["Future[bool]"], cores: "Queue[list[int]]") -> bool:
        if not all(future.result() for future in after):
            return False
        mark = self.out / "ended" / job.name
        if mark.is_file():
            return True
        own = cores.get()
        try:
            if job.folder is not None:
                shutil.rmtree(job.folder, ignore_errors=True)
            well = all(self._command(command, own, self.out / "logs" / f"{job.name}.txt") for command in job.commands)
        finally:
            cores.put(own)
        if well:
            mark.touch()
        return well

    def _command(self, command: Sequence[str], cores: Sequence[int], log: Path) -> bool:
        """Whether the command ended well before the deadline."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            return False
        pinned = ["taskset", "-c", ",".join(map(str, cores))] if shutil.which("taskset") else []
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads), **self.environment}
        with log.open("a") as output:
            process = subprocess.Popen([*pinned, *command], env=environment, stdout=output, stderr=output)
            try:
                return process.wait(min(left, 1e6)) == 0
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return False


def core_set(number: int, threads: int) -> list[int]:
    """The cores of the job in slot `number`; slots share cores where there are too few."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return [cores[(number * threads + i) % len(cores)] for i in range(min(threads, len(cores)))]


def options(parser: argparse.ArgumentParser, runs: str) -> None:
    """The flags of a command that runs jobs: --out, --runs (`runs` by default), --jobs, --threads, --minutes, --gin."""
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--runs", type=Path, default=Path(runs), help="folder of the run folders")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores of a run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop then; the same command goes on")
    parser.add_argument("--gin", action="append", default=[], metavar="BINDING", help="binding of every run")


def runner_of(given: argparse.Namespace, environment: Mapping[str, str]) -> Runner:
    """The runner that the flags of `options` ask for, with one compilation cache for all runs."""
    return Runner(
        out=given.out.absolute(), jobs=given.jobs, threads=given.threads, deadline=time.monotonic() + 60 * given.minutes,
        environment={"JAX_COMPILATION_CACHE_DIR": str(given.runs.absolute() / "compiled"), **environment},
    )  # fmt: skip
