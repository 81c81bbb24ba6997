"""Learning runs: every algorithm of gin/algorithms starts from one checkpoint and learns the task of gin/sorting.gin.

    python -m jaxrl_llm.eval.reports.learning_runs --out results/learning [--jobs 8] [--minutes 9] [--only grpo,dpo] [--seeds 0,1,2]

The command runs gin/learning/start.gin and teacher.gin, then gin/learning/NAME.gin for each algorithm and seed, several at a time
with their own CPU cores. It writes OUT/NAME-SEED.json as each run ends, and OUT/learning.json, learning.md and learning.png.
Runs that have ended are not run again: the same command continues, also within a run that was stopped.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm import command_line
from jaxrl_llm.eval.reports import learning_table
from jaxrl_llm.eval.reports.jobs import ENVIRONMENT, GIN, Cores, Job, archive, options, run_job, runner_of

PREPARED = ("start", "teacher")  # runs from which other runs start
TAUGHT = ("gkd_forward_kl", "gkd_jsd", "gkd_reverse_kl", "distill")  # algorithms that learn from the run `teacher`
FIRST = ("grpo", "dapo", "rloo", "reinforce_plus_plus", "ppo", "gspo")


def algorithm_file(name: str) -> Path:
    """Returns the gin file of an algorithm; that of SFT for the prepared runs."""
    return GIN / "algorithms" / f"{'sft' if name in PREPARED else name}.gin"


def names() -> list[str]:
    """Returns the algorithms that have a run: the best known ones first, and those that need a teacher last."""
    found = sorted(p.stem for p in (GIN / "algorithms").glob("*.gin") if (GIN / "learning" / p.name).is_file())
    return [*FIRST, *(n for n in found if n not in (*FIRST, *TAUGHT)), *TAUGHT]


def jobs(wanted: Sequence[str], seeds: Sequence[int], runs: Path, bindings: Sequence[str]) -> list[Job]:
    """Returns every run, named NAME-SEED; runs from which others start come first."""

    def job(name: str, seed: int, begun: Sequence[str], after: Sequence[str], exported: bool = False) -> Job:
        lines = [f"SEED={seed}", *begun, *bindings]
        return run_job(f"learning/{name}", runs / f"{name}-{seed}", lines, after, exported=exported)

    start = [f"START={str(runs / 'start-0' / 'model')!r}"]
    teacher = [f"TEACHER_PATH={str(runs / 'teacher-0')!r}"]
    made = [job("start", 0, [], [], exported=True)]
    if not set(TAUGHT).isdisjoint(wanted):
        made.append(job("teacher", 0, [], []))
    for name in wanted:
        taught = name in TAUGHT
        for seed in seeds:
            after = ["start-0", "teacher-0"] if taught else ["start-0"]
            made.append(job(name, seed, [*start, *(teacher if taught else [])], after))
    return made


def main(argv: Sequence[str] | None = None, cores: Cores | None = None) -> int:
    parser = command_line.parser("eval.reports.learning_runs", __doc__)
    options(parser, "runs/learning")
    parser.add_argument("--only", default="", help="algorithms, with commas between (default: all)")
    parser.add_argument("--seeds", default="0,1,2", help="seeds, with commas between")
    given = parser.parse_args(argv)
    wanted = given.only.split(",") if given.only else names()
    if unknown := sorted(set(wanted) - set(names())):
        parser.error(f"no gin/learning file for {unknown}; there are {', '.join(names())}")
    runs, out = given.runs.absolute(), given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)

    def ended(name: str) -> None:
        algorithm, _, seed = name.rpartition("-")
        result = learning_table.result(runs / name, algorithm, int(seed), algorithm_file(algorithm))
        (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        learning_table.write(out)

    seeds = [int(seed) for seed in given.seeds.split(",")]
    missing = runner_of(given, ENVIRONMENT, cores).run(jobs(wanted, seeds, runs, given.gin), ended)
    learning_table.plot(learning_table.write(out), out / "learning.png")
    archive(out, runs)
    print(f"{out / 'learning.md'}" + (f" ({len(missing)} runs without a result)" if missing else ""))
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
