"""A row of the leaderboard: the accuracy that complete runs of one command reached and the minutes they took, one run per seed.

    python -m jaxrl_llm.tools.bench --work=speedrun --gin_file=FILE --gin=BINDING --seeds=0,1,2 --runs=FOLDER

launches the runs one after another in FOLDER/seed_N, then reads them; a complete run is not repeated. A row is refused, with the
reason, where a run was resumed, stopped before its steps or its time were over, evaluated on a part of the problems, made from a
checkout with changes, or made with other settings than the other runs. This module prints rows of a file as a table.
"""

import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm import command_line
from jaxrl_llm.eval.reports.jobs import Row, rows

COMMAND = "command.json"
RESUMED = re.compile(r"stage \S+ goes on after step (\d+)")
HEAD = "| what | greedy, mean (each seed) | 95 % of one seed | minutes of steps | without compilation | steps | peak GiB | hardware | commit |"


class Incomplete(ValueError):
    """Raised where a run cannot be a row of a leaderboard; the message states the reason."""


def launched(gin_files: Sequence[str], bindings: Sequence[str], seeds: Sequence[int], folder: Path) -> list[Path]:
    """Makes the missing runs and returns the folders of all runs.

    Raises:
      Incomplete: a run ended with an error, or `folder` holds runs of another command.
    """
    asked = {"gin_files": list(gin_files), "bindings": list(bindings)}
    note = folder / COMMAND
    if note.is_file() and json.loads(note.read_text()) != asked:
        raise Incomplete(
            f"{folder} holds runs of another command, {note.read_text().strip()}: set --runs to another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(asked) + "\n")
    for seed in seeds:
        run = folder / f"seed_{seed}"
        if not (run / "metrics.jsonl").is_file():
            status = subprocess.run(
                command([*gin_files], [*bindings, f"SEED={seed}", f"RUN_DIR={str(run)!r}"])
            ).returncode
            if status:
                raise Incomplete(
                    f"the run of seed {seed} ended with exit status {status}: remove {run} and start it again"
                )
    return [folder / f"seed_{seed}" for seed in seeds]


def command(gin_files: Sequence[str], bindings: Sequence[str]) -> list[str]:
    """Returns the command of one run."""
    flags = [*(f"--gin_file={f}" for f in gin_files), *(f"--gin={b}" for b in bindings)]
    return [sys.executable, "-m", "jaxrl_llm.launch", *flags]


def row(folders: Sequence[Path], evaluation: str = "heldout") -> dict[str, Any]:
    """Returns the row of the runs in `folders`, which differ only in their seeds.

    Raises:
      Incomplete: a run was not complete, or the runs do not belong together.
    """
    found = [one(folder, evaluation) for folder in folders]
    first = found[0]
    for other in found[1:]:
        for name in ("commit", "settings", "hardware", "problems"):
            if other[name] != first[name]:
                raise Incomplete(
                    f"the runs differ in their {name} ({_apart(first[name], other[name])}): they are no seeds of one run"
                )
    seeds = [run["seed"] for run in found]
    if len(set(seeds)) < len(seeds):
        raise Incomplete(f"two runs have one seed (got {seeds})")
    mean = lambda name: sum(run[name] for run in found) / len(found)  # noqa: E731
    accuracy, peaks = mean("greedy"), [run["peak_gib"] for run in found]
    return {
        "commit": first["commit"], "hardware": first["hardware"], "seeds": seeds, "greedy": accuracy, "greedy_each": [r["greedy"] for r in found],
        "before": mean("before"), "interval": 1.96 * math.sqrt(accuracy * (1 - accuracy) / first["problems"]), "problems": first["problems"],
        "minutes": mean("minutes"), "minutes_compiled": mean("minutes_compiled"), "steps": [run["steps"] for run in found],
        "peak_gib": None if None in peaks else max(peaks), "jax": first["jax"],
    }  # fmt: skip


def one(folder: Path, evaluation: str) -> dict[str, Any]:
    """Returns the results of one complete run.

    Times are those of its steps without their evaluations, from the beginning of the first step, which compiles. The time of
    compilation is the sum over its programs, as JAX reports it.

    Raises:
      Incomplete: the run was not complete.
    """
    lines, settings, told = _read(folder)
    facts = json.loads((folder / "run.json").read_text())
    steps = [int(line["step"]) for line in lines]
    _check(folder, steps, settings, told)
    if not facts["commit"] or facts["commit"].endswith("+changes"):
        raise Incomplete(f"{folder} is of no commit (got {facts['commit']}): commit what changed, and run again")
    greedy, problems = f"eval/{evaluation}/greedy", f"eval/{evaluation}/prompts"
    for line, when in ((lines[0], "before the first step"), (lines[-1], "after the last step")):
        if greedy not in line or problems not in line:
            raise Incomplete(f"{folder} has no {greedy} {when}: a row needs both, of greedy answers")
    limits = {
        n: v
        for n, v in settings.items()
        if re.fullmatch(rf"stages\[.*\]\.evaluations\[{evaluation}\]\.(data\.)?limit", n)
    }
    if cut := {n: v for n, v in limits.items() if v != "None"}:
        raise Incomplete(f"{folder} was evaluated on a part of the problems ({cut}): set EVALUATION_LIMIT = None")
    whole = [line.get("time/step_s", 0.0) for line in lines[1:]]
    inside = [seconds - line.get("time/evaluate_s", 0.0) for seconds, line in zip(whole, lines[1:], strict=True)]
    _check_end(folder, steps[-1], sum(whole), settings)
    compiled = sum(line["time/compile_s"] for line in lines[1:])
    return {
        "seed": facts["seed"], "commit": facts["commit"], "jax": facts["jax"],
        "hardware": f"{len(facts['devices'])} x {facts['kind']}", "settings": {n: v for n, v in settings.items() if n not in ("run_dir", "seed")},
        "greedy": lines[-1][greedy], "before": lines[0][greedy], "problems": int(lines[-1][problems]), "steps": steps[-1],
        "minutes": sum(inside) / 60, "minutes_compiled": max(sum(inside) - compiled, 0.0) / 60,
        "peak_gib": max((line["memory/peak_gib"] for line in lines if "memory/peak_gib" in line), default=None),
    }  # fmt: skip


def _read(folder: Path) -> tuple[list[Row], Mapping[str, str], list[str]]:
    """Reads the lines of metrics.jsonl, at least two, the settings of the run and its logged messages."""
    try:
        lines, settings = rows(folder), json.loads((folder / "settings.json").read_text())
        told = [json.loads(line)["message"] for line in (folder / "log.jsonl").read_text().splitlines()]
    except FileNotFoundError as error:
        raise Incomplete(f"{folder} holds no run ({error.filename} is missing)") from error
    if len(lines) < 2:
        raise Incomplete(f"{folder} holds a run that made no step")
    return lines, settings, told


def _check(folder: Path, steps: Sequence[int], settings: Mapping[str, str], told: Sequence[str]) -> None:
    """Raises Incomplete where steps are missing or doubled, or the run was resumed."""
    if list(steps) != list(range(len(steps))):
        raise Incomplete(f"{folder} has not every step from 0 on once (got {list(steps)[:3]} ... {list(steps)[-3:]})")
    begun = [int(found[1]) for message in told if (found := RESUMED.match(message))]
    if len(begun) != len({n for n in settings if re.fullmatch(r"stages\[[^]]+\]", n)}):
        raise Incomplete(
            f"{folder} was resumed (stages went on after steps {begun}): its times leave out what was lost"
        )


def _check_end(folder: Path, step: int, seconds: float, settings: Mapping[str, str]) -> None:
    """Raises Incomplete where a run ended before its steps and its time, in which its evaluations count, were over."""
    wanted = sum(int(v) for n, v in settings.items() if re.fullmatch(r"stages\[[^]]+\]\.steps", n))
    limit = settings.get("stop_after_s", "None")
    if step < wanted and (limit == "None" or seconds < float(limit)):
        raise Incomplete(
            f"{folder} ended after step {step} of {wanted} and {seconds:.0f} s (train.Run.stop_after_s = {limit}): it was stopped"
        )


def _apart(one: Any, other: Any) -> str:
    """Describes the difference of two values; of two mappings, the entries that differ."""
    if not isinstance(one, Mapping):
        return f"{one}, {other}"
    names = [n for n in sorted({*one, *other}) if one.get(n) != other.get(n)]
    return "; ".join(f"{n}: {one.get(n)}, {other.get(n)}" for n in names[:5])


def line(found: Mapping[str, Any]) -> str:
    """Formats a row as a line of the table under HEAD."""
    each = ", ".join(f"{100 * x:.1f}" for x in found["greedy_each"])
    steps = sorted(set(found["steps"]))
    peak = "not told" if found["peak_gib"] is None else f"{found['peak_gib']:.1f}"
    cells = [
        found.get("name", ""), f"{100 * found['greedy']:.1f} % ({each}), from {100 * found['before']:.1f}", f"+- {100 * found['interval']:.1f}",
        f"{found['minutes']:.2f}", f"{found['minutes_compiled']:.2f}", str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}",
        peak, found["hardware"], found["commit"][:7],
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def speedrun(
    gin_files: Sequence[str], bindings: Sequence[str], seeds: Sequence[int], folder: Path, name: str
) -> dict[str, Any]:
    """Makes the runs and returns their row, with the command of a seed; raises Incomplete where there is no row."""
    found = row(launched(gin_files, bindings, seeds, folder))
    told = ["python", *command(gin_files, [*bindings, "SEED=N"])[1:]]
    return {"name": name, **found, "command": shlex.join(told)}


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser("eval.reports.leaderboard", __doc__)
    parser.add_argument("rows", type=Path, help="file that bench --output wrote: a row of JSON a line")
    found = [json.loads(text) for text in parser.parse_args(argv).rows.read_text().splitlines()]
    print(
        "\n".join([HEAD, "|" + "---|" * (HEAD.count("|") - 1), *(line(one) for one in found if "greedy_each" in one)])
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
