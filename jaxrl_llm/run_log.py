"""Log records as JSON lines, each with the process and the place in the run that it comes from."""

import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class JsonLines(logging.Handler):
    """Appends {"time", "level", "logger", "rank", "stage", "step", ..., "message"} to a file, on disk when the call returns.

    Args:
      path: the file; earlier starts' lines stay.
      rank: number of this process.
      place: gives further fields of each line, such as stage and step.
    """

    def __init__(self, path: Path, rank: int, place: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__()
        self._path, self._rank, self._place = path, rank, place
        self._before = logging.NOTSET

    def attach(self) -> None:
        """Takes what every logger says, of this package from level INFO on."""
        own = logging.getLogger("jaxrl_llm")
        self._before = own.level
        own.setLevel(logging.INFO)
        logging.getLogger().addHandler(self)

    def detach(self) -> None:
        logging.getLogger().removeHandler(self)
        logging.getLogger("jaxrl_llm").setLevel(self._before)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(self.format(record).encode() + b"\n")
        except Exception:  # a log that cannot be written stops no run: logging says so on standard error
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        """One line of strict JSON."""
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
