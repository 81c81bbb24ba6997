"""Renders a run for a notebook: its progress, curves of its metrics, and the last rollouts, as one piece of HTML without scripts."""

import contextlib
import html
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.metrics.console import short

CURVES = (
    "reward/mean",
    "loss/total",
    "entropy/mean",
    "kl/k3_to_old",
    "kl/reference",
    "response/length",
    "pairs/accuracy",
)
BESIDE = ("_truncated", "_length", "_distinct", "/prompts")  # ends of metrics that are no results of an evaluation
WIDTH, HEIGHT = 220, 70
ROLLOUTS = 4  # most rollouts that are shown
TAIL = 2**20  # last bytes of rollouts.jsonl that are read
LETTERS = 600  # characters of a prompt or a response that are shown

Row = Mapping[str, Any]


def progress(history: Sequence[Row], total: int) -> str:
    """Returns the last step and its metrics on one line."""
    if not history:
        return f"step 0 of {total}"
    last = history[-1]
    known = [f"{name} {short(last[name])}" for name in curves_of(history) if name in last]
    return f"step {last['step']} of {total}" + (f", {', '.join(known)}" if known else "")


def curves_of(history: Sequence[Row]) -> list[str]:
    """Returns the metrics that are drawn: the usual ones and the evaluations' results that the run has, without lengths and similar values."""
    names = dict.fromkeys(name for row in history for name in row)
    results = [n for n in names if n.startswith("eval/") and n.count("/") == 2 and not n.endswith(BESIDE)]
    return [n for n in CURVES if n in names] + results


def curve(name: str, points: Sequence[tuple[float, float]]) -> str:
    """Draws a metric by step as SVG, with its least, greatest and last value."""
    points = [(x, y) for x, y in points if math.isfinite(y)]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    across, up = (max(xs) - min(xs)) or 1.0, (max(ys) - min(ys)) or 1.0
    drawn = " ".join(
        f"{4 + (WIDTH - 8) * (x - min(xs)) / across:.1f},{HEIGHT - 4 - (HEIGHT - 8) * (y - min(ys)) / up:.1f}" for x, y in points
    )  # fmt: skip
    end_x, end_y = drawn.rsplit(" ", 1)[-1].split(",")
    bounds = f"{short(min(ys))} to {short(max(ys))}"
    return (
        f'<figure style="display:inline-block;margin:4px 12px 4px 0"><figcaption style="font-size:12px">{html.escape(name)} '
        f"<b>{short(ys[-1])}</b> <span style='opacity:.6'>{bounds}</span></figcaption>"
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{html.escape(name)}">'
        f'<polyline points="{drawn}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>'
        f'<circle cx="{end_x}" cy="{end_y}" r="2.5" fill="#1f77b4"/></svg></figure>'
    )


def rollouts(folder: Path) -> list[dict[str, Any]]:
    """Reads the last rollouts of the run folder."""
    file = folder / "rollouts.jsonl"
    if not file.is_file():
        return []
    with file.open("rb") as opened:
        start = max(opened.seek(0, os.SEEK_END) - TAIL, 0)
        opened.seek(start)
        lines = opened.read().split(b"\n")[start > 0 : -1]  # without the incomplete lines at both ends
    found = [json.loads(line) for line in lines]
    return [row for row in found if row["step"] == found[-1]["step"]][:ROLLOUTS]


def page(folder: Path, history: Sequence[Row], total: int) -> str:
    """Renders the run as HTML."""
    done = history[-1]["step"] if history else 0
    parts = [
        f"<div><b>{html.escape(str(folder))}</b> step {done} of {total} "
        f'<progress value="{done}" max="{total}" style="width:200px"></progress></div>'
    ]
    parts += [curve(name, [(row["step"], row[name]) for row in history if name in row]) for name in curves_of(history)]
    if shown := rollouts(folder):
        cells = "".join(
            f'<tr style="vertical-align:top"><td style="text-align:left;white-space:pre-wrap">{_text(row, "question")}</td>'
            f'<td style="text-align:left;white-space:pre-wrap">{_text(row, "response")}</td><td>{_reward(row)}</td></tr>'
            for row in shown
        )
        parts.append(
            f"<details open><summary>rollouts of step {shown[0]['step']}</summary><table><tr><th>prompt</th><th>response</th>"
            f"<th>reward</th></tr>{cells}</table></details>"
        )
    return "\n".join(parts)


def _text(row: Row, name: str) -> str:
    text = str(row.get(name, ""))
    return html.escape(text if len(text) <= LETTERS else f"{text[:LETTERS]} ...")


def _reward(row: Row) -> str:
    value = row.get("reward")
    return "invalid" if value is None else short(value)


@contextlib.contextmanager
def shown(run: Any) -> Iterator[Callable[[], None]]:
    """Shows the run in a notebook and yields a function that updates it; elsewhere the function does nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or not hasattr(shell, "kernel"):
        yield lambda: None
        return
    from IPython.display import HTML, display

    handle = display(HTML(run._repr_html_()), display_id=True)
    yield lambda: handle.update(HTML(run._repr_html_()))
