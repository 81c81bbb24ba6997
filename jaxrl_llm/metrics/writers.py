"""Metric writers: JSONL files, TensorBoard, Weights & Biases, and several of them as one writer.

A component (`Jsonl`, `TensorBoard`, `WandB`, and `train.Console`) holds settings; its `open` starts the writer.
A writer that opens with the restored step drops the rows that an interrupted run wrote after it, so that no step appears twice.
"""

import contextlib
import importlib
import json
import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from jaxrl_llm.metrics.event_files import cut_events, event_files, new_event_file, tensorboardx
from jaxrl_llm.metrics.run_folder import append_lines
from jaxrl_llm.protocols import Writer


@runtime_checkable
class WriterComponent(Protocol):
    """Settings of a writer."""

    def open(self, run_dir: Path, resume_step: int | None, total_steps: int | None = None) -> Writer:
        """Starts to write to `run_dir`; drops the folder's rows of steps after `resume_step` (of all steps for None)."""
        ...


class Writers:
    """Several writers behind the interface of one."""

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = tuple(writers)

    @classmethod
    def open(
        cls,
        components: Sequence[WriterComponent],
        run_dir: Path,
        resume_step: int | None,
        total_steps: int | None = None,
    ) -> "Writers":
        """Starts every component; where one fails, those that have started are closed."""
        started: list[Writer] = []
        try:
            for component in components:
                started.append(component.open(run_dir, resume_step, total_steps))
        except BaseException:
            cls(started).close()
            raise
        return cls(started)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write(step, values)

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for writer in self._writers:
            writer.rollouts(step, rows)

    def text(self, name: str, text: str) -> None:
        for writer in self._writers:
            writer.text(name, text)

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # where one fails to close, the others are still closed
            for writer in self._writers:
                closing.callback(writer.close)


def plain(value: Any) -> Any:
    """Converts `value` to strict JSON: NumPy becomes Python, and non-finite floats become "NaN", "Infinity" or "-Infinity"."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    return value


@dataclass(frozen=True, kw_only=True)
class Jsonl:
    """Writes JSON lines: the metrics of each step, and rollout rows.

    Attributes:
      metrics: name of the metrics file in the run folder.
      rollouts: name of the rollouts file in the run folder.
    """

    metrics: str = "metrics.jsonl"
    rollouts: str = "rollouts.jsonl"

    def open(self, run_dir: Path, resume_step: int | None, total_steps: int | None = None) -> "JsonlWriter":
        run_dir.mkdir(parents=True, exist_ok=True)
        metrics, rollouts = run_dir / self.metrics, run_dir / self.rollouts
        for path in (metrics, rollouts):
            cut_lines(path, -1 if resume_step is None else resume_step)
        return JsonlWriter(metrics, rollouts)


class JsonlWriter:
    """Appends rows; each file is open only during the call."""

    def __init__(self, metrics: Path, rollouts: Path) -> None:
        self._metrics = metrics
        self._rollouts = rollouts

    def write(self, step: int, values: Mapping[str, float]) -> None:
        append(self._metrics, [{"step": step, **values}])

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        append(self._rollouts, [{"step": step, **row} for row in rows])

    def text(self, name: str, text: str) -> None:
        """Does nothing, since documents are separate files in the run folder."""

    def close(self) -> None:
        """Does nothing, since no file is held open."""


def append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Appends JSON lines to a file, all or none; raises OSError that names the file."""
    lines = "".join(f"{json.dumps(plain(row), ensure_ascii=False, allow_nan=False)}\n" for row in rows)
    try:
        append_lines(path, lines)
    except OSError as error:
        advice = "make it writable or free space, and start the run again: it goes on from its last checkpoint"
        raise OSError(error.errno, f"{error.strerror} (writing metrics): {advice}", str(path)) from error


def cut_lines(path: Path, step: int) -> None:
    """Drops rows of steps after `step`, and an incomplete line, by one atomic replacement."""
    if not path.exists():
        return
    kept = path.with_name(f"{path.name}.cut")
    with path.open("rb") as old, kept.open("wb") as new:
        new.writelines(line for line in old if step_of(line) <= step)
    kept.replace(path)


