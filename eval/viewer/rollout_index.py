"""Index of a file of rollouts: the place of each line and the values that filters use; texts stay on disk.

A line is a row of rollouts.jsonl (metrics/rollout_rows.py) or a record of samples.jsonl (eval/answered.py). For each line, the index
holds some numbers and a signature of the text: a bit for each hash of three successive bytes, in lower case. A search reads only lines
whose signature has all bits of the searched text; long texts fill their signatures, so that more lines are read in vain.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 1 << 22  # bytes per read
SIGNATURE = 4096  # bits of a line's signature
STREAMS = b', "streams": {'
EVALUATION = ("id", "kind", "sample", "response", "score", "scores")
RUN = ("step", "prompt", "response", "reward")

Row = dict[str, Any]


class Names:
    """Numbers strings in order of appearance."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.all)
            self.all.append(name)
        return self._numbers[name]

    def find(self, name: str) -> int:
        """Returns the number of a name; -1 where it never appeared."""
        return self._numbers.get(name, -1)


# "head" is the length of a line without its token stats; the columns of NAMED hold numbers of names.
COLUMNS: Mapping[str, Any] = {
    "offset": np.int64, "head": np.int32, "size": np.int32, "step": np.int32, "group": np.int32, "prompt": np.int32,
    "kind": np.int16, "role": np.int16, "finish": np.int16, "source": np.int16, "reward": np.float64, "tokens": np.int32,
}  # fmt: skip
NAMED = ("prompt", "kind", "role", "finish", "source")


class RolloutIndex:
    """The index of one file; `update` reads the file's new lines in a thread of its own.

    Attributes:
      columns: {name of COLUMNS: one number per line}; replaced at once, so that a reader who takes it once sees complete rows.
      names: {name of NAMED: its strings}.
      signatures: uint8 [at least the number of lines, SIGNATURE / 8].
      unread: number of lines that are not rollouts, by error.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._clear()

    def _clear(self) -> None:
        self.columns = {name: np.zeros(0, dtype) for name, dtype in COLUMNS.items()}
        self.names = {name: Names() for name in NAMED}
        self.signatures = np.zeros((0, SIGNATURE // 8), np.uint8)
        self.unread: dict[str, int] = {}
        self._groups: dict[tuple[Any, ...], int] = {}
        self._end, self._inode = 0, -1

    def __len__(self) -> int:
        return len(self.columns["offset"])

    # -- building ------------------------------------------------------------------------------------------------------

    def progress(self) -> float:
        """Returns the share of the file that is indexed, 0 to 1."""
        size = self._status()[0]
        return min(self._end / size, 1.0) if size else 1.0

    def update(self) -> Iterator[int]:
        """Indexes new lines chunk by chunk; an incomplete last line waits for its end.

        Yields:
          the number of lines indexed so far.
        """
        size, inode = self._status()
        if inode != self._inode or size < self._end:  # the file was replaced, for example by a resumed run
            self._clear()
            self._inode = inode
        if size <= self._end:
            return
        with self.file.open("rb") as file:
            file.seek(self._end)
            while lines := _whole_lines(file):
                self._add(lines)
                yield len(self)

    def _status(self) -> tuple[int, int]:
        """Returns size and inode of the file; (0, -1) where there is none."""
        with contextlib.suppress(FileNotFoundError):
            found = self.file.stat()
            return found.st_size, found.st_ino
        return 0, -1

    def _add(self, lines: Sequence[bytes]) -> None:
        found: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        heads, offset, unread = [], self._end, dict(self.unread)
        for line in lines:
            size = head_size(line)
            try:
                numbers = self._numbers(normal(json.loads(closed(line[:size]))))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                no_json = isinstance(error, json.JSONDecodeError | RecursionError)
                why = "no JSON" if no_json else str(error.args[0])
                unread[why] = unread.get(why, 0) + 1
            else:
                for name, value in {**numbers, "offset": offset, "head": size, "size": len(line)}.items():
                    found[name].append(value)
                heads.append(line[:size].lower())
            offset += len(line)
        count = len(self)
        if (needed := count + len(heads)) > len(self.signatures):
            room = np.zeros((max(needed, 2 * count), SIGNATURE // 8), np.uint8)
            room[:count] = self.signatures[:count]
            self.signatures = room
        self.signatures[count:needed] = signatures(heads)
        self.columns = {n: np.concatenate([self.columns[n], np.array(found[n], t)]) for n, t in COLUMNS.items()}
        self.unread, self._end = unread, offset

    def _numbers(self, row: Row) -> dict[str, Any]:
        """Returns the numbers that the index keeps of a row."""
        found: dict[str, Any] = {"step": int(row["step"]), "tokens": int(row["tokens"])}
        found["reward"] = float("nan") if row["reward"] is None else float(row["reward"])
        found |= {n: self.names[n].number(str(row[n])) for n in NAMED}
        key = (found["step"], found["prompt"], found["kind"], row["group"])
        found["group"] = self._groups.setdefault(key, len(self._groups))
        return found

    # -- reading -------------------------------------------------------------------------------------------------------

    def rows(self, numbers: Sequence[int], *, streams: bool = False) -> list[Row]:
        """Returns some rows, normalised; raises LookupError where the file was replaced meanwhile."""
        with self._open() as file:
            return [self._parse(self._bytes(file.fileno(), n, "size" if streams else "head"), n) for n in numbers]

    def _open(self) -> Any:
        try:
            return self.file.open("rb")
        except FileNotFoundError as error:
            raise LookupError(f"{self.file} is gone") from error

    def _bytes(self, descriptor: int, number: int, column: str) -> bytes:
        """Returns a line for the column "size", or its head, without the token stats, for the column "head"."""
        return os.pread(descriptor, int(self.columns[column][number]), int(self.columns["offset"][number]))

    def _parse(self, text: bytes, number: int) -> Row:
        try:
            return {"number": number, **normal(json.loads(closed(text)))}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise LookupError(f"{self.file} changed while it was read: reload the page") from error

    def search(self, among: np.ndarray, text: str, seconds: float, enough: int) -> tuple[list[int], int]:
        """Searches rows of `among`, in order, for `text` in question, response, reference or prompt id, ignoring ASCII case.

        Args:
          among: int [M] row numbers.
          text: the searched text.
          seconds: time after which the search stops.
          enough: number of found rows after which it stops.

        Returns:
          the rows found, and the number of `among` that were decided, M where the search is complete.
        """
        sought = json.dumps(text, ensure_ascii=False)[1:-1].encode().lower()
        places = np.arange(len(among))
        for bit in np.unique(_hashes(np.frombuffer(sought, np.uint8))).tolist():
            byte = self.signatures[among[places], bit // 8]
            places = places[(byte >> (7 - bit % 8)) & 1 == 1]
        found: list[int] = []
        stop = time.perf_counter() + seconds
        with self._open() as file:
            for place in places.tolist():
                if time.perf_counter() > stop or len(found) >= enough:
                    return found, place
                number = int(among[place])
                head = self._bytes(file.fileno(), number, "head")
                if sought in head.lower() and _holds(self._parse(head, number), text):
                    found.append(number)
        return found, len(among)


def head_size(line: bytes) -> int:
    """Returns the place in a line where its token stats, its last entry, begin; the line's length where it has none."""
    cut = line.find(STREAMS)  # STREAMS never occurs inside a string, where quotes are escaped
    return len(line) if cut < 0 else cut


