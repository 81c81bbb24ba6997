"""Reads rows as people have them: a file, a folder, a Hugging Face dataset or a list, with a prompt and any other columns.

One component serves every algorithm: prompts for reinforcement learning, `prompt` with `completion` or whole `messages` for SFT, and
`chosen` with `rejected` for preferences. Columns are recognised by their usual names and what was recognised is printed.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm import components
from jaxrl_llm.data import conversations, files, preference, templates
from jaxrl_llm.data.prepare import preparation
from jaxrl_llm.experience import Prompt

# The names that are recognised; of several, the earliest in this order is taken.
PROMPTS = ("prompt", "messages", "question", "instruction", "conversations")
RESPONSES = ("completion", "response")
REFERENCES = ("reference", "answer", "ground_truth", "solution", "target")
SIDES = ("chosen", "rejected")
LABEL = "label"

_said: set[str] = set()  # what was recognised is printed once in a process


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The column that holds each field; empty where there is none.

    Attributes:
      prompt: a text or chat messages.
      response: what supervised training imitates.
      reference: the gold answer.
      pairs: whether the rows hold preference pairs.
    """

    prompt: str
    response: str
    reference: str
    pairs: bool


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Reads prompts from a file, a folder, a dataset or a list; every other column reaches the reward in `Prompt.extra`.

    Rows with `chosen` and `rejected` are preference pairs; rows with a response, or with messages whose last one is the assistant's, are
    demonstrations; a column `label` of true or false beside a response marks it as desirable or not.

    Attributes:
      source: a .jsonl, .json, .parquet or .csv file, a folder of such files, a Hugging Face dataset (an id, or a folder that
        `datasets` saved), or a list of mappings.
      split: "train", the name of another split of a folder or dataset, or "heldout": the part of "train" that `heldout_share`
        leaves out of it.
      heldout_share: share of the prompts that "heldout" has and "train" has not, chosen by a hash of the prompt; 0 makes both all rows.
      subset: configuration of a Hugging Face dataset; None for its default.
      prompt: column of the prompt, a text or a list of chat messages; empty recognises prompt, messages, question, instruction and
        conversations.
      response: column of a demonstration; empty recognises completion and response.
      reference: column of the gold answer, which rewards compare with; empty recognises reference, answer, ground_truth, solution and
        target where they hold a text or a number.
      template: name of a prompt template (data/templates.py) or a function, for prompts of one message; "chat" leaves the prompt to
        the tokenizer's chat template and "question_only" takes a text verbatim.
      name: source of the rows in metrics; empty takes a row's data_source, or the name of the file.
      limit: largest number of rows; None for all.
    """

    source: str | Sequence[Any]
    split: str = "train"
    heldout_share: float = 0.0
    subset: str | None = None
    prompt: str = ""
    response: str = ""
    reference: str = ""
    template: str | templates.Template = "chat"
    name: str = ""
    limit: int | None = None
    _label: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        templates.named(self.template, "Rows")
        components.within(self, "[0, 1)", "heldout_share")
        components.at_least(self, 1, "limit")
        if isinstance(self.source, str):
            label = Path(self.source).name.partition(".")[0]
        elif isinstance(self.source, Sequence) and all(isinstance(row, Mapping) for row in self.source):
            label = "rows"
        else:
            kinds = sorted({type(x).__name__ for x in self.source}) if isinstance(self.source, Sequence) else []
            raise ValueError(
                "rows.Rows.source must be a path, a dataset id or a list of mappings such as [{'prompt': '1 + 1 ='}] (got "
                f"{type(self.source).__name__}{f' of {kinds}' if kinds else ''}); several_sources.SeveralSources joins several"
            )
        object.__setattr__(self, "_label", self.name or label or "rows")

    def rows(self) -> Sequence[Prompt]:
        """Returns the prompts of the split, in the order of the source; demonstrations have a `response`, pairs extra["rejected"] too.

        Raises:
          FileNotFoundError: there is nothing at `source`.
          ValueError: the data is malformed; the message names the file and the row, what it has and what is wanted.
          ModuleNotFoundError: `source` is a Hugging Face dataset, and the package `datasets` is not installed.
        """
        found = self._read()
        columns = self._recognised(*found[0])
        prompts = [self._prompt(where, row, columns, number) for number, (where, row) in enumerate(found)]
        return self._part(prompts)

    def _read(self) -> list[files.Located]:
        split = "train" if self.split == "heldout" else self.split
        whole = not isinstance(self.source, str) or Path(self.source).expanduser().is_file()
        if whole and split != "train":
            raise ValueError(
                f"rows.Rows.split={self.split!r}: a file or a list has no splits but 'train' and 'heldout', of which heldout_share says how "
                "the rows are divided; name another file, or a folder with a file for each split"
            )
        if isinstance(self.source, str):
            return files.read(self.source, (), split=split, subset=self.subset, limit=self.limit)
        found = [(f"row {number} of the list", row) for number, row in enumerate(self.source)][: self.limit]
        if not found:
            raise ValueError("rows.Rows.source is an empty list: a data source needs at least one row")
        return found

    def _recognised(self, where: str, row: Mapping[str, Any]) -> Columns:
        """Returns the columns, by their bindings or by the names in the first row."""
        for name in ("prompt", "response", "reference"):
            if (column := getattr(self, name)) and column not in row:
                raise ValueError(f"{where}: rows.Rows.{name}={column!r} names no column; the row has {sorted(row)}")
        pairs = all(row.get(side) is not None for side in SIDES)
        usual = {
            "prompt": [n for n in PROMPTS if row.get(n) is not None],
            "response": [n for n in RESPONSES if row.get(n) is not None and not pairs],
            "reference": [n for n in REFERENCES if isinstance(row.get(n), str | int | float)],
        }
        taken = {name: getattr(self, name) or next(iter(usual[name]), "") for name in usual}
        if taken["reference"] in (taken["response"], taken["prompt"]):
            taken["reference"] = self.reference
        if not taken["prompt"] and not pairs:
            raise ValueError(
                f"{where}: no column is recognised as the prompt; the row has {sorted(row)} and {', '.join(PROMPTS)} are recognised: rename "
                "one, or set rows.Rows.prompt to its name"
            )
        self._say(taken, pairs, row)
        return Columns(**taken, pairs=pairs)

    def _say(self, taken: Mapping[str, str], pairs: bool, row: Mapping[str, Any]) -> None:
        """Prints once which column was taken for what, and which ones only reach the reward."""
        roles = [f"{name} from {column!r}" for name, column in taken.items() if column]
        rest = sorted(set(row) - {*taken.values()} - (set(SIDES) if pairs else set()))
        line = (
            f"rows of {self._label}: {', '.join(roles + (['pairs from chosen and rejected'] if pairs else []))}"
            f"{f'; further columns {rest}' if rest else ''} (rows.Rows.prompt, response and reference name other columns)"
        )
        if line not in _said:
            _said.add(line)
            print(line, flush=True)

    def _prompt(self, where: str, row: Mapping[str, Any], columns: Columns, number: int) -> Prompt:
        read = self._pair if columns.pairs else self._task
        given, asked, response, extra = read(where, row, columns)
        reference = row.get(columns.reference) if columns.reference else None
        if isinstance(reference, Mapping | list):
            raise ValueError(
                f"{where}: column {columns.reference!r} is the reference and must be a text or a number (got {type(reference).__name__}); a "
                "reward function reads it as a column, whatever it holds: set rows.Rows.reference to another column"
            )
        used = {columns.prompt, *(SIDES if columns.pairs else ())}
        return Prompt(
            id=f"{self._label}/{number}",
            reference="" if reference is None else str(reference),
            source=self.name or str(row.get("data_source") or self._label),
            response=response,
            extra={name: value for name, value in row.items() if name not in used} | extra | {"prompt": given},
            **templates.rerendered(self.template, asked, f"{where}: Rows"),
        )

    def _task(
        self, where: str, row: Mapping[str, Any], columns: Columns
    ) -> tuple[Any, Any, str | None, dict[str, Any]]:
        """Returns (the prompt as the row has it, its messages, the response, further fields) of a row without a pair."""
        given = row.get(columns.prompt)
        response: str | None = None
        asked = conversations.messages(given)
        if asked is None:
            raise ValueError(f"{where}: column {columns.prompt!r} must be a text that is not blank, or a list of messages such as "
                             f"[{{'role': 'user', 'content': '...'}}] (got {_short(given)})")  # fmt: skip
        if columns.response and row.get(columns.response) is not None:
            said = conversations.messages(row[columns.response], role="assistant")
            blank = row[columns.response] == ""
            if not blank and (said is None or len(said) != 1 or said[0]["role"] != "assistant"):
                raise ValueError(f"{where}: column {columns.response!r} must be a text, or a list of one message of role 'assistant' (got "
                                 f"{_short(row[columns.response])})")  # fmt: skip
            response = "" if said is None else said[0]["content"]
        elif asked[-1]["role"] == "assistant":
            asked, response = asked[:-1], asked[-1]["content"]
            given = given[:-1] if isinstance(given, list) else asked
        if not asked or asked[-1]["role"] != "user":
            raise ValueError(f"{where}: the messages of column {columns.prompt!r} must have one of role 'user' before the response (got "
                             f"{_short(row[columns.prompt])})")  # fmt: skip
        labelled = response is not None and isinstance(row.get(LABEL), bool)
        return given, asked, response, {"desirable": row[LABEL]} if labelled else {}

    def _pair(
        self, where: str, row: Mapping[str, Any], columns: Columns
    ) -> tuple[Any, Any, str | None, dict[str, Any]]:
        """Returns the same fields of a row with `chosen` and `rejected`."""
        named = {name: value for name, value in row.items() if name not in preference.ASKED}
        given = row.get(columns.prompt) if columns.prompt else None
        try:
            if any(row.get(side) is None for side in SIDES):
                raise preparation.Drop("malformed")
            held = preference.pair({**named, "prompt": given})
        except preparation.Drop as drop:
            raise ValueError(
                f"{where}: no preference pair ({drop}): wanted are a prompt and two different answers, `chosen` and `rejected`, each a text "
                f"or a list of messages that ends with the assistant's (got {_short(dict(row))})"
            ) from drop
        return held.asked if given is None else given, held.asked, held.chosen, {"rejected": held.rejected}

    def _part(self, prompts: list[Prompt]) -> list[Prompt]:
        """Returns the prompts of the split; equal prompts are on the same side."""
        if not self.heldout_share or self.split not in ("train", "heldout"):
            return prompts
        keys = [_key(prompt) for prompt in prompts]
        ranked = sorted(set(keys))
        if len(ranked) < 2:
            raise ValueError(
                f"rows.Rows.heldout_share={self.heldout_share} would hold out one of {len(ranked)} different prompts of {self._label}: give "
                "more, or set it to 0, which learns from and evaluates the same rows"
            )
        held = set(ranked[: min(len(ranked) - 1, max(1, round(self.heldout_share * len(ranked))))])
        return [prompt for prompt, key in zip(prompts, keys) if (key in held) == (self.split == "heldout")]


def _key(prompt: Prompt) -> str:
    """Returns a hash of the prompt's text or messages."""
    asked = json.dumps(prompt.text if prompt.messages is None else list(map(dict, prompt.messages)), sort_keys=True)
    return hashlib.blake2b(asked.encode(), digest_size=8).hexdigest()


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 120 else text[:117] + '...'}"
