"""Measures the effects of DARLING, Classmate-CoT and CS336 in tiny twins of three seeds; writes a table, JSON and plots.

    python -m jaxrl_llm.eval.reports.system_proofs --out results/systems [--jobs 8] [--minutes 18] [--only darling,classmate,cs336]

DARLING: distinct right answers among 16 samples are at least 1.5 times those of mean-centred GRPO, correctness is lower by at most
0.02, and pass@16 - pass@1 is larger. Classmate-CoT: on 500 held-out rollouts, the error (RMSE) of a monitor that only sees the
thought is lower by a fifth or its F1 higher by 0.05, at a behaviour rate within 0.05. CS336: the assignment's ablations of GRPO.
Each run writes OUT/runs/NAME.json when it ends, and is not run again: the same command continues.
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
    Cores,
    Job,
    Row,
    archive,
    by_line,
    options,
    rows,
    run_job,
    runner_of,
    seconds,
)

SEEDS = (0, 1, 2)
# {name of the arm: (gin file, bindings in addition to the seed)}.
DARLING: Mapping[str, tuple[str, Sequence[str]]] = {
    "darling_baseline": ("darling_baseline_tiny", ()),
    "darling_maths": ("darling_maths_tiny", ()),
    "darling_correct": ("darling_correct_tiny", ()),
    "darling_ngram": ("darling_ngram_tiny", ("SFT_STEPS=400",)),  # the other arms start with as many steps
}
CLASSMATE: Mapping[str, tuple[str, Sequence[str]]] = {
    "classmate_baseline": ("classmate_baseline_tiny", ()),
    "classmate_cot": ("classmate_cot_tiny", ()),
}
FROM_START = ("train.Run.stages=[@rl/train.Stage()]", "sources.PolicySource.architecture=None")
ABLATIONS: Mapping[str, Sequence[str]] = {
    "defaults": (),
    "learning rate / 3": ("LEARNING_RATE=1e-4",),
    "learning rate x 3": ("LEARNING_RATE=1e-3",),
    "no baseline": ("reinforce.Reinforce.baseline=False",),
    "no division by the std": ("reinforce.Reinforce.std=False",),
    "constant length": ("reinforce.Reinforce.aggregation='constant'",),
    "off-policy, clipped": ("ALGORITHM=@grpo.GRPO()", "EPOCHS=2", "MINIBATCHES=4"),
    "off-policy, no clip": ("reinforce.Reinforce.objective='ratio'", "EPOCHS=2", "MINIBATCHES=4"),
    "expert iteration": (),
}
GIN_OF = {"expert iteration": "cs336_expert_iteration_tiny"}
EVALUATED = "eval/heldout/sampled"
# The plots: one panel per measure, one line per seed.
PANELS = (
    ("DARLING: distinct right answers of 16", "classes", ("darling_baseline", "darling_maths", "darling_correct")),
    ("DARLING: correct (sampled)", "pass@1", ("darling_baseline", "darling_maths", "darling_correct")),
    ("Classmate-CoT: monitor's RMSE", "monitor/rmse", ("classmate_baseline", "classmate_cot")),
    ("Classmate-CoT: behaviour rate", "behaviour", ("classmate_baseline", "classmate_cot")),
)


def folder_name(arm: str, seed: int) -> str:
    """Returns the name of the run folder of an arm and seed."""
    return f"{arm.replace(' ', '_').replace('/', 'by').replace(',', '')}-{seed}"


def jobs(only: Sequence[str], runs: Path, bindings: Sequence[str]) -> list[Job]:
    """Returns every run: first those from which others start, then the rest, seed by seed."""
    made: list[Job] = []

    def add(
        arm: str, gin: str, seed: int, more: Sequence[str], after: Sequence[str] = (), exported: bool = False
    ) -> None:
        lines = [f"SEED={seed}", *more, *bindings]
        made.append(run_job(gin, runs / folder_name(arm, seed), lines, after, exported=exported))

    if "classmate" in only:
        add("classmate_mate", "classmate_mate_tiny", 0, (), exported=True)
    if "cs336" in only:
        for seed in SEEDS:
            add("cs336_sft", "cs336_sft_tiny", seed, (), exported=True)
    for seed in SEEDS:
        for arm, (gin, more) in DARLING.items() if "darling" in only else ():
            add(arm, gin, seed, more)
        for arm, (gin, more) in CLASSMATE.items() if "classmate" in only else ():
            mate = [f"CLASSMATE={str(runs / folder_name('classmate_mate', 0) / 'model')!r}"]
            needs = [folder_name("classmate_mate", 0)] if arm == "classmate_cot" else []
            add(arm, gin, seed, [*more, *(mate if needs else [])], needs)
        for arm, lines in ABLATIONS.items() if "cs336" in only else ():
            start = folder_name("cs336_sft", seed)
            begun = [*FROM_START, f"sources.PolicySource.pretrained={str(runs / start / 'model')!r}"]
            add(arm, GIN_OF.get(arm, "cs336_grpo_tiny"), seed, [*begun, *lines], [start])
    return made


# -- results of a run --------------------------------------------------------------------------------------------------


def summary(found: Sequence[Row]) -> dict[str, Any]:
    """Summarises a run: evaluations at the beginning and end of its last stage, the curve, and the wall time."""
    measured = [row for row in found if EVALUATED in row]
    last = found[-1].get("stage", 0.0)
    begin = max((row["step"] for row in found if row.get("stage", 0.0) < last), default=0)
    own = [row for row in measured if row["step"] >= begin]
    keep = lambda row: {n.removeprefix("eval/heldout/"): v for n, v in row.items() if n.startswith("eval/heldout/")}  # noqa: E731
    curve = [{"step": row["step"], **keep(row)} for row in own]
    entropy = [row["entropy"] for row in found if row.get("stage") == last and "entropy" in row]
    return {
        "steps": found[-1]["step"], "before": curve[0], "after": curve[-1], "curve": curve, "seconds": seconds(found),
        "entropy_before": entropy[0] if entropy else None, "entropy_after": entropy[-1] if entropy else None,
    }  # fmt: skip


Results = Mapping[str, Mapping[int, Any]]


def values(results: Results, arm: str, name: str, when: str = "after") -> list[float]:
    """Returns a measure of an arm, one value per seed."""
    return [float(results[arm][seed][when][name]) for seed in sorted(results.get(arm, {}))]


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of a difference over seeds and half the width of its 95% interval, by Student's t."""
    t = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
    x = np.asarray(differences, np.float64)
    half = t.get(len(x), 1.96) * x.std(ddof=1) / math.sqrt(len(x)) if len(x) > 1 else math.nan
    return float(x.mean()), float(half)


