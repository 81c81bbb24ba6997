"""The results of gin/learning's runs as a Markdown table and a plot.

    python -m jaxrl_llm.eval.reports.learning_table OUT

The command reads the results NAME-SEED.json of OUT and writes learning.json, learning.md and, with matplotlib, learning.png there.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm import command_line
from jaxrl_llm.eval.reports.jobs import by_line

GREEDY, SAMPLED, PAIRS = "eval/heldout/greedy", "eval/heldout/sampled", "eval/pairs/accuracy"
STRONG = ("grpo", "dapo", "rloo", "reinforce_plus_plus", "ppo", "gspo")
Result = Mapping[str, Any]


def header(file: Path) -> tuple[str, str]:
    """Returns the first words of a gin file's opening comment, and the first address in it ("" where there is none).

    Raises:
      ValueError: the file does not begin with a comment.
    """
    comment = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    text = " ".join(comment)
    if not text:
        raise ValueError(f"{file} does not open with a comment that names its algorithm and paper")
    address = next((w.strip("(),:;.") for w in text.split() if w.startswith("https://")), "")
    title = text.partition("https://")[0].partition(": ")[0].rstrip(" ,.:")
    return title, address


def result(folder: Path, name: str, seed: int, file: Path) -> dict[str, Any]:
    """Summarises a run folder's metrics.jsonl: accuracies before and after, distinct answers, the curve and the time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    facts = json.loads((folder / "run.json").read_text())
    measured = [row for row in rows if GREEDY in row]
    first, last = measured[0], measured[-1]
    title, paper = header(file)
    names = {
        "greedy": GREEDY,
        "sampled": SAMPLED,
        "greedy_distinct": f"{GREEDY}_distinct",
        "sampled_distinct": f"{SAMPLED}_distinct",
    }
    if PAIRS in first:
        names["pairs"] = PAIRS
    values = {
        f"{short}_{when}": row[key]
        for short, key in names.items()
        for when, row in (("before", first), ("after", last))
    }
    curve = [[row["step"], *(row[names[n]] for n in ("greedy", "sampled", "pairs") if n in names)] for row in measured]
    return {
        "algorithm": name, "title": title, "paper": paper, "seed": seed, "steps": last["step"], **values, "curve": curve,
        "seconds": sum(row.get("time/step_s", 0.0) for row in rows),
        "gin": [f"gin/algorithms/{file.name}", f"gin/learning/{name}.gin"],
        **{name: facts[name] for name in ("commit", "jax", "devices") if name in facts},
    }  # fmt: skip


def results(out: Path) -> list[dict[str, Any]]:
    """Returns all results in a folder, by algorithm and seed."""
    files = sorted(p for p in out.glob("*-*.json"))
    return [json.loads(p.read_text()) for p in files]


def closed(rows: Sequence[Result], teacher: Result | None, kind: str) -> list[float]:
    """Returns the share of the gap to the teacher that each run closed; NaN where there is no gap, empty without a teacher."""
    if teacher is None:
        return []
    gaps = [teacher[f"{kind}_after"] - r[f"{kind}_before"] for r in rows]
    return [(r[f"{kind}_after"] - r[f"{kind}_before"]) / gap if gap else math.nan for r, gap in zip(rows, gaps)]


def reached(name: str, rows: Sequence[Result], teacher: Result | None) -> str:
    """States the aim of an algorithm, and whether every seed reaches it."""
    if name == "distill":
        shares = closed(rows, teacher, "sampled")
        return _verdict(shares, 0.5, "share of the gap to the teacher closed (sampled)")
    if "pairs_after" in rows[0]:
        return _verdict([r["pairs_after"] for r in rows], 0.9, "held-out pairs told apart")
    gains = [r["greedy_after"] - r["greedy_before"] for r in rows]
    return _verdict(gains, 0.2 if name in STRONG else 0.1, "gain, greedy")


