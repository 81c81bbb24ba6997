"""Open-ended instructions, and the outputs file that AlpacaEval's judges read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.data.files import FileRows
from jaxrl_llm.eval.answered import Answered, mean
from jaxrl_llm.eval.questions import required
from jaxrl_llm.eval.results import write_whole
from jaxrl_llm.experience import Prompt


@dataclass(frozen=True, kw_only=True)
class Instructions(FileRows):
    """Reads instructions without a gold answer; of a dialogue of several turns, the first is used.

    Attributes:
      name: name of the source, and prefix of the ids of rows without an id.
      column: columns that may hold the instruction; the first one that a row has is used.
      id: columns that may hold the prompt's id.
      category: columns that may hold the category, by which metrics can be split.
      context: column of a text that is put before the instruction, where the row has one; empty for none.
    """

    name: str = "instructions"
    split: str = "test"
    column: Sequence[str] = ("instruction", "prompt", "question", "turns")
    id: Sequence[str] = ("id", "question_id")
    category: Sequence[str] = ("category",)
    context: str = ""

    def rows(self) -> Sequence[Prompt]:
        """Returns all prompts.

        Raises:
          FileNotFoundError: there is nothing at `path`.
          ValueError: a row has no instruction; the message names the file and the row.
        """
        return [self._prompt(number, where, row) for number, (where, row) in enumerate(self.located())]

    def _prompt(self, number: int, where: str, row: Mapping[str, Any]) -> Prompt:
        asked = required(where, row, self.column, "Instructions.column")
        asked = str(asked[0] if isinstance(asked, list) else asked)
        if extra_input := _input(row):
            asked = f"{asked}\n\n{extra_input}"
        if self.context and str(row.get(self.context) or "").strip():
            asked = f"{row[self.context]}\n\n---\n\n{asked}"
        name = next((str(row[c]) for c in self.id if row.get(c) is not None), f"{self.name}/{number}")
        extra = {
            "instruction": asked,
            "category": next((str(row[c]) for c in self.category if row.get(c)), ""),
            "dataset": row.get("dataset") or self.name,
        }
        return Prompt(id=name, source=self.name, extra=extra, **self.asked(asked))


def _input(row: Mapping[str, Any]) -> str:
    """The input that accompanies an instruction, where the row has one: {"input"}, or {"instances": [{"input"}]}."""
    instances = row.get("instances")
    given = instances[0].get("input") if instances else row.get("input")
    return str(given or "").strip()


@dataclass(frozen=True, kw_only=True)
class AlpacaOutputs:
    """Writes model_outputs.json, an array of {instruction, output, generator, dataset}: the input of AlpacaEval's judges.

    Attributes:
      generator: name of the model in the file; empty takes its path.
    """

    generator: str = ""

    def measure(self, answered: Sequence[Answered]) -> Mapping[str, np.ndarray]:
        """Returns "characters", the mean length of outputs, for which the length-controlled win rate corrects."""
        return {"characters": np.array([mean([float(len(r["response"])) for r in one.main]) for one in answered])}

    def report(self, answered: Sequence[Answered], folder: Path, model: str) -> Mapping[str, Any]:
        """Writes the file: one output an instruction, the greedy one or else the first sampled one."""
        rows = [
            {
                "instruction": one.prompt.extra["instruction"],
                "output": one.main[0]["response"],
                "generator": self.generator or model,
                "dataset": one.prompt.extra["dataset"],
            }
            for one in answered
        ]
        write_whole(folder / "model_outputs.json", json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
        return {"model_outputs": "model_outputs.json"}