def closed(text: bytes) -> bytes:
    """Returns a line, or its head, as complete JSON."""
    return text if text.endswith(b"\n") else text + b"}"


def normal(row: Row) -> Row:
    """Returns a line with the field names of a run's rows.

    Raises:
      KeyError: the line lacks required fields; the message names them.
    """
    if "id" in row and "sample" in row:
        if missing := [name for name in EVALUATION if name not in row]:
            raise KeyError(f"no {', '.join(missing)}: results of another version")
        return {
            "step": 0, "prompt": row["id"], "kind": "results", "role": row["kind"], "question": row.get("prompt", ""), "group": 0,
            "response": row["response"], "reference": row.get("reference", ""), "source": row.get("source", ""),
            "reward": row["score"], "finish": row.get("finish", ""), "tokens": row.get("tokens", 0), "parts": row["scores"],
            "answer": row.get("answer"), "sample": row["sample"], "streams": row.get("streams"),
        }  # fmt: skip
    if missing := [name for name in RUN if name not in row]:
        raise KeyError(f"no {', '.join(missing)}: a file of another version")
    empty = {
        "kind": "train",
        "role": "sample",
        "question": "",
        "reference": "",
        "source": "",
        "finish": "",
        "tokens": 0,
    }
    return {**empty, "group": 0, "parts": {}, "streams": None, **row}


def signatures(texts: Sequence[bytes]) -> np.ndarray:
    """Computes the signatures of all texts, uint8 [N, SIGNATURE / 8]."""
    bits = np.zeros((len(texts), SIGNATURE), bool)
    if texts:
        hashes = _hashes(np.frombuffer(b"".join(texts) + b"  ", np.uint8))  # hashes across two texts do no harm
        bits[np.repeat(np.arange(len(texts)), [len(t) for t in texts]), hashes] = True
    return np.packbits(bits, axis=1)


def _hashes(text: np.ndarray) -> np.ndarray:
    """Returns a number below SIGNATURE for each three successive bytes; none for fewer than three."""
    if len(text) < 3:
        return np.zeros(0, np.int64)
    a, b, c = (text[i : len(text) - 2 + i].astype(np.uint32) for i in range(3))
    return ((a * 0x9E3779B1 + b * 0x85EBCA6B + c * 0xC2B2AE35) >> 16) % SIGNATURE


def _whole_lines(file: Any) -> list[bytes]:
    """Returns the next lines of about CHUNK bytes; none where no line ends."""
    lines = file.readlines(CHUNK)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    return lines


def _holds(row: Row, text: str) -> bool:
    """Returns whether a text of the row contains `text`, ignoring the case of ASCII letters."""
    sought = text.encode().lower()
    return any(sought in str(row[n]).encode().lower() for n in ("response", "question", "reference", "prompt"))
