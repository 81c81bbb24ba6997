"""Figures of an entropy flow (eval/entropy_flow.py), as PNG and PDF; they need matplotlib, from the extra `plot`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

TITLES = {"layer": "layer", "attn": "attention", "ffn": "feed-forward"}
COLOURS = {"in": "tab:blue", "out": "tab:orange", "change": "tab:green"}


def draw(result: Mapping[str, Any], folder: Path) -> bool:
    """Writes {layer,attn,ffn}_entropy, combined_entropy and entropy_flow_stacked_narrow; returns False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False

    layers = result["layers"]
    for name in TITLES:
        figure = Figure(figsize=(6, 4), layout="constrained")
        _lines(figure.subplots(), layers[name], name, result["proposed_layer"])
        _save(figure, folder / f"{name}_entropy")
    figure = Figure(figsize=(15, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), TITLES, strict=True):
        _lines(axes, layers[name], name, result["proposed_layer"])
    _save(figure, folder / "combined_entropy")
    figure = Figure(figsize=(4, 7), layout="constrained")
    _stacked(figure.subplots(), layers)
    _save(figure, folder / "entropy_flow_stacked_narrow")
    return True


def _lines(axes: Any, sides: Mapping[str, Any], name: str, proposed: int | None) -> None:
    """Plots the entropy before and after each layer's module, and the change."""
    for side, values in sides.items():
        axes.plot(range(len(values)), values, marker=".", label=side, color=COLOURS[side])
    axes.axhline(0.0, color="grey", linewidth=0.8)
    if proposed is not None:
        axes.axvline(proposed, color="grey", linestyle=":", label=f"proposed: {proposed}")
    axes.set(title=TITLES[name], xlabel="layer (from 0)", ylabel="entropy (nats)")
    axes.legend()


def _stacked(axes: Any, layers: Mapping[str, Any]) -> None:
    """Plots four rows per layer, from the bottom up: the layer's input, attention's output, feed-forward's output, the layer's output."""
    rows = (("layer", "in"), ("attn", "out"), ("ffn", "out"), ("layer", "out"))
    count = len(layers["layer"]["in"])
    values = [layers[name][side][layer] for layer in range(count) for name, side in rows]
    colours = ["tab:blue", "tab:red", "tab:green", "tab:purple"] * count
    axes.barh(range(len(values)), values, color=colours, height=0.9)
    axes.set(
        yticks=[4 * layer + 1.5 for layer in range(count)],
        yticklabels=range(count),
        xlabel="entropy (nats)",
        ylabel="layer (from 0)",
    )
    for (name, side), colour in zip(rows, colours, strict=False):
        axes.barh(0, 0, color=colour, label=f"{TITLES[name]} {side}")
    axes.legend(fontsize="small")


def _save(figure: Any, file: Path) -> None:
    for suffix in (".png", ".pdf"):
        figure.savefig(file.with_suffix(suffix), dpi=120)
