"""Reads rows in verl's schema (data_source, prompt, reward_model, extra_info) unchanged, from one file or a mixture.

The prompt column holds chat messages or a text. Messages go through the tokenizer's chat template unless the row says
that a text template has written them already (extra_info.rendered, which the preparation commands set).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm.data import conversations, files, templates
from jaxrl_llm.experience import Prompt


@dataclass(frozen=True, kw_only=True)
class ParquetRows:
    """Reads prompts of one or several files; each row's further columns are its `extra`.

    `extra` holds the other columns and, on the same level, the fields of reward_model and of extra_info.

    Attributes:
      path: a .parquet, .jsonl or .json file, a folder with a file for each split, or a Hugging Face dataset id; a list
        of these gives a mixture of their rows.
      weights: how often the rows of each path occur; empty means 1 each, 2 means twice, 0.5 a half drawn by the seed.
      split: part of a folder or dataset.
      reference: place of the gold answer, as fields joined by dots; empty for rows without one.
      response: place of a demonstration, in the same form; empty for none.
      source: source of all rows; empty takes the column data_source.
      template: name of a prompt template (data/templates.py) or a function, for prompts of one message; "chat" keeps
        messages unchanged and "question_only" takes a rendered prompt verbatim.
      limit: largest number of rows of each path; None for all.
      seed: seed of the choice of rows for fractional weights.
    """

    path: str | Sequence[str]
    weights: Sequence[float] = ()
    split: str = "train"
    reference: str = "reward_model.ground_truth"
    response: str = ""
    source: str = ""
    template: str | templates.Template = "chat"
    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        templates.named(self.template, "ParquetRows")
        if not self.paths:
            raise ValueError("ParquetRows.path is empty: name a file, a folder or a dataset, or a list of such")
        if self.weights and (len(self.weights) != len(self.paths) or min(self.weights) <= 0):
            raise ValueError(
                f"ParquetRows.weights must be one number above 0 for each of {len(self.paths)} paths (got "
                f"{list(self.weights)})"
            )

    @property
    def paths(self) -> Sequence[str]:
        """The paths as a sequence."""
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)

    def rows(self) -> Sequence[Prompt]:
        """Returns all prompts, path by path.

        Raises:
          FileNotFoundError: there is nothing at a path.
          ValueError: the data is malformed; the message names the file and the row.
        """
        prompts: list[Prompt] = []
        for number, path in enumerate(self.paths):
            needed = ["prompt"] if self.source else ["prompt", "data_source"]
            found = files.read(path, needed, split=self.split, limit=self.limit)
            weight = self.weights[number] if self.weights else 1.0
            for where, row in self._weighted(found, weight, number):
                prompts.append(self._prompt(where, row, len(prompts)))
        return prompts

    def _weighted(self, found: list[files.Located], weight: float, number: int) -> list[files.Located]:
        whole, fraction = divmod(weight, 1.0)
        order = np.random.default_rng([self.seed, number]).permutation(len(found))
        part = sorted(order[: round(fraction * len(found))])
        return found * int(whole) + [found[i] for i in part]

    def _prompt(self, where: str, row: Mapping[str, Any], number: int) -> Prompt:
        source = self.source or str(row["data_source"])
        response = self._at(where, row, "response", self.response) if self.response else None
        return Prompt(
            id=f"{source}/{self.split}/{number}",
            reference=(self._at(where, row, "reference", self.reference) or "") if self.reference else "",
            source=source,
            response=response,
            extra=_flat(row),
            **self._asked(where, row),
        )

    def _asked(self, where: str, row: Mapping[str, Any]) -> dict[str, Any]:
        turns = conversations.messages(row["prompt"])
        if turns is None:
            raise ValueError(
                f"{where}: column 'prompt' must hold chat messages with 'role' and 'content', or a text (got "
                f"{type(row['prompt']).__name__})"
            )
        if (row.get("extra_info") or {}).get("rendered"):
            return {"text": turns[0]["content"]}
        return templates.rerendered(self.template, turns, f"{where}: ParquetRows")

    def _at(self, where: str, row: Mapping[str, Any], binding: str, place: str) -> str | None:
        value: Any = row
        for name in place.split("."):
            if not isinstance(value, Mapping) or name not in value:
                held = sorted(value) if isinstance(value, Mapping) else type(value).__name__
                raise ValueError(
                    f"{where}: nothing at {place!r} ({name!r} is not in {held}): set ParquetRows.{binding} to where the "
                    "rows have it, or to '' for rows without one"
                )
            value = value[name]
        if isinstance(value, Mapping | list):
            inside = f"; it has {sorted(value)}" if isinstance(value, Mapping) else ""
            raise ValueError(
                f"{where}: {place!r} is no single value but a {type(value).__name__}{inside}: set "
                f"ParquetRows.{binding} to one of its fields, such as {place}.target"
            )
        return None if value is None else str(value)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns that no other field of a Prompt holds, with nested fields on the same level."""
    nested = ("reward_model", "extra_info")
    flat = {name: value for name, value in row.items() if name not in ("prompt", "data_source", *nested)}
    for name in nested:
        flat |= row.get(name) or {}
    return flat
