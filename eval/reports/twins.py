"""Runs the tiny twin of every recipe of the five systems and checks that the reward or the loss of each moved.

    python -m jaxrl_llm.eval.reports.twins --out results/twins [--jobs 1] [--minutes 30] [--only darling_]

A twin is a file gin/SYSTEM_*_tiny.gin that names its own RUN_DIR; other files are shared parts. A twin counts as moved where the mean reward
of the last quarter of its last stage's steps differs from the first quarter's by at least 0.02 and three standard errors,
or, without a reward, where the loss fell by a tenth. Twins that have ended are not run again. OUT/twins.json and twins.md hold
the results; the exit code is 0 where every twin ran and moved.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm import command_line
from jaxrl_llm.eval.reports.jobs import (
    ENVIRONMENT,
    GIN,
    Cores,
    Job,
    Row,
    archive,
    options,
    rows,
    run_job,
    runner_of,
    seconds,
)

SYSTEMS = ("tokenbuncher", "darling", "bupo", "classmate", "cs336")
# Twins that start from another: (the earlier twin, and the binding that names its exported model).
BEGINS = {"classmate_cot_tiny": ("classmate_mate_tiny", "CLASSMATE")}
DEFENDED_AND_ATTACKED = (
    "defence",
    *(f"attack_{name}" for name in ("grpo", "ppo", "rloo", "reinforce_plus_plus", "obj2", "adaptive")),
)
BEGINS |= {f"tokenbuncher_{name}_tiny": ("tokenbuncher_base_tiny", "START") for name in DEFENDED_AND_ATTACKED}
REWARD, LOSS = "reward/mean", "loss/total"


def names(only: str = "") -> list[str]:
    """Returns all twins with the prefix `only`, preceded by those from which they start."""
    files = [file for system in SYSTEMS for file in sorted(GIN.glob(f"{system}_*_tiny.gin"))]
    found = [f.stem for f in files if f"RUN_DIR = 'runs/{f.stem}'" in f.read_text() and f.stem.startswith(only)]
    earlier = list(dict.fromkeys(BEGINS[name][0] for name in found if name in BEGINS))
    return [*earlier, *(name for name in found if name not in earlier)]


def job(name: str, runs: Path, bindings: Sequence[str]) -> Job:
    """Returns the job of a twin."""
    earlier, binding = BEGINS.get(name, ("", ""))
    begins = [f"{binding}={str(runs / earlier / 'model')!r}"] if earlier else []
    exported = name in {first for first, _ in BEGINS.values()}
    return run_job(name, runs / name, [*begins, *bindings], [earlier] if earlier else [], exported=exported)


def moved(found: Sequence[Row]) -> dict[str, Any]:
    """Computes {"measure", "before", "after", "moved"} from a run's rows."""
    last = [row for row in found if "stage" in row and row["stage"] == found[-1]["stage"]]
    measure = REWARD if any(REWARD in row for row in last) else LOSS
    values = np.array([row[measure] for row in last if measure in row], np.float64)
    quarter = max(1, len(values) // 4)
    first, final = values[:quarter], values[-quarter:]
    before, after = float(first.mean()), float(final.mean())
    if measure == LOSS:
        enough = after - before <= -0.1 * abs(before)
    else:
        noise = math.sqrt((first.var(ddof=1) + final.var(ddof=1)) / quarter) if quarter > 1 else 0.0
        enough = abs(after - before) >= max(0.02, 3 * noise)
    return {
        "measure": measure,
        "before": before,
        "after": after,
        "moved": bool(enough and math.isfinite(after - before)),
    }


def markdown(found: Sequence[Row]) -> str:
    """Returns the table of all twins."""
    lines = ["| twin | measure | first quarter | last quarter | moved | s |", "|---|---|---|---|---|---|"]
    for one in found:
        if "measure" not in one:
            lines.append(f"| {one['twin']} | - | - | - | no result | - |")
            continue
        verdict = "yes" if one["moved"] else "no"
        lines.append(
            f"| {one['twin']} | {one['measure']} | {one['before']:.3f} | {one['after']:.3f} | {verdict} | {one['seconds']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None, cores: Cores | None = None) -> int:
    parser = command_line.parser("eval.reports.twins", __doc__)
    options(parser, "runs/twins")
    parser.add_argument("--only", default="", help="twins whose names begin so, such as darling_")
    arguments = parser.parse_args(argv)
    runs, out = arguments.runs.absolute(), arguments.out.absolute()
    wanted = names(arguments.only)
    results: dict[str, Row] = {}

    def ended(name: str) -> None:
        lines = rows(runs / name)
        results[name] = {**moved(lines), "seconds": seconds(lines)}
        write(out, wanted, results)

    runner_of(arguments, ENVIRONMENT, cores).run([job(name, runs, arguments.gin) for name in wanted], ended)
    found = write(out, wanted, results)
    archive(out, runs)
    print(markdown(found))
    return 0 if found and all(one.get("moved") for one in found) else 1


def write(out: Path, wanted: Sequence[str], results: Mapping[str, Row]) -> list[Row]:
    """Writes twins.json and twins.md; returns the rows of the ended twins, and rows with only the name of the others."""
    found: list[Row] = [{"twin": name, **results.get(name, {})} for name in sorted(wanted)]
    (out / "twins.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "twins.md").write_text(markdown(found))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
