"""Reads a run folder's metrics.jsonl for the tables that compare runs, and builds the commands that make such folders."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jaxrl_llm
from jaxrl_llm.eval.reports.jobs import Job

GIN = Path(jaxrl_llm.__file__).resolve().parent / "gin"
# Runs use the CPU only and share a compilation cache.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

Row = Mapping[str, Any]


def rows(folder: Path) -> list[Row]:
    """Returns the lines of metrics.jsonl.

    Raises:
      FileNotFoundError: the run has not begun.
    """
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def by_line(found: Any, depth: int) -> str:
    """Returns JSON text with one line for each entry of the outer `depth` levels."""
    if depth == 0 or not isinstance(found, dict | list):
        return json.dumps(found)
    if isinstance(found, list):
        return "[\n" + ",\n".join(by_line(one, depth - 1) for one in found) + "\n]"
    return (
        "{\n" + ",\n".join(f"{json.dumps(str(name))}: {by_line(one, depth - 1)}" for name, one in found.items()) + "\n}"
    )


def seconds(found: Sequence[Row]) -> float:
    """Returns the wall time of a run's steps, in seconds."""
    return float(sum(row.get("time/step_s", 0.0) for row in found))


def launch(name: str, folder: Path, bindings: Sequence[str]) -> list[str]:
    """Returns the command that runs gin/NAME.gin in a folder."""
    flags = [f"--gin={b}" for b in (f"RUN_DIR={str(folder)!r}", *bindings)]
    return [sys.executable, "-m", "jaxrl_llm.launch", f"--gin_file={GIN / name}.gin", *flags]


def run_job(
    gin: str, folder: Path, bindings: Sequence[str], after: Sequence[str] = (), *, exported: bool = False
) -> Job:
    """Returns the job that runs gin/GIN.gin in a folder; with `exported` it also writes the policy to FOLDER/model."""
    commands, model = [launch(gin, folder, bindings)], folder / "model"
    if exported:
        commands.append([sys.executable, "-m", "jaxrl_llm.tools.export", str(folder), "--out", str(model)])
    return Job(name=folder.name, commands=commands, after=after, folder=model if exported else None)
