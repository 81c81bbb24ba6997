"""The results folder of an evaluation: records by line, in complete groups, and the one configuration to which they belong."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.eval.answered import Record

SAMPLES = "samples.jsonl"
IDENTITY = "identity.json"

Key = tuple[str, str]  # prompt id, kind
_SHOWN = 120  # characters of a difference that a message contains


def same_configuration(folder: Path, identity: Mapping[str, Any]) -> None:
    """Writes the configuration of the folder's results, or compares it with the stored one.

    Raises:
      ValueError: the folder holds results of another configuration; nothing is changed.
    """
    file, samples = folder / IDENTITY, folder / SAMPLES
    empty = not samples.exists() or not samples.stat().st_size
    if empty or not file.exists():
        if not empty:
            raise ValueError(f"{folder} holds {SAMPLES} without {IDENTITY}, from another version: set OUT_DIR")
        write_whole(file, json.dumps(identity, indent=2) + "\n")
        return
    before = json.loads(file.read_text())
    differing = [
        f"{n} was {{}}, is {{}}".format(*apart(str(before.get(n)), str(identity.get(n))))
        for n in sorted({*before, *identity})
        if before.get(n) != identity.get(n)
    ]
    if differing:
        raise ValueError(
            f"{folder} holds results of another configuration ({'; '.join(differing)}): set OUT_DIR to a new folder, or "
            "restore what changed"
        )


def described(component: Any) -> str:
    """Returns a component's repr without details on which results do not depend: memory addresses and the access to a service.

    A judge may move to another address or get more time.
    """
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(component))
    return re.sub(r"\bService\(urls=.*?, stop_after=\d+\)", "Service", text)


def apart(before: str, now: str) -> tuple[str, str]:
    """Returns the differing part of each text, cut to a readable length."""
    if max(len(before), len(now)) <= _SHOWN:
        return before, now
    same = next((i for i, (a, b) in enumerate(zip(before, now)) if a != b), min(len(before), len(now)))
    start = max(same - _SHOWN // 4, 0)
    one, two = (("..." if start else "") + text[start : start + _SHOWN] for text in (before, now))
    return one, two


class Results:
    """The records in RESULTS/samples.jsonl.

    A group, the responses of one kind to one prompt, is written in one piece. Opening the file removes incomplete groups and a last
    line that was cut off.

    Args:
      folder: the evaluation's folder.
      wanted: {(prompt id, kind): number of responses}; records of other groups are removed as well.

    Raises:
      ValueError: a line before the last is not a record.
    """

    def __init__(self, folder: Path, wanted: Mapping[Key, int]) -> None:
        self.file = folder / SAMPLES
        found: dict[Key, dict[int, Record]] = {}
        lines = self.file.read_bytes().splitlines() if self.file.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                found.setdefault((record["id"], record["kind"]), {}).setdefault(record["sample"], record)
            except (ValueError, KeyError, TypeError) as error:
                if number < len(lines):
                    raise ValueError(f"{self.file}:{number} is no record ({error!r}): move the file away") from error
        self.groups: dict[Key, list[Record]] = {
            key: [group[i] for i in range(wanted[key])]
            for key, group in found.items()
            if set(group) == set(range(wanted.get(key, 0)))
        }
        kept = sum(map(len, self.groups.values()))
        if kept < len(lines) or not self.file.exists():
            self.rewrite()

    def add(self, group: Sequence[Record]) -> None:
        """Appends a complete group."""
        self.groups[group[0]["id"], group[0]["kind"]] = list(group)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(_lines(group))

    def rewrite(self) -> None:
        """Writes all groups again; the file is complete at all times."""
        write_whole(self.file, "".join(map(_lines, self.groups.values())))


def write_whole(file: Path, text: str) -> None:
    """Writes a file atomically: it appears complete or not at all."""
    draft = file.with_name(f".{file.name}.part")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, file)


def _lines(group: Sequence[Record]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in group)