def step_of(line: bytes) -> float:
    """Returns the step of a JSON line; infinity for an incomplete line."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else math.inf
    except ValueError:
        return math.inf


# Metrics without a group that share the name of a group, and their names in TensorBoard.
GROUPED = {
    "entropy": "entropy/update", "logprob": "logprob/update", "compilations": "compilations/total", "stage": "run/stage",
}  # fmt: skip
# The tab "Custom scalars": {category: {chart: regular expressions of its metrics}}, the charts to look at first.
DASHBOARD: Mapping[str, Mapping[str, Sequence[str]]] = {
    "Does it learn": {
        "reward": [r"^reward/mean$", r"^reward/unfiltered$"], "held out": [r"^eval/[^/]+/(greedy|sampled|accuracy)$"],
        "no signal": [r"^groups/(no_signal|invalid)$"], "length": [r"^response/length$", r"^eval/[^/]+/greedy_length$"],
        "cut off": [r"^response/truncated$", r"^eval/[^/]+/greedy_truncated$"],
    },
    "Is the update sound": {
        "entropy": [r"^entropy/mean$"], "divergence": [r"^kl/k3_to_old$", r"^kl/reference$", r"^drift/kl$"],
        "clipped": [r"^ratio/clip_fraction$"], "gradient": [r"^grad_norm/policy$"], "loss": [r"^loss/total$"],
    },
    "Do sampler and learner agree": {"gap": [r"^gap/mean$", r"^gap/p99$"], "staleness": [r"^staleness/(mean|max)$"]},
    "Is it fast": {
        "seconds": [r"^time/(step|sample|reward|score|update|publish|evaluate)_s$"], "tokens a second": [r"^speed/tokens_per_s$"],
        "occupancy and fill": [r"^sampler/occupancy$", r"^batch/fill$"],
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """Writes TensorBoard event files: scalars by step in groups, a dashboard of them, rollout rows and documents as text.

    Attributes:
      folder: name of the events folder in the run folder.
      rollouts_shown: most rollouts shown for a step; the JSONL file has all of them.
    """

    folder: str = "tensorboard"
    rollouts_shown: int = 4

    def open(self, run_dir: Path, resume_step: int | None, total_steps: int | None = None) -> "TensorBoardWriter":
        """Starts an event file; events after `resume_step` are removed from the older ones."""
        folder = run_dir / self.folder
        folder.mkdir(parents=True, exist_ok=True)
        for file in event_files(folder):
            cut_events(file, -1 if resume_step is None else resume_step)
        return TensorBoardWriter(folder, self.rollouts_shown)


class TensorBoardWriter:
    """Writes in the caller's thread, so that events from before a checkpoint survive a kill after it."""

    def __init__(self, folder: Path, rollouts_shown: int) -> None:
        # It warns of each value that is not a number; TensorBoard marks these, and a line for each would bury the console's lines.
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
        self._summary, self._event = tensorboardx("summary"), tensorboardx("proto.event_pb2").Event
        self._rollouts_shown = rollouts_shown
        self._file = new_event_file(folder)
        charts = {part: {name: ["Multiline", tags] for name, tags in held.items()} for part, held in DASHBOARD.items()}
        self._add(0, self._summary.custom_scalars(charts))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        shown = {GROUPED.get(name, name): float(value) for name, value in values.items()}
        self._add(step, *(self._summary.scalar(name, value) for name, value in shown.items()))

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if shown := [markdown(row) for row in rows[: self._rollouts_shown]]:
            self._add(step, self._summary.text("rollouts", "\n\n---\n\n".join(shown)))

    def text(self, name: str, text: str) -> None:
        self._add(0, self._summary.text(name, text))

    def close(self) -> None:
        self._file.close()

    def _add(self, step: int, *summaries: Any) -> None:
        for summary in summaries:
            self._file.write_event(self._event(step=step, wall_time=time.time(), summary=summary))
        self._file.flush()


def readable(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a rollout row without its token stats, which are meant for programs."""
    return {name: value for name, value in row.items() if name != "streams"}


def markdown(row: Mapping[str, Any]) -> str:
    """Formats a rollout row as Markdown: texts of several words as blocks, the rest on one line, without its token stats."""
    row = readable(row)
    long = {name: value for name, value in row.items() if isinstance(value, str) and (" " in value or "\n" in value)}
    rest = "  ".join(f"**{name}** {plain(value)}" for name, value in row.items() if name not in long)
    blocks = {name: "\n".join(f"    {line}" for line in value.splitlines()) for name, value in long.items()}
    return "\n\n".join([rest, *(f"**{name}**\n\n{block}" for name, block in blocks.items())])


def library(name: str, component: str) -> Any:
    """Imports a tracker's package; raises an ImportError that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        advice = f"install it by pip install 'jaxrl-llm[{name}]', or leave {component} out of the writers"
        raise ImportError(f"{component} needs the package {name}: {advice}") from error


@dataclass(frozen=True, kw_only=True)
class WandB:
    """Logs to Weights & Biases; the library is imported only where this writer is used.

    Attributes:
      project: name of the project.
      entity: user or team; None takes the account's default.
      name: name of the run; None takes the run folder's name.
      mode: "online", or "offline" to sync the run folder later.
    """

    project: str = "jaxrl_llm"
    entity: str | None = None
    name: str | None = None
    mode: Literal["online", "offline"] = "online"

    def open(self, run_dir: Path, resume_step: int | None, total_steps: int | None = None) -> "WandBWriter":
        """Starts a W&B run, or rewinds the run of this folder to `resume_step` (online only)."""
        wandb = library("wandb", "train.WandB")
        run_dir.mkdir(parents=True, exist_ok=True)
        writer = WandBWriter(self, wandb, run_dir)
        writer.start(resume_step)
        return writer


class WandBWriter:
    """Logs to one W&B run; the run folder holds its id."""

    def __init__(self, settings: WandB, wandb: Any, run_dir: Path) -> None:
        self._settings = settings
        self._wandb = wandb
        self._run_dir = run_dir
        self._run: Any = None

    def start(self, resume_step: int | None) -> None:
        """Opens a new W&B run, or continues the folder's run from `resume_step`."""
        kept = self._run_dir / "wandb_run_id"
        rewind = resume_step is not None and kept.exists() and self._settings.mode == "online"
        run_id = kept.read_text().strip() if rewind else secrets.token_hex(4)
        kept.write_text(f"{run_id}\n")
        which = {"resume_from": f"{run_id}?_step={resume_step}"} if rewind else {"id": run_id}
        s = self._settings
        name = s.name or self._run_dir.name
        self._run = self._wandb.init(
            project=s.project, entity=s.entity, name=name, mode=s.mode, dir=str(self._run_dir), **which
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            rows = [readable(row) for row in rows]
            columns = list(dict.fromkeys(name for row in rows for name in row))
            cells = [[str(plain(row.get(name, ""))) for name in columns] for row in rows]
            self._run.log({"rollouts": self._wandb.Table(columns=columns, data=cells)}, step=step)

    def text(self, name: str, text: str) -> None:
        self._run.summary[name] = text

    def close(self) -> None:
        self._run.finish()
