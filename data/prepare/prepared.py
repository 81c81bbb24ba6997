"""Output of a preparation: writes Parquet files and a note of how they were made, and prints the counts."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def write(out: Path, parts: Mapping[str, Sequence[Row]], about: Row) -> None:
    """Writes `part`.parquet for each part, and prepared.json; files are only replaced once all are written."""
    import pyarrow
    import pyarrow.parquet

    out.mkdir(parents=True, exist_ok=True)
    torn = {out / f".{part}.parquet.torn": out / f"{part}.parquet" for part in parts}
    note = out / ".prepared.json.torn"
    try:
        for file, rows in zip(torn, parts.values()):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
        note.write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        for file, whole in {**torn, note: out / "prepared.json"}.items():
            os.replace(file, whole)
    finally:
        for file in (*torn, note):
            file.unlink(missing_ok=True)


def report(name: str, out: Path, counts: Mapping[str, int]) -> None:
    """Prints the numbers of rows read, written and left out."""
    print(f"{name}: read {counts['read']} rows")
    for label in sorted(counts):
        kind, _, rest = label.partition("/")
        if kind == "written":
            print(f"  {counts[label]:>8} written to {out / rest}.parquet")
        elif kind == "dropped":
            print(f"  {counts[label]:>8} dropped: {rest}")
        elif kind == "unused" and counts[label]:
            print(f"  {counts[label]:>8} beyond the sizes")
        elif kind == "shared":
            print(f"  {counts[label]:>8} questions of {rest} occur in the first part too")
