"""Open-ended instructions, and the outputs file that AlpacaEval's judges read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.data.files import FileRows
from jaxrl_llm.eval.answered import Answered, mean, value
from jaxrl_llm.eval.questions import required
from jaxrl_llm.eval.results import write_whole
from jaxrl_llm.experience import Prompt

RIDGE = 1e-3  # keeps the fit of a win rate finite where all comparisons are won or lost


@dataclass(frozen=True, kw_only=True)
class Instructions(FileRows):
    """Reads instructions without a gold answer; of a dialogue with several turns, it uses the first.

    Attributes:
      name: name of the source, and prefix of the ids of rows without an id.
      column: columns that may hold the instruction; the first one that a row has is used.
      id: columns that may hold the prompt's id.
      category: columns that may hold the category, by which metrics are split.
      context: column of a text that precedes the instruction, where the row has one; empty for none.
      reference: columns that may hold another model's output, with which a judge compares; empty for none.
      keep: further columns that go into `extra` of the prompts, such as the paraphrases for `asking.Paraphrases`.
    """

    name: str = "instructions"
    split: str = "test"
    column: Sequence[str] = ("instruction", "prompt", "question", "turns")
    id: Sequence[str] = ("id", "question_id")
    category: Sequence[str] = ("category",)
    context: str = ""
    reference: Sequence[str] = ()
    keep: Sequence[str] = ()

    def rows(self) -> Sequence[Prompt]:
        """Returns all prompts.

        Raises:
          FileNotFoundError: there is nothing at `path`.
          ValueError: a row has no instruction, no reference or no column to keep; the message names the file and the row.
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
        extra |= {column: required(where, row, (column,), "Instructions.keep") for column in self.keep}
        other = str(required(where, row, self.reference, "Instructions.reference")) if self.reference else ""
        return Prompt(id=name, source=self.name, reference=other, extra=extra, **self.asked(asked))


def _input(row: Mapping[str, Any]) -> str:
    """Returns the input of an instruction, where the row has one: {"input"}, or {"instances": [{"input"}]}; "" where it has none."""
    instances = row.get("instances")
    given = instances[0].get("input") if instances else row.get("input")
    return str(given or "").strip()


@dataclass(frozen=True, kw_only=True)
class WinRate:
    """Measures "win_rate", the percentage of answers that a judge prefers to the reference, where a tie counts half (rewards/preferred.py).

    "win_rate_at_equal_length" estimates it at equal lengths by a logistic regression on tanh of the difference of lengths in standard
    deviations; AlpacaEval's length-controlled rate adds a term for each instruction, which was fitted to other models' results.

    Attributes:
      part: the reward's part that is 1 for a win.
    """

    part: str = "preferred"

    def measure(self, answered: Sequence[Answered]) -> Mapping[str, np.ndarray]:
        """Returns the win rate per prompt, over its greedy responses or else its sampled ones, and the rate at equal length as a scalar."""
        rates, longer = [], []
        for one in answered:
            rates.append(mean([value(record, self.part) for record in one.main]))
            longer.append(mean([float(len(record["response"]) - len(one.prompt.reference)) for record in one.main]))
        won, more = np.array(rates, np.float64), np.array(longer, np.float64)
        return {"win_rate": 100 * won, "win_rate_at_equal_length": np.array(100 * at_equal_length(won, more))}


def at_equal_length(won: np.ndarray, longer: np.ndarray) -> float:
    """Estimates the win rate at equal lengths, sigmoid(a) of won ~ sigmoid(a + b tanh(longer / std)), with a small penalty on a and b.

    Args:
      won: share of wins of each prompt [N]; NaN where it is unknown.
      longer: number of characters by which the response is longer than the reference [N].
    """
    known = ~np.isnan(won)
    if not known.any():
        return float("nan")
    spread = longer[known].std()
    features = np.stack([np.ones(known.sum()), np.tanh(longer[known] / spread) if spread else np.zeros(known.sum())])
    weights = np.zeros(2)
    for _ in range(50):  # Newton's method
        p = 1 / (1 + np.exp(-weights @ features))
        slope = features @ (won[known] - p) - RIDGE * weights
        weights += np.linalg.solve((features * (p * (1 - p))) @ features.T + RIDGE * np.eye(2), slope)
    return float(1 / (1 + np.exp(-weights[0])))


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
        """Writes the file: one output per instruction, the greedy one or else the first sampled one."""
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
