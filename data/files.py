"""Reads rows of JSON-lines, JSON, CSV and Parquet files, or of a Hugging Face dataset; errors name the file and the row."""

import csv
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from jaxrl_llm.data.templates import Templated

# (place of the row, its columns)
Located = tuple[str, Mapping[str, Any]]

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv")
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "heldout")
SAVED = ("dataset_dict.json", "dataset_info.json")  # a folder that `datasets` saved has one of these


@dataclass(frozen=True, kw_only=True)
class FileRows(Templated):
    """A dataset of rows in files, as `each` reads them.

    Attributes:
      path: a .jsonl, .json, .parquet or .csv file, a folder of such files, or a Hugging Face dataset id.
      split: part of a folder or dataset.
      subset: configuration of a Hugging Face dataset; None for its default.
      skip: number of rows at the start that are left out, such as those that settings are chosen on.
      limit: largest number of rows after them; None for all.
    """

    path: str
    split: str = "train"
    subset: str | None = None
    skip: int = 0
    limit: int | None = None

    def located(self, *columns: str) -> list[Located]:
        """Returns the rows, which have a value in each of `columns`; raises as `read` does."""
        return read(self.path, columns, split=self.split, subset=self.subset, skip=self.skip, limit=self.limit)


def read(path: str, columns: Sequence[str], **part: Any) -> list[Located]:
    """Returns the rows of `each` as a list of at least one row.

    Raises:
      FileNotFoundError: there is nothing at `path`.
      ValueError: a row is malformed, a column is missing or there are no rows; the message names the file and the row.
      ModuleNotFoundError: `path` is a dataset id, and the package `datasets` is not installed.
    """
    found = list(each(path, columns, **part))
    if not found:
        left = f" after the first {part['skip']}" if part.get("skip") else ""
        raise ValueError(
            f"{path!r} has no rows in split {part.get('split', 'train')!r}{left}: a data source needs at least one"
        )
    return found


