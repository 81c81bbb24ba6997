"""Runs a preparation on rows written for a test, and reads what it wrote."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet

from jaxrl_llm.data.prepare.preparation import Preparation, main

VERL = ["data_source", "prompt", "ability", "reward_model", "extra_info"]


def source(folder: Path, rows: Sequence[Mapping[str, Any]], name: str = "train") -> Path:
    """The rows as a file of JSON lines."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def run(preparation: Preparation, out: Path, path: Path, *arguments: str) -> dict[str, int]:
    """The counts of a run of the command."""
    return main(preparation, ["--out", str(out), "--source", str(path), *arguments])


def written(out: Path, part: str = "train") -> list[dict[str, Any]]:
    """The rows of a part."""
    return pyarrow.parquet.read_table(out / f"{part}.parquet").to_pylist()


def asked(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The last message of each row's prompt."""
    return [row["prompt"][-1]["content"] for row in rows]


def truths(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The gold answers."""
    return [row["reward_model"]["ground_truth"] for row in rows]
