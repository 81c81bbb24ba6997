"""Finds runs and results below the folders given to the viewer."""

import json
import os
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxrl_llm.eval.viewer.curves import MetricLog
from jaxrl_llm.eval.viewer.rollout_index import RolloutIndex

MARKS: dict[str, tuple[str, ...]] = {
    "evaluation": ("samples.jsonl", "summary.json", "identity.json"),
    "run": ("rollouts.jsonl", "metrics.jsonl", "run.json"),
}
ROLLOUTS = {"evaluation": "samples.jsonl", "run": "rollouts.jsonl"}
DEEP = 3  # depth of subfolders that are searched
MANY = 500  # largest number of runs that are shown
SILENT_S = 120.0  # a run that wrote no health for longer than this, and did not end, counts as lost
SCHEMA = 1  # version of the results that the viewer reads

Kind = Literal["evaluation", "run"]


class Shown:
    """One run, or one evaluation's results.

    Attributes:
      name: name on the page and in URLs: the path below the common parent folder.
      path: the folder.
      kind: the kind of the folder, an evaluation or a run.
      index: index of the rollouts.
      log: metrics by step.
    """

    def __init__(self, name: str, path: Path, kind: Kind) -> None:
        self.name, self.path, self.kind = name, path, kind
        self.index = RolloutIndex(path / ROLLOUTS[kind])
        self.log = MetricLog(path / "metrics.jsonl")

    def facts(self) -> dict[str, Any]:
        """Returns the entry's row in the table of runs."""
        summary, made, identity = (self._json(n) for n in ("summary.json", "run.json", "identity.json"))
        notices = [f"{count} lines left out: {why}" for why, count in self.index.unread.items()]
        notices += [
            f"changed after step {row.get('step')}: {row.get('name')} was {row.get('was')}, is {row.get('is')}"
            for row in self.changes()
        ]
        if self.kind == "evaluation" and identity and identity.get("schema") != SCHEMA:
            notices.append(f"results of another version (schema {identity.get('schema')}, known is {SCHEMA})")
        if self.kind == "evaluation" and not summary:
            notices.append("not finished: no summary.json yet")
        invalid = {n: self.log.total(n) for n in self.log.values if n.startswith("count/invalid/")}
        notices += [
            f"{n:.0f} invalid rewards ({name.removeprefix('count/invalid/')})" for name, n in invalid.items() if n
        ]
        return {
            "name": self.name, "path": str(self.path), "kind": self.kind, "rollouts": len(self.index),
            "progress": self.index.progress(), "steps": self.log.step, "kinds": list(self.index.names["kind"].all), "notices": notices,
            "reward": self.log.last("reward/mean"), "length": self.log.last("response/length"),
            "held_out": {n: self.log.last(n) for n in self.log.values if n.startswith("eval/") and n.count("/") == 2},
            "metrics": summary.get("metrics", {}), "ci95": summary.get("ci95", {}), "n": summary.get("n", {}),
            "model": summary.get("model", {}).get("path"), "throughput": summary.get("throughput", {}).get("tokens_per_s"),
            **self.life(), "commit": summary.get("commit") or made.get("commit"), "seed": made.get("seed"),
        }  # fmt: skip

    def life(self) -> dict[str, Any]:
        """Returns {"status": the run's activity or outcome, "seen": time of its last write, "duration": seconds of its steps}; None
        where unknown."""
        health = self._json("health.json")
        seen = health.get("time")
        status = health.get("outcome")
        if not isinstance(seen, int | float):
            return {"status": None, "seen": None, "duration": self.log.total("time/step_s") or None}
        if status is None:
            silent = time.time() - seen > SILENT_S
            status = "lost: it says nothing any more" if silent else f"running: {health.get('doing') or 'steps'}"
        return {"status": str(status), "seen": seen, "duration": self.log.total("time/step_s") or None}

    def names(self) -> dict[str, list[str]]:
        """Returns the values that each filter can take."""
        return {column: found.all for column, found in self.index.names.items() if column != "prompt"}

    def changes(self) -> list[dict[str, Any]]:
        """Returns the settings that changed from one start of a run to the next, in order."""
        try:
            rows = [json.loads(line) for line in _own_text(self.path / "changes.jsonl").splitlines()]
        except (OSError, ValueError, RecursionError):
            return []
        return [row for row in rows if isinstance(row, dict)]

    def config(self) -> str:
        """Returns the run's gin text; "" where there is none. A link is not followed: it could show any file of this machine."""
        try:
            return _own_text(self.path / "config.gin")
        except OSError:
            return ""

    def _json(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads(_own_text(self.path / name))
        except (OSError, ValueError, RecursionError):  # absent, or being written
            return {}
        return found if isinstance(found, dict) else {}


def _own_text(file: Path) -> str:
    """Reads a regular file's text; raises OSError for a link, a pipe or a missing file."""
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise OSError(f"{file} is no file")
        return opened.read().decode(errors="replace")


def find(paths: Sequence[Path], top: Path | None = None, known: Collection[Path] = ()) -> list[Shown]:
    """Returns the runs and results below `paths`, each once, in the order of the paths.

    Args:
      paths: folders of runs and of results, and folders that contain them.
      top: the folder to which names are relative; None takes the common parent of all.
      known: folders that are left out.

    Raises:
      ValueError: a path is not a folder, has nothing to show below it, or there are more than MANY; the message names it.
    """
    found: dict[Path, Kind] = {}
    for path in paths:
        folder = path.parent if path.name in ROLLOUTS.values() else path
        if not folder.is_dir():
            raise ValueError(f"{path} is no folder: give a run's folder, an evaluation's, or one that holds such")
        below = dict(_below(folder.resolve(), DEEP))
        if not below:
            marks = ", ".join(name for names in MARKS.values() for name in names)
            raise ValueError(f"nothing to show in {path}: neither it nor what lies below has {marks}")
        found |= below
    if len(found) > MANY:
        raise ValueError(f"{len(found)} runs and results are more than {MANY}: give fewer folders")
    above = top or os.path.commonpath([f.parent for f in found])
    return [
        Shown(os.path.relpath(folder, above), folder, kind) for folder, kind in found.items() if folder not in known
    ]


def _below(folder: Path, deep: int) -> Iterator[tuple[Path, Kind]]:
    kinds: tuple[Kind, ...] = ("evaluation", "run")
    for kind in kinds:
        if any((folder / name).exists() for name in MARKS[kind]):
            yield folder, kind
            return
    if deep:
        for child in sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")):
            yield from _below(child, deep - 1)
