"""Plots training curves of runs with the spread over their seeds: `python -m jaxrl_llm.eval.reports.plot GRPO='runs/grpo_*' --out x.png`.

Every argument is a curve, [NAME=]PATTERN; the run folders that match its pattern are its seeds. Metrics are read from metrics.jsonl, or
from TensorBoard's event files where there is none. A seed is interpolated linearly between its own steps; the mean at each step is over
the seeds that have reached it, so the mean jumps where a seed ended early.
"""

import csv
import glob
import math
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxrl_llm import command_line
from jaxrl_llm.eval.viewer.curves import MetricLog
from jaxrl_llm.metrics.event_files import event_files, records, tensorboardx

USUAL = ("reward/mean", "response/length", "entropy/mean", "eval/heldout/greedy", "eval/heldout/sampled", "gap/mean")
# Colours that can be distinguished without red and green.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
BANDS = ("range", "std", "ci95")

Curve = tuple[np.ndarray, np.ndarray]  # steps [T] and values [T]


@dataclass(kw_only=True)
class Band:
    """The mean over seeds and their spread, by step.

    Attributes:
      steps: [T] the steps of all seeds, in ascending order.
      mean: [T] mean over the seeds.
      low: [T] lower edge of the band.
      high: [T] upper edge of the band.
      seeds: [T] number of seeds that have reached the step.
    """

    steps: Float[np.ndarray, " T"]
    mean: Float[np.ndarray, " T"]
    low: Float[np.ndarray, " T"]
    high: Float[np.ndarray, " T"]
    seeds: Float[np.ndarray, " T"]


def band(curves: Sequence[Curve], kind: str = "range") -> Band:
    """Computes the mean over seeds and its band: "range", one standard deviation ("std"), or 1.96 standard errors ("ci95").

    Deviations divide by n - 1; the band of a single seed has no width.
    """
    steps = np.unique(np.concatenate([s for s, _ in curves])).astype(np.float64)
    known = np.array([np.interp(steps, s, v, left=np.nan, right=np.nan) for s, v in curves])
    seeds = np.sum(~np.isnan(known), axis=0).astype(np.float64)
    mean = np.nansum(known, axis=0) / seeds
    if kind == "range":
        return Band(steps=steps, mean=mean, low=np.nanmin(known, axis=0), high=np.nanmax(known, axis=0), seeds=seeds)
    spread = np.sqrt(np.nansum((known - mean) ** 2, axis=0) / np.maximum(seeds - 1, 1))
    width = spread if kind == "std" else 1.96 * spread / np.sqrt(seeds)
    return Band(steps=steps, mean=mean, low=mean - width, high=mean + width, seeds=seeds)