# -- verdicts ----------------------------------------------------------------------------------------------------------


def darling(results: Results) -> dict[str, Any] | None:
    """Compares DARLING with mean-centred GRPO; None until both have a result for every seed."""
    arms = [results.get(arm, {}) for arm in ("darling_maths", "darling_baseline")]
    if not all(arms) or set(arms[0]) != set(arms[1]):
        return None
    ours, base = "darling_maths", "darling_baseline"
    ratio = [a / b for a, b in zip(values(results, ours, "classes"), values(results, base, "classes"))]
    quality = [a - b for a, b in zip(values(results, ours, "pass@1"), values(results, base, "pass@1"))]
    gain = {arm: np.subtract(values(results, arm, "pass@16"), values(results, arm, "pass@1")) for arm in (ours, base)}
    larger = [bool(a > b) for a, b in zip(gain[ours], gain[base])]
    mean, half = interval(quality)
    return {
        "classes_ratio": ratio, "quality_difference": quality, "quality_difference_mean": mean, "quality_difference_ci95": half,
        "pass_gain_larger": larger, "reached": bool(min(ratio) >= 1.5 and mean >= -0.02 and all(larger)),
    }  # fmt: skip


def classmate(results: Results) -> dict[str, Any] | None:
    """Compares training with a classmate and without one, at the pair of evaluations chosen by `matched`; None until both have a result."""
    ours, base = (results.get(arm, {}) for arm in ("classmate_cot", "classmate_baseline"))
    if not ours or set(ours) != set(base):
        return None
    pairs = [matched(ours[seed]["curve"], base[seed]["curve"]) for seed in sorted(ours)]
    lower = [1 - a["monitor/rmse"] / b["monitor/rmse"] for a, b in pairs]
    f1 = [a["monitor/f1"] - b["monitor/f1"] for a, b in pairs]
    apart = [a["behaviour"] - b["behaviour"] for a, b in pairs]
    good = [(low >= 0.2 or up >= 0.05) and abs(d) <= 0.05 for low, up, d in zip(lower, f1, apart)]
    return {
        "rmse": [[a["monitor/rmse"], b["monitor/rmse"]] for a, b in pairs], "rmse_lower_by": lower, "f1_higher_by": f1,
        "behaviour": [[a["behaviour"], b["behaviour"]] for a, b in pairs],
        "rollouts": [a["monitor/count"] for a, _ in pairs], "reached": all(good),
    }  # fmt: skip


def matched(ours: Sequence[Row], base: Sequence[Row]) -> tuple[Row, Row]:
    """Returns the latest pair of evaluations, after the first, whose behaviour rates differ by 0.05 at most, else the nearest pair."""
    pairs = [(a, b) for a in ours[1:] for b in base[1:]]
    close = [p for p in pairs if abs(p[0]["behaviour"] - p[1]["behaviour"]) <= 0.05]
    if close:
        return max(close, key=lambda p: (p[0]["step"] + p[1]["step"], p[0]["step"]))
    return min(pairs, key=lambda p: abs(p[0]["behaviour"] - p[1]["behaviour"]))


