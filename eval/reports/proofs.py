"""Runs the parts below at once on the cores of one machine, each as its own command does.

    python -m jaxrl_llm.eval.reports.proofs --out results --jobs 8 [--minutes 9] [--only learning,phases,systems,twins]

OUT/PART holds the results of a part, RUNS/PART its runs. Runs that have ended are not run again: the same command continues, also on
another machine after OUT/results.tgz is unpacked, which holds results/ and the small files of runs/.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

from jaxrl_llm import command_line
from jaxrl_llm.eval.reports import learning_runs, phase_proofs, system_proofs, twins
from jaxrl_llm.eval.reports.jobs import Cores, archive, options, survives

# Parts with runs that wait for others come first.
PARTS: Mapping[str, Callable[[Sequence[str], Cores], int]] = {
    "phases": phase_proofs.main, "systems": system_proofs.main, "twins": twins.main, "learning": learning_runs.main,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser("eval.reports.proofs", __doc__)
    options(parser, "runs/proofs")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    given = parser.parse_args(argv)
    only = given.only.split(",")
    if unknown := sorted(set(only) - set(PARTS)):
        parser.error(f"no part {unknown}; there are {', '.join(PARTS)}")
    cores = Cores(given.jobs, given.threads)
    shared = [f"--minutes={given.minutes}", *(f"--gin={binding}" for binding in given.gin)]
    well: set[str] = set()

    def carry_out(part: str) -> None:
        if PARTS[part]([f"--out={given.out / part}", f"--runs={given.runs / part}", *shared], cores) == 0:
            well.add(part)

    with ThreadPoolExecutor(len(only)) as pool:
        ends = [pool.submit(survives, partial(carry_out, part)) for part in only]
        try:
            wait(ends)
        except BaseException:
            cores.stopped.set()
            raise
    failed = [part for part in only if part not in well]
    print(
        f"{archive(given.out, given.runs)}"
        + (f"; not all of {', '.join(failed)} is there or as it should be" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
