"""The run that `rl.grpo(...)` and the like return: it trains, returns its metrics step by step, chats, evaluates and exports."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl_llm import launch
from jaxrl_llm.data import rows
from jaxrl_llm.distributed.mesh import MeshConfig
from jaxrl_llm.eval.evaluate import Evaluation
from jaxrl_llm.eval.harness import SUMMARY, Harness
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.interface import page, several_rewards, stepping
from jaxrl_llm.interface.conversation import Conversation
from jaxrl_llm.rewards.function import Function
from jaxrl_llm.rewards.weighted import Weighted
from jaxrl_llm.tools import export
from jaxrl_llm.train.checkpoint import last_step
from jaxrl_llm.train.load import TrainedModel
from jaxrl_llm.train.run import Run


class PythonRun:
    """A run as a Python object. `run.train()` trains to the end, `for step in run:` step by step; both resume from the last checkpoint.

    The folder holds its whole state: `python -m jaxrl_llm.launch --gin_file=FOLDER/config.gin` resumes from the same checkpoint, and
    `rl.train(FOLDER)` opens it again.

    Args:
      run: the run that gin built.
      config: the run's whole configuration as gin text.

    Attributes:
      run: the configuration, a `train.Run`.
      config: the configuration as gin text.
      folder: the run folder.
    """

    def __init__(self, run: Run, config: str) -> None:
        self.run, self.config, self.folder = run, config, Path(run.run_dir)
        self._conversation: tuple[int | None, Conversation] | None = None
        self._training = False

    def __repr__(self) -> str:
        return f"<run in {self.folder}: {page.progress(self.history, self.total)}>"

    def _repr_html_(self) -> str:
        return page.page(self.folder, self.history, self.total)

    @property
    def total(self) -> int:
        """The number of steps of the whole run."""
        return self.run.starts[-1]

    @property
    def history(self) -> list[dict[str, Any]]:
        """The metrics of each step so far, {"step": number, metric: value}, from the run folder."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []  # without a line that is being written
        found = [json.loads(line) for line in lines]
        return [{n: float(v) if isinstance(v, str) else v for n, v in row.items()} for row in found if len(row) > 1]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields the metrics of each step as it ends; the run waits meanwhile, and leaving the loop saves a checkpoint.

        Raises:
          RuntimeError: another loop trains this run.
        """
        if self._training:
            raise RuntimeError(f"{self.folder} is being trained by another loop over this run: leave that one first")
        self._training = True
        try:
            yield from stepping.steps(self.run, self.config)
        finally:
            self._training = False

    def train(self) -> "PythonRun":
        """Trains to the end, or from the last checkpoint on; returns the run, which a notebook shows."""
        with page.shown(self) as show:
            for _ in self:
                show()
        return self

    @property
    def step(self) -> int | None:
        """The step of the last checkpoint; None before the first."""
        with contextlib.suppress(FileNotFoundError):
            return last_step(self.folder / "checkpoints")
        return None

    def chat(self, question: str, *, temperature: float = 0.0, max_tokens: int = 128, seed: int = 0) -> str:
        """Returns the answer of the last checkpoint, or of the run's initial model where there is no checkpoint.

        Args:
          question: a user's message.
          temperature: 0 takes the likeliest token.
          max_tokens: most tokens of the answer.
          seed: seed of the sampling.

        Raises:
          ValueError: the question is too long for the model, or the tokenizer lacks one of its characters.
        """
        step = self.step
        if self._conversation is None or self._conversation[0] != step:
            self.close()
            opened = Conversation.of_start(self.run) if step is None else Conversation.of_folder(self.folder)
            self._conversation = (step, opened)
        settings = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        return self._conversation[1].ask(question, settings, seed)

    def close(self) -> None:
        """Frees the memory of the model that `chat` opened."""
        if self._conversation is not None:
            self._conversation[1].close()
            self._conversation = None

    def evaluate(
        self,
        data: str | Sequence[Mapping[str, Any]] | None = None,
        *,
        reward: Any = None,
        limit: int | None = None,
        samples: int = 0,
    ) -> dict[str, Any]:
        """Evaluates the last checkpoint: greedy answers, and `samples` sampled ones a prompt.

        Args:
          data: a file, a folder, a dataset's id or a list of mappings; None takes the run's own held-out data.
          reward: a function or "file.py:name", or several with weights as `rl.grpo` takes them; None takes the run's own.
          limit: most prompts.
          samples: number of answers sampled for each prompt.

        Returns:
          The metrics, as in summary.json of RUN/evaluations, which also has their intervals and all answers.

        Raises:
          ValueError: nothing is trained yet, or the run has no held-out data or no reward.
        """
        if self.step is None:
            raise ValueError(f"{self.folder} has no checkpoint yet: call train() first")
        stage = self.run.stages[-1]
        evaluation = next(iter(stage.evaluations), None)
        if data is not None:
            settings = stage.settings if evaluation is None else evaluation.settings
            evaluation = Evaluation(name="given", data=rows.Rows(source=data), settings=settings)
        if evaluation is None:
            raise ValueError("the run has no held-out data: give data=, or eval_data= when it is made")
        scored: Any = evaluation.reward or stage.reward
        if reward is not None:
            scored = judged_by(reward)
        if scored is None:
            raise ValueError("the run has no reward, by which answers would be judged: give reward=")
        limit = limit or evaluation.limit
        asked = replace(evaluation, reward=scored, greedy=True, samples=samples, limit=limit)
        number = len(list((self.folder / "evaluations").glob(f"step{self.step}*")))
        out = self.folder / "evaluations" / f"step{self.step}.{number}"
        harness = Harness(
            out_dir=str(out), model=TrainedModel(path=str(self.folder)), sampler=self.run.sampler, evaluation=asked,
            mesh=MeshConfig() if getattr(self.run.sampler, "devices", 0) else self.run.mesh, max_prompt_tokens=stage.max_prompt_tokens, truncation=stage.truncation,
            template_kwargs=stage.template_kwargs,
        )  # fmt: skip
        with ThreadPoolExecutor(1, "evaluation") as thread:  # a notebook's own thread already runs an event loop
            thread.submit(harness.run, self.config).result()
        return json.loads((out / SUMMARY).read_text())["metrics"]

    def export(
        self, folder: str | Path, *, step: int | None = None, best: bool = False, dtype: str = "float32"
    ) -> Path:
        """Writes a checkpoint as a Hugging Face folder, adapters merged; returns the folder.

        Raises:
          OSError: the folder exists, or there is no such checkpoint.
        """
        return export.write(self.folder, Path(folder), step=step, best=best, dtype=dtype)


def opened(files: Sequence[str], bindings: Sequence[str]) -> PythonRun:
    """Builds a run of gin files and bindings, as `launch` does; raises ValueError where they build something that does not train."""
    run, config = launch.built(files, bindings)
    if not isinstance(run, Run):
        raise ValueError(
            f"{', '.join(files)} builds {type(run).__name__}, which trains nothing: use the command `jaxrl eval`"
        )
    return PythonRun(run, config)


def judged_by(value: Any) -> Function | Weighted:
    """Builds a reward without gin from functions, or texts that name functions: `Function`, or several in `Weighted`.

    Raises:
      ValueError: a part is a name in gin/rewards or a reference, or is missing.
    """
    found = several_rewards.parts(value)
    for reward in [part.reward for part in found] or [value]:
        if isinstance(reward, str) and not several_rewards.FUNCTION.fullmatch(reward):
            raise ValueError(
                f"reward: {reward!r} is no function: give a callable, 'FILE.py:NAME' or 'package.module:NAME'"
            )
    if not found:
        return Function(function=value)
    judges: dict[str, Any] = {part.name: Function(function=part.reward, name=part.name) for part in found}
    return Weighted(parts=judges, weights={part.name: part.weight for part in found})