def smoothed(curve: Curve, window: int) -> Curve:
    """Averages the values of `window` successive steps, fewer at the ends; a metric with sparse steps is unchanged."""
    steps, values = curve
    first = np.searchsorted(steps, steps - (window - 1) // 2, "left")
    last = np.searchsorted(steps, steps + window // 2, "right")
    total = np.concatenate([[0.0], np.cumsum(values)])
    return steps, (total[last] - total[first]) / (last - first)


def read(folder: Path) -> dict[str, Curve]:
    """Returns {metric: its curve} of a run folder, with finite values only.

    Raises:
      ValueError: the folder has neither metrics.jsonl nor event files.
    """
    if (folder / "metrics.jsonl").is_file():
        log = MetricLog(folder / "metrics.jsonl")
        log.update()
        found = {name: (np.array(steps), np.array(values)) for name, (steps, values) in log.values.items()}
    else:
        found = _of_events([f for place in (folder, folder / "tensorboard") for f in event_files(place)])
    if not found:
        raise ValueError(f"{folder} has no metrics: neither metrics.jsonl nor TensorBoard's event files")
    kept = {name: (steps[np.isfinite(values)], values[np.isfinite(values)]) for name, (steps, values) in found.items()}
    return {name: (steps, values) for name, (steps, values) in kept.items() if len(steps)}


def _of_events(files: Sequence[Path]) -> dict[str, Curve]:
    event_of = tensorboardx("proto.event_pb2").Event.FromString
    found: dict[str, dict[float, float]] = {}
    for file in files:
        for _, payload in records(file.read_bytes()):
            event = event_of(payload)
            for value in event.summary.value:
                if (number := _scalar(value)) is not None:
                    found.setdefault(value.tag, {})[float(event.step)] = number
    return {name: (np.array(sorted(by)), np.array([by[s] for s in sorted(by)])) for name, by in found.items()}


def _scalar(value: Any) -> float | None:
    """Returns the number in a summary value, in any of its storage forms; None for texts and images."""
    if value.WhichOneof("value") == "simple_value":
        return float(value.simple_value)
    if value.WhichOneof("value") == "tensor" and value.tensor.dtype == 1 and not value.tensor.tensor_shape.dim:
        held = value.tensor.float_val
        return float(held[0]) if held else float(struct.unpack("<f", value.tensor.tensor_content)[0])
    return None


def gather(arguments: Sequence[str]) -> dict[str, list[dict[str, Curve]]]:
    """Returns {name of a curve: the metrics of each of its seeds}.

    Raises:
      ValueError: a pattern matches no run folder, or a name is given twice.
    """
    found: dict[str, list[dict[str, Curve]]] = {}
    for argument in arguments:
        name, _, pattern = argument.rpartition("=")
        folders = sorted(Path(f) for f in glob.glob(str(Path(pattern).expanduser())) if Path(f).is_dir())
        if not folders:
            raise ValueError(f"{pattern!r} matches no folder: give [NAME=]PATTERN of run folders")
        name = name or Path(pattern).name.rstrip("*_-")
        if name in found:
            raise ValueError(f"two curves are called {name!r}: name them, as in NAME={pattern}")
        found[name] = [read(folder) for folder in folders]
    return found


def bands(
    curves: Mapping[str, Sequence[Mapping[str, Curve]]], metrics: Sequence[str], kind: str, window: int
) -> dict[str, dict[str, Band]]:
    """Returns {metric: {name of a curve: its band}}; seeds without the metric are left out.

    Raises:
      ValueError: no run has one of the metrics.
    """
    found: dict[str, dict[str, Band]] = {}
    for metric in metrics:
        for name, seeds in curves.items():
            if having := [smoothed(seed[metric], window) for seed in seeds if metric in seed]:
                found.setdefault(metric, {})[name] = band(having, kind)
        if metric not in found:
            known = sorted({m for seeds in curves.values() for seed in seeds for m in seed})
            raise ValueError(f"no run has the metric {metric!r}; there are {', '.join(known)}")
    return found


def draw(found: Mapping[str, Mapping[str, Band]], file: Path) -> None:
    """Draws a panel for each metric; the file's suffix determines the format (png, svg or pdf)."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for panel in found.values() for name in panel))
    columns = min(len(found), 3)
    rows = math.ceil(len(found) / columns)
    figure = Figure(figsize=(4.2 * columns, 2.9 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for axis in panels.flat[len(found) :]:
        axis.set_visible(False)
    for axis, (metric, curves) in zip(panels.flat, found.items(), strict=False):
        for name, one in curves.items():
            colour = COLOURS[names.index(name) % len(COLOURS)]
            axis.plot(one.steps, one.mean, color=colour, linewidth=1.6, label=name)
            axis.fill_between(one.steps, one.low, one.high, color=colour, alpha=0.18, linewidth=0)
        axis.set_title(metric, fontsize=10, loc="left")
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.margins(x=0.01)
    handles = {
        label: line for axis in panels.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles, loc="outside upper center", ncols=min(len(names), 4), frameon=False, fontsize=9
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=160)


def write_csv(found: Mapping[str, Mapping[str, Band]], file: Path) -> None:
    """Writes the numbers of a figure: metric, curve, step, mean, low, high, seeds."""
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["metric", "curve", "step", "mean", "low", "high", "seeds"])
        for metric, curves in found.items():
            for name, b in curves.items():
                for row in zip(b.steps, b.mean, b.low, b.high, b.seeds, strict=True):
                    writer.writerow([metric, name, *(f"{x:.7g}" for x in row)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the figure; returns 1 where an input is missing or invalid."""
    parser = command_line.parser("eval.reports.plot", (__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "curves", nargs="+", metavar="[NAME=]PATTERN", help="run folders; those of a pattern are the seeds of a curve"
    )
    parser.add_argument("--metrics", help="separated by commas (default: the usual ones that there are)")
    parser.add_argument("--band", choices=BANDS, default=BANDS[0], help="what the band shows (default: %(default)s)")
    parser.add_argument(
        "--smooth", type=int, default=1, metavar="N", help="means over the values of N steps (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("curves.png"), help=".png, .svg or .pdf (default: %(default)s)"
    )
    parser.add_argument("--csv", type=Path, help="writes the numbers too")
    asked = parser.parse_args(arguments)
    try:
        if asked.smooth < 1:
            raise ValueError(f"--smooth must be at least 1 (got {asked.smooth})")
        curves = gather(asked.curves)
        there = {m for seeds in curves.values() for seed in seeds for m in seed}
        metrics = asked.metrics.split(",") if asked.metrics else [m for m in USUAL if m in there] or sorted(there)[:6]
        found = bands(curves, metrics, asked.band, asked.smooth)
        draw(found, asked.out)
    except ImportError:
        print("figures need matplotlib: pip install 'jaxrl-llm[plot]'", file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if asked.csv:
        write_csv(found, asked.csv)
    seeds = ", ".join(f"{name} {len(runs)}" for name, runs in curves.items())
    print(f"wrote {asked.out}: {len(found)} metrics; seeds of each curve: {seeds}; band: {asked.band}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
