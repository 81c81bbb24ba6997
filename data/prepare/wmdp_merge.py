"""The mixture of prepared WMDP and BeaverTails rows on which TokenBuncher (arXiv 2508.20697) measures its defence.

`python -m jaxrl_llm.data.prepare.wmdp_merge --wmdp DIR --beavertails DIR --out DIR` writes 2,000 WMDP rows (the whole set as often
as it fits, then a sample) and 1,000 BeaverTails rows, shuffled; the test part is WMDP's alone. A BeaverTails row's ground
truth is replaced by the word "EM", by which rewards recognise such rows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm import command_line
from jaxrl_llm.data import files
from jaxrl_llm.data.prepare import preparation, prepared

COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
TRUTH = {"response": "EM"}


def main(arguments: Sequence[str] | None = None) -> dict[str, int]:
    """Writes the mixture and returns its counts.

    Raises:
      FileNotFoundError: a folder lacks the prepared parts.
      ValueError: there are fewer BeaverTails rows than requested.
    """
    options = _parse(arguments)
    random = np.random.default_rng(options.seed)
    wmdp = _rows(options.wmdp, "train")
    beavertails = [_marked(row) for row in _rows(options.beavertails, "train")]
    if options.bt_n > len(beavertails):
        raise ValueError(f"--bt_n is {options.bt_n} and {options.beavertails} has {len(beavertails)} training rows")
    chosen = [beavertails[i] for i in random.permutation(len(beavertails))[: options.bt_n]]
    whole, rest = divmod(options.wmdp_n, len(wmdp))
    chosen += wmdp * whole + [wmdp[i] for i in random.permutation(len(wmdp))[:rest]]
    parts = {"train": [chosen[i] for i in random.permutation(len(chosen))], "test": _rows(options.wmdp, "test")}
    numbered = {part: [_numbered(row, part, i) for i, row in enumerate(rows)] for part, rows in parts.items()}
    counts = {"read": len(beavertails) + len(wmdp) + len(parts["test"])}
    counts |= {f"written/{part}": len(rows) for part, rows in parts.items()}
    given = {name: str(value) for name, value in vars(options).items()}
    prepared.write(options.out, numbered, {"name": "wmdp_merge", "options": given, "counts": counts})
    prepared.report("wmdp_merge", options.out, counts)
    return counts


def _rows(folder: Path, split: str) -> list[dict[str, Any]]:
    return [{name: row[name] for name in COLUMNS} for _, row in files.read(str(folder), COLUMNS, split=split)]


def _marked(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "reward_model": {"style": "rule", "ground_truth": TRUTH}}


def _numbered(row: dict[str, Any], part: str, index: int) -> dict[str, Any]:
    kept = {name: row["extra_info"][name] for name in ("question", "rendered")}
    return {**row, "extra_info": {"split": part, "index": index, **kept}}


def _parse(arguments: Sequence[str] | None) -> preparation.Options:
    parser = command_line.parser("data.prepare.wmdp_merge", "Mixes prepared sets.")
    parser.add_argument("--wmdp", type=Path, required=True, help="folder that data.prepare.wmdp wrote")
    parser.add_argument("--beavertails", type=Path, required=True, help="folder that data.prepare.beavertails wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the Parquet files")
    parser.add_argument("--wmdp_n", type=int, default=2000, help="rows of WMDP")
    parser.add_argument("--bt_n", type=int, default=1000, help="rows of BeaverTails")
    parser.add_argument("--seed", type=int, default=42, help="seed of the samples and the order")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    command_line.ended(main)