def each(
    path: str,
    columns: Sequence[str],
    *,
    split: str = "train",
    subset: str | None = None,
    skip: int = 0,
    limit: int | None = None,
) -> Iterator[Located]:
    """Yields rows of a local file, of the split's files in a local folder, or of a Hugging Face dataset.

    Args:
      path: a file, a folder with `split`.jsonl, another suffix of SUFFIXES, or `split`-*.parquet (in its folder `subset`, where
        it has one), a folder that `datasets` saved, or a dataset id (owner/name). All data files of a folder that names none of SPLITS
        are its split "train".
      columns: columns that every row must have.
      split: part of a folder or dataset.
      subset: configuration of a Hugging Face dataset.
      skip: number of rows at the start that are left out.
      limit: largest number of rows after them; None for all.

    Raises:
      FileNotFoundError: there is nothing at `path`.
      ValueError: a row is malformed or a column is missing; the message names the file and the row.
      ModuleNotFoundError: `path` is a dataset id, and the package `datasets` is not installed.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, or None for all rows (got {limit})")
    if skip < 0:
        raise ValueError(f"skip must be at least 0 (got {skip})")
    for where, row in islice(_rows(path, split, subset), skip, None if limit is None else skip + limit):
        missing = [column for column in columns if row.get(column) is None]
        if missing:
            raise ValueError(
                f"{where}: no value in column {missing[0]!r}; the row has {sorted(row)} "
                f"and the source needs {list(columns)}"
            )
        yield where, row


def _rows(path: str, split: str, subset: str | None) -> Iterator[Located]:
    local = Path(path).expanduser()
    if local.is_dir() and subset and (local / subset).is_dir():
        local = local / subset
    if local.is_dir() and any((local / name).is_file() for name in SAVED):
        return _of_saved(local, split)
    if local.exists():
        files = [local] if local.is_file() else _of_split(local, split)
        return (row for file in files for row in _of_file(file))
    if _looks_like_an_id(path):
        return _of_hub(path, split, subset)
    raise FileNotFoundError(
        f"no data at {path!r}: name a file ({', '.join(SUFFIXES)}), a folder, or a dataset id (owner/name)"
    )


def _of_split(folder: Path, split: str) -> list[Path]:
    for pattern in (*(f"{split}{suffix}" for suffix in SUFFIXES), f"{split}-*.parquet"):
        if files := sorted(folder.glob(pattern)):
            return files
    files = sorted(p for p in folder.iterdir() if p.name.endswith(SUFFIXES))
    if split == "train" and files and not any(p.name.startswith(SPLITS) for p in files):
        return files
    names = sorted(p.name for p in folder.iterdir())
    raise FileNotFoundError(
        f"{folder} has no file for split {split!r} ({', '.join(split + suffix for suffix in SUFFIXES)} "
        f"or {split}-*.parquet); it holds {names[:10]}"
    )


def _of_file(file: Path) -> Iterator[Located]:
    if file.suffix == ".parquet":
        yield from _of_parquet(file)
    elif file.suffix == ".json":
        yield from _of_json(file)
    elif file.suffix == ".csv":
        yield from _of_sheet(file)
    elif file.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _of_lines(file)
    else:
        raise ValueError(f"{file}: unknown kind of data file {file.suffix!r}; {', '.join(SUFFIXES)} are read")


def _of_lines(file: Path) -> Iterator[Located]:
    zipped = file.suffix == ".gz"
    with gzip.open(file, "rt", encoding="utf-8") if zipped else file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{file}:{number}", _mapping(f"{file}:{number}", line)


def _of_json(file: Path) -> Iterator[Located]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: malformed JSON ({error})") from error
    if not isinstance(rows, list):
        raise ValueError(
            f"{file}: a .json file must hold a list of rows (got {type(rows).__name__}); one row a line is .jsonl"
        )
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{file}, row {number}: expected an object with columns (got {type(row).__name__})")
        yield f"{file}, row {number}", row


def _of_sheet(file: Path) -> Iterator[Located]:
    """Yields rows of a CSV file whose first line names the columns; a cell may hold line breaks."""
    with file.open(newline="", encoding="utf-8-sig") as lines:
        for number, row in enumerate(csv.DictReader(lines, restkey="")):
            if "" in row or None in row.values():
                raise ValueError(f"{file}, row {number}: another number of cells than the first line has columns")
            yield f"{file}, row {number}", row


def _mapping(where: str, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: malformed JSON ({error}); each line must be one JSON object") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object with columns (got {type(row).__name__})")
    return row


def _of_parquet(file: Path) -> Iterator[Located]:
    import pyarrow.lib
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        number = 0
        for batch in table.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield f"{file}, row {number}", row
                number += 1
    except pyarrow.lib.ArrowInvalid as error:
        raise ValueError(f"{file}: not a readable Parquet file ({error})") from error


def _looks_like_an_id(path: str) -> bool:
    owner, _, name = path.partition("/")
    return bool(owner and name) and "/" not in name and owner[0] not in ".~" and not path.endswith(SUFFIXES)


def _of_hub(path: str, split: str, subset: str | None) -> Iterator[Located]:
    found = _datasets(f"{path!r} is no local path").load_dataset(path, subset, split=split)
    for number, row in enumerate(found):
        yield f"{path} ({split}), row {number}", row


def _of_saved(folder: Path, split: str) -> Iterator[Located]:
    """Yields the rows of a dataset, or of a split of several, that `datasets` saved."""
    found = _datasets(f"{folder} was saved by `datasets`").load_from_disk(str(folder))
    if isinstance(found, dict):
        if split not in found:
            raise FileNotFoundError(f"{folder} has no split {split!r}; it holds {sorted(found)}")
        found = found[split]
    elif split != "train":
        raise FileNotFoundError(f"{folder} has no split {split!r}: it is one dataset, which is 'train'")
    for number, row in enumerate(found):
        yield f"{folder} ({split}), row {number}", row


def _datasets(why: str) -> Any:
    """Returns the package `datasets`; `why` says what needs it."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{why}, and reading it as a Hugging Face dataset needs the package `datasets`: pip install datasets, or name a "
            "local .jsonl, .json, .parquet or .csv file or a folder of them"
        ) from error
    return datasets