def _verdict(values: Sequence[float], least: float, what: str) -> str:
    if not values:
        return "not measured"
    return f"{'yes' if min(values) >= least else 'no'}: {what} {min(values):.2f} at least (wanted {least:g})"


def by_algorithm(found: Iterable[Result]) -> dict[str, list[Result]]:
    """Groups results by algorithm, with seeds in order; runs from which others start are left out."""
    groups: dict[str, list[Result]] = {}
    for one in found:
        if one["algorithm"] not in ("start", "teacher"):
            groups.setdefault(one["algorithm"], []).append(one)
    return {name: sorted(rows, key=lambda r: r["seed"]) for name, rows in sorted(groups.items())}


def start_of(rows: Sequence[Result], kind: str) -> str:
    """Formats the accuracy before training; two values where the initial checkpoints were made on two machines."""
    return " or ".join(sorted({f"{r[f'{kind}_before']:.2f}" for r in rows}))


def markdown(found: Sequence[Result]) -> str:
    """Returns the table: one row per algorithm, one value per seed."""
    teacher = next((r for r in found if r["algorithm"] == "teacher"), None)
    lines = [
        "| algorithm | gin file | paper | greedy before | greedy after | sampled before | sampled after | "
        "distinct greedy answers | pairs before | pairs after | s | aim reached |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in by_algorithm(found).items():
        cell = lambda key, form=".2f": " ".join(format(r[key], form) for r in rows if key in r) or "-"  # noqa: B023, E731
        first = rows[0]
        paper = f"[paper]({first['paper']})" if first["paper"] else "-"
        lines.append(
            f"| {first['title']} | `{first['gin'][1]}` | {paper} | {start_of(rows, 'greedy')} | {cell('greedy_after')} | "
            f"{start_of(rows, 'sampled')} | {cell('sampled_after')} | {cell('greedy_distinct_after', '.0f')} | {cell('pairs_before')} | {cell('pairs_after')} | "
            f"{cell('seconds', '.0f')} | {reached(name, rows, teacher)} |"
        )
    if teacher is not None:
        lines += [
            "",
            f"The teacher of distillation: {teacher['greedy_after']:.2f} greedy, {teacher['sampled_after']:.2f} sampled.",
        ]
    return "\n".join(lines) + "\n"


def plot(found: Sequence[Result], file: Path) -> bool:
    """Plots held-out accuracies by step, one panel per algorithm, one line per seed; returns False without matplotlib or results."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False

    if not (groups := by_algorithm(found)):
        return False
    columns = 8
    lines = -(-len(groups) // columns)
    figure = Figure(figsize=(14, 1.75 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for panel in axes.flat[len(groups) :]:
        panel.axis("off")
    for panel, (name, rows) in zip(axes.flat, groups.items(), strict=False):
        panel.set_title(name, fontsize=8)
        for row in rows:
            curve = np.array(row["curve"], float)
            panel.plot(curve[:, 0], curve[:, 1], "C0", linewidth=1)
            panel.plot(curve[:, 0], curve[:, 2], "C1", linewidth=1)
            if curve.shape[1] > 3:
                panel.plot(curve[:, 0], curve[:, 3], "C2", linewidth=1)
        panel.set_ylim(0, 1.03)
        panel.tick_params(labelsize=6)
    figure.suptitle(
        "held-out accuracy by step, a line a seed: greedy (blue), sampled (orange), pairs told apart (green)",
        fontsize=9,
    )
    figure.savefig(file, dpi=90)
    return True


def write(out: Path) -> list[dict[str, Any]]:
    """Writes learning.json and learning.md of all results in `out`, and returns the results."""
    found = results(out)
    (out / "learning.json").write_text(by_line(found, 1) + "\n")
    (out / "learning.md").write_text(markdown(found))
    return found


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser("eval.reports.learning_table", __doc__)
    parser.add_argument("out", type=Path, help="folder of the results")
    arguments = parser.parse_args(argv)
    plot(write(arguments.out), arguments.out / "learning.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
