"""Plots the systems' characteristic effects: one panel per measure, one line per seed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Results = Mapping[str, Mapping[int, Any]]
PANELS = (
    ("DARLING: distinct right answers of 16", "classes", ("darling_baseline", "darling_maths", "darling_correct")),
    ("DARLING: correct (sampled)", "pass@1", ("darling_baseline", "darling_maths", "darling_correct")),
    ("Classmate-CoT: monitor's RMSE", "monitor/rmse", ("classmate_baseline", "classmate_cot")),
    ("Classmate-CoT: behaviour rate", "behaviour", ("classmate_baseline", "classmate_cot")),
)


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
