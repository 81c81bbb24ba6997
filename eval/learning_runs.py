"""The learning proof: every algorithm of gin/algorithms starts from one checkpoint and learns the quickstart's task.

    python -m jaxrl_llm.eval.learning_runs --out results/learning [--jobs 8] [--minutes 9] [--only grpo,dpo] [--seeds 0,1,2]

runs gin/learning/start.gin and teacher.gin, then gin/learning/NAME.gin of each algorithm and seed, several at a time with
CPU cores of their own, and writes OUT/NAME-SEED.json as each ends, and OUT/learning.json, learning.md and learning.png.
What has ended is not run again: start the same command again and it goes on, within runs too.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue

import jaxrl_llm
from jaxrl_llm.eval import learning_table

GIN = Path(jaxrl_llm.__file__).resolve().parent / "gin"
PREPARED = ("start", "teacher")  # what other runs begin from
FIRST = ("grpo", "dapo", "rloo", "reinforce_plus_plus", "ppo", "gspo")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where runs and results lie, and how runs are started.

    Attributes:
      runs: folder of the run folders.
      out: folder of the results.
      bindings: gin bindings of every run.
      threads: CPU cores of a run.
      deadline: time.monotonic() at which runs are stopped; their checkpoints stay.
    """

    runs: Path
    out: Path
    bindings: Sequence[str] = ()
    threads: int = 2
    deadline: float = float("inf")
    cores: "Queue[list[int]]" = field(default_factory=Queue)

    def command(self, name: str, seed: int) -> list[str]:
        """The launch of one run."""
        bindings = [f"RUN_DIR={str(self.folder(name, seed))!r}", f"SEED={seed}"]
        if name not in PREPARED:
            bindings.append(f"START={str(self.runs / 'start-0' / 'model')!r}")
        if name == "distill":
            bindings.append(f"TEACHER_PATH={str(self.folder('teacher', 0))!r}")
        flags = [f"--gin={b}" for b in (*bindings, *self.bindings)]
        return [sys.executable, "-m", "jaxrl_llm.launch", f"--gin_file={GIN / 'learning' / name}.gin", *flags]

    def folder(self, name: str, seed: int) -> Path:
        """The run folder of an algorithm and seed."""
        return self.runs / f"{name}-{seed}"

    def environment(self) -> dict[str, str]:
        """CPU alone, and one compilation cache for all runs."""
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(self.runs / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        return {**os.environ, **cache, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(self.threads)}

    def execute(self, command: Sequence[str], log: Path) -> bool:
        """Runs a command on cores of its own until its end or the deadline; whether it ended well."""
        cores = self.cores.get()
        try:
            pinned = ["taskset", "-c", ",".join(map(str, cores))] if shutil.which("taskset") else []
            with log.open("a") as output:
                process = subprocess.Popen([*pinned, *command], env=self.environment(), stdout=output, stderr=output)
                try:
                    return process.wait(max(0.0, min(self.deadline - time.monotonic(), 1e6))) == 0
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    return False
        finally:
            self.cores.put(cores)


def ended(folder: Path) -> bool:
    """Whether the run in a folder has reached its last step."""
    return (folder / "ended").is_file()


def run(plan: Plan, name: str, seed: int, after: Sequence["Future[bool]"] = ()) -> bool:
    """One run to its end and its result; whether there is one. `after` are runs that it begins from."""
    if not all(earlier.result() for earlier in after):
        return False
    folder = plan.folder(name, seed)
    log = plan.out / "logs" / f"{name}-{seed}.txt"
    if not ended(folder):
        if time.monotonic() >= plan.deadline or not plan.execute(plan.command(name, seed), log):
            return False
        if name == "start":
            export = [sys.executable, "-m", "jaxrl_llm.export", str(folder), "--out", str(folder / "model")]
            if not plan.execute(export, log):
                return False
        (folder / "ended").touch()
    result = learning_table.result(folder, name, seed, algorithm_file(name))
    (plan.out / f"{name}-{seed}.json").write_text(json.dumps(result, indent=1) + "\n")
    return True


def algorithm_file(name: str) -> Path:
    """The gin file of an algorithm; supervised training for what is prepared."""
    return GIN / "algorithms" / f"{'sft' if name in PREPARED else name}.gin"


def names() -> list[str]:
    """The algorithms that have a run, the best known first, and the one that waits for a teacher last."""
    found = sorted(p.stem for p in (GIN / "algorithms").glob("*.gin") if (GIN / "learning" / p.name).is_file())
    return [*FIRST, *(n for n in found if n not in (*FIRST, "distill")), "distill"]


def run_all(plan: Plan, wanted: Sequence[str], seeds: Sequence[int], report: Callable[[str], None] = print) -> int:
    """All runs, `plan.cores.qsize()` at a time; how many have no result."""
    (plan.out / "logs").mkdir(parents=True, exist_ok=True)
    plan.runs.mkdir(parents=True, exist_ok=True)
    slots = plan.cores.qsize()
    jobs: dict[str, Future[bool]] = {}
    with ThreadPoolExecutor(slots + len(PREPARED)) as pool:
        jobs["start-0"] = pool.submit(run, plan, "start", 0)
        if "distill" in wanted:
            jobs["teacher-0"] = pool.submit(run, plan, "teacher", 0)
        jobs["start-0"].result()
        for name in wanted:
            for seed in seeds:
                after = [jobs["start-0"]] + ([jobs["teacher-0"]] if name == "distill" else [])
                jobs[f"{name}-{seed}"] = pool.submit(run, plan, name, seed, after)
        jobs_of = {done: job for job, done in jobs.items()}
        for done in as_completed(jobs_of):
            job = jobs_of[done]
            report(f"{job}: " + ("done" if done.result() else f"no result yet, see {plan.out / 'logs' / job}.txt"))
            learning_table.write(plan.out)
    learning_table.plot(learning_table.results(plan.out), plan.out / "learning.png")
    return sum(not done.result() for done in jobs.values())


def core_sets(jobs: int, threads: int) -> list[list[int]]:
    """The cores of each job; jobs share cores where there are too few."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return [[cores[(job * threads + i) % len(cores)] for i in range(min(threads, len(cores)))] for job in range(jobs)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.eval.learning_runs", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"), help="folder of the run folders")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores of a run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop then; the same command goes on")
    parser.add_argument("--only", default="", help="algorithms, with commas between (default: all)")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--gin", action="append", default=[], metavar="BINDING", help="binding of every run")
    arguments = parser.parse_args(argv)
    wanted = arguments.only.split(",") if arguments.only else names()
    if unknown := sorted(set(wanted) - set(names())):
        parser.error(f"no gin/learning file for {unknown}; there are {', '.join(names())}")
    deadline = time.monotonic() + 60 * arguments.minutes
    plan = Plan(
        runs=arguments.runs.absolute(), out=arguments.out.absolute(), bindings=arguments.gin,
        threads=arguments.threads, deadline=deadline,
    )  # fmt: skip
    for cores in core_sets(arguments.jobs, arguments.threads):
        plan.cores.put(cores)
    missing = run_all(plan, wanted, [int(s) for s in arguments.seeds.split(",")], _say(time.monotonic()))
    print(f"{plan.out / 'learning.md'} ({missing} runs without a result)" if missing else f"{plan.out / 'learning.md'}")
    return 1 if missing else 0


def _say(begin: float) -> Callable[[str], None]:
    return lambda line: print(f"{time.monotonic() - begin:6.0f} s  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
