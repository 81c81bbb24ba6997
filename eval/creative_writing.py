"""EQ-Bench creative writing: tasks with seeds that vary a piece, and a score from the ratings of a rubric.

    score = 5 x mean over tasks of the mean piece (0 to 20), with the 2.5% and 97.5% points of 500 bootstrap draws of tasks

The original's Elo rating needs its file of reference pieces and is not computed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.data.templates import Templated
from jaxrl_llm.eval.answered import Answered, mean, value
from jaxrl_llm.experience import Prompt

DRAWS = 500
SEED = 0


@dataclass(frozen=True, kw_only=True)
class CreativePrompts(Templated):
    """Reads EQ-Bench's prompts file: {task: {"writing_prompt", "seed_modifiers"}}, JSON.

    Attributes:
      path: the file.
      name: name of the source, and prefix of the prompts' ids "name/task/iteration".
      iterations: number of pieces per task; in piece i the seed modifier i modulo their number replaces <SEED>.
    """

    path: str
    name: str = "creative_writing"
    iterations: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        components.at_least(self, 1, "iterations")

    def rows(self) -> Sequence[Prompt]:
        """Returns all prompts.

        Raises:
          FileNotFoundError: there is nothing at `path`.
          ValueError: the file has another schema; the message names the file and the task.
        """
        file = Path(self.path).expanduser()
        if not file.is_file():
            raise FileNotFoundError(f"no prompts at {self.path!r}: name EQ-Bench's creative_writing_prompts file")
        try:
            tasks = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}: malformed JSON ({error})") from error
        if not isinstance(tasks, dict) or not tasks:
            raise ValueError(f"{file}: expected an object of tasks by name")
        return [self._prompt(str(file), name, task, i) for name, task in tasks.items() for i in range(self.iterations)]

    def _prompt(self, file: str, name: str, task: Any, iteration: int) -> Prompt:
        if not isinstance(task, dict) or not isinstance(task.get("writing_prompt"), str):
            raise ValueError(f"{file}, task {name!r}: no text under writing_prompt")
        seeds = task.get("seed_modifiers") or [""]
        asked = task["writing_prompt"].replace("<SEED>", seeds[iteration % len(seeds)])
        extra = {"instruction": asked, "task": name, "category": str(task.get("category") or "")}
        return Prompt(id=f"{self.name}/{name}/{iteration}", source=self.name, extra=extra, **self.asked(asked))


@dataclass(frozen=True, kw_only=True)
class CreativeScore:
    """Measures "creative_score" (0 to 100), with its bootstrap interval over tasks in the summary, and "failed", the pieces without a rating.

    Attributes:
      part: name of the reward's part that rates a piece from 0 to 20.
    """

    part: str = "rubric"

    def measure(self, answered: Sequence[Answered]) -> Mapping[str, np.ndarray]:
        """Returns one score per task, and the number of pieces without a rating."""
        failed = sum(np.isnan(value(record, self.part)) for one in answered for record in one.main)
        return {"creative_score": self._by_task(answered), "failed": np.array(float(failed))}

    def report(self, answered: Sequence[Answered], folder: Path, model: str) -> Mapping[str, Any]:
        """Returns {"creative_writing": score and its bootstrap interval}; writes no file."""
        del folder, model
        tasks = self._by_task(answered)
        tasks = tasks[~np.isnan(tasks)]
        if not len(tasks):
            return {"creative_writing": {"score": None, "ci95": None, "tasks": 0}}
        draws = np.random.default_rng(SEED).choice(tasks, (DRAWS, len(tasks))).mean(axis=1)
        interval = [float(x) for x in np.quantile(draws, (0.025, 0.975))]
        return {"creative_writing": {"score": float(tasks.mean()), "ci95": interval, "tasks": len(tasks)}}

    def _by_task(self, answered: Sequence[Answered]) -> np.ndarray:
        pieces: dict[str, list[float]] = {}
        for one in answered:
            pieces.setdefault(str(one.prompt.extra["task"]), []).extend(value(r, self.part) for r in one.main)
        return np.array([5 * mean(group) for group in pieces.values()], np.float64)
