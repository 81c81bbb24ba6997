"""Writes the folder of a run or an evaluation: what reproduces it (gin text, seed, version, commit, devices) and its log.

Its files survive a full disk and a kill: a file is replaced as a whole (`replace_text`), or grows by whole lines (`append_lines`).
"""

import contextlib
import io
import json
import logging
import os
import subprocess
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

import jaxrl_llm


def writable(run_dir: Path, macro: str = "RUN_DIR") -> Path:
    """Creates the run's folder if it is missing; raises OSError that names the `macro` to set where it cannot be written."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise OSError(
            f"the run folder {run_dir} cannot be written ({error.strerror}): set {macro} to a folder that can"
        ) from error
    return run_dir


def replace_text(path: Path, text: str) -> None:
    """Replaces a file's text atomically; where the new text cannot be written (OSError), the file keeps the old one."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.write_text(text)
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def append_lines(path: Path, lines: str) -> None:
    """Appends lines to a file that holds only complete lines.

    An incomplete line of a killed process is cut off first, and lines that cannot be written completely are removed again, so that no
    incomplete line stays, neither at the end nor, after later lines, inside.

    Raises:
      OSError: the lines cannot be written; the file is unchanged.
    """
    with path.open("a+b", buffering=0) as file:
        end = _whole(file)
        left = memoryview(lines.encode())
        try:
            while left:
                left = left[file.write(left) :]
        except BaseException:
            with contextlib.suppress(OSError):  # only a regular file can be cut
                file.truncate(end)
            raise


def _whole(file: io.FileIO) -> int:
    """Cuts off what follows a file's last line break; returns the remaining size in bytes."""
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            size = file.truncate(file.readall().rfind(b"\n") + 1)
    return size


def provenance(run_dir: Path, seed: int, config: str) -> None:
    """Writes what reproduces the run: gin text, seed, version and commit; an earlier configuration that differs is kept as config.N.gin."""
    file = run_dir / "config.gin"
    if config and file.is_file() and file.read_text() != config:
        file.rename(run_dir / f"config.{len(list(run_dir.glob('config.*.gin')))}.gin")
    if config:
        replace_text(file, config)
    facts = {
        "seed": seed,
        "version": jaxrl_llm.__version__,
        "commit": commit(),
        "jax": jax.__version__,
        "devices": [str(d) for d in jax.devices()],
        "kind": jax.devices()[0].device_kind,
    }
    replace_text(run_dir / "run.json", json.dumps(facts, indent=2) + "\n")


def commit() -> str | None:
    """Returns the commit of the code, with "+changes" where tracked files differ from it; None outside a git checkout."""
    here = Path(__file__).resolve().parent
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        changed = _git(here, "status", "--porcelain", "--untracked-files=no")
        return _git(here, "rev-parse", "HEAD") + ("+changes" if changed else "")
    return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


class JsonLines(logging.Handler):
    """Appends {"time", "level", "logger", "rank", "stage", "step", ..., "message"} to a file, completely or not at all.

    Args:
      path: the file; lines of earlier starts stay.
      rank: number of this process.
      place: returns further fields of each line, such as stage and step.
    """

    def __init__(self, path: Path, rank: int, place: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__()
        self._path, self._rank, self._place = path, rank, place
        self._before = self._shown = logging.NOTSET
        self._others: list[logging.Handler] = []

    def attach(self) -> None:
        """Starts to log every logger's records, this package's from level INFO on; other handlers get the same records as before."""
        own = logging.getLogger("jaxrl_llm")
        self._before, self._shown, self._others = own.level, own.getEffectiveLevel(), list(logging.getLogger().handlers)
        for handler in self._others:
            handler.addFilter(self._got_before)
        own.setLevel(logging.INFO)
        logging.getLogger().addHandler(self)

    def detach(self) -> None:
        logging.getLogger().removeHandler(self)
        logging.getLogger("jaxrl_llm").setLevel(self._before)
        for handler in self._others:
            handler.removeFilter(self._got_before)

    def _got_before(self, record: logging.LogRecord) -> bool:
        """Returns whether a handler got the record before the level of this package's loggers was lowered."""
        return record.levelno >= self._shown or not record.name.startswith("jaxrl_llm")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            append_lines(self._path, self.format(record) + "\n")
        except Exception:  # a failed write must not stop the run: logging reports it on standard error
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record as one line of strict JSON."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "rank": self._rank,
            **self._place(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = logging.Formatter().formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)