def markdown(results: Results, verdicts: Mapping[str, Any]) -> str:
    """Returns the tables."""
    cell = lambda arm, name, when="after": " ".join(f"{v:.2f}" for v in values(results, arm, name, when))  # noqa: E731
    lines = ["| system | arm | gin file | measure | before | after, a seed each | s |", "|---|---|---|---|---|---|---|"]
    measures = {"darling": ("classes", "pass@1", "pass@16"), "classmate": ("behaviour", "monitor/rmse", "monitor/f1")}
    for system, arms in (("darling", DARLING), ("classmate", CLASSMATE)):
        for arm, (gin, _) in arms.items():
            for name in measures[system] if results.get(arm) else ():
                wall = " ".join(f"{r['seconds']:.0f}" for r in results[arm].values())
                lines.append(
                    f"| {system} | {arm} | `gin/{gin}.gin` | {name} | {cell(arm, name, 'before')} | {cell(arm, name)} | {wall} |"
                )
    lines += [
        "",
        "| CS336 ablation | lines | sampled before | sampled after | gain, mean and 95% | greedy after | entropy after |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, bound in ABLATIONS.items():
        if not results.get(arm):
            continue
        mean, half = interval(
            np.subtract(values(results, arm, "sampled"), values(results, arm, "sampled", "before")).tolist()
        )
        entropy = " ".join(f"{r['entropy_after']:.2f}" for r in results[arm].values() if r["entropy_after"] is not None)
        text = "; ".join(bound) or f"`gin/{GIN_OF.get(arm, 'cs336_grpo_tiny')}.gin`"
        lines.append(
            f"| {arm} | {text} | {cell(arm, 'sampled', 'before')} | {cell(arm, 'sampled')} | {mean:.2f} +- {half:.2f} | {cell(arm, 'greedy')} | {entropy} |"
        )
    lines += ["", "```json", json.dumps(verdicts, indent=1), "```"]
    return "\n".join(lines) + "\n"


def plot(results: Results, file: Path, ablations: Sequence[str]) -> bool:
    """Plots curves of DARLING and Classmate-CoT and the ablations' accuracy; returns False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False

    figure = Figure(figsize=(4 * (len(PANELS) + 1), 3.4), layout="constrained")
    axes = figure.subplots(1, len(PANELS) + 1)
    for panel, (title, name, arms) in zip(axes, PANELS):
        panel.set_title(title, fontsize=9)
        for color, arm in enumerate(arms):
            for number, one in enumerate(results.get(arm, {}).values()):
                points = [(p["step"], p[name]) for p in one["curve"] if name in p]
                label = arm if number == 0 else None
                panel.plot(*zip(*points), color=f"C{color}", linewidth=1, label=label)
        if panel.lines:
            panel.legend(fontsize=7)
        panel.set_xlabel("step", fontsize=8)
    shown = [arm for arm in ablations if results.get(arm)]
    for place, arm in enumerate(shown):
        after = [one["after"]["sampled"] for one in results[arm].values()]
        axes[-1].plot(after, [place] * len(after), "o", color="C0", markersize=4)
    axes[-1].set_yticks(range(len(shown)), shown, fontsize=7)
    axes[-1].set_title("CS336: sampled accuracy after GRPO", fontsize=9)
    figure.savefig(file, dpi=110)
    return True


def write(out: Path) -> dict[str, Any]:
    """Writes systems.json, systems.md and plots of all results in OUT/runs; returns the verdicts."""
    results: dict[str, dict[int, Any]] = {}
    for file in sorted((out / "runs").glob("*.json")):
        one = json.loads(file.read_text())
        results.setdefault(one["arm"], {})[one["seed"]] = one
    verdicts = {"darling": darling(results), "classmate": classmate(results)}
    (out / "systems.json").write_text(by_line({"results": results, "verdicts": verdicts}, 3) + "\n")
    (out / "systems.md").write_text(markdown(results, verdicts))
    plot(results, out / "systems.png", list(ABLATIONS))
    return verdicts


def main(argv: Sequence[str] | None = None, cores: Cores | None = None) -> int:
    parser = command_line.parser("eval.reports.system_proofs", __doc__)
    options(parser, "runs/systems")
    parser.add_argument("--only", default="darling,classmate,cs336", help="systems, with commas between")
    arguments = parser.parse_args(argv)
    runs, out = arguments.runs.absolute(), arguments.out.absolute()
    (out / "runs").mkdir(parents=True, exist_ok=True)
    arms = {folder_name(a, s): (a, s) for a in (*DARLING, *CLASSMATE, *ABLATIONS) for s in SEEDS}

    def ended(name: str) -> None:
        if name in arms:
            arm, seed = arms[name]
            one = {"arm": arm, "seed": seed, **summary(rows(runs / name))}
            (out / "runs" / f"{name}.json").write_text(json.dumps(one, indent=1) + "\n")

    wanted = jobs(arguments.only.split(","), runs, arguments.gin)
    missing = runner_of(arguments, ENVIRONMENT, cores).run(wanted, ended)
    print(json.dumps(write(out), indent=1))
    archive(out, runs)
    print(
        f"{out / 'systems.md'}"
        + (f" ({len(missing)} runs without a result: the same command goes on)" if missing else "")
    )
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
