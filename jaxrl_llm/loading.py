"""A trained model by its path: a Hugging Face folder or id, or a run folder and one of its checkpoints."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import hf_weights, launch
from jaxrl_llm.checkpoint import last_step, read_policy
from jaxrl_llm.data.tokenizer import PretrainedTokenizer
from jaxrl_llm.eval.harness import Opened
from jaxrl_llm.mesh import Partitioner
from jaxrl_llm.models.policy_source import PolicySource


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model to sample from.

    Attributes:
      path: a Hugging Face folder or id, or a run folder.
      step: a run's checkpoint; None takes the last one.
      best: take a run's best checkpoint by its evaluation metric.
      compute_dtype: dtype of activations, "float32" or "bfloat16"; None is float32, and a run's own.
      chat_template: Jinja template that replaces the tokenizer's own; empty keeps it.
    """

    path: str
    step: int | None = None
    best: bool = False
    compute_dtype: str | None = None
    chat_template: str = ""

    def open(self, partitioner: Partitioner) -> Opened:
        """The model and its tokenizer on a mesh.

        Raises:
          OSError: no such folder, checkpoint or tokenizer.
          ValueError: a configuration that does not build, or an unsupported architecture.
        """
        folder = Path(self.path).expanduser()
        if (folder / "config.gin").is_file():
            return self._of_run(folder, partitioner)
        if self.step is not None or self.best:
            raise FileNotFoundError(
                f"{self.path} is no run folder (it has no config.gin), and only a run has checkpoints: "
                "leave loading.Model.step and loading.Model.best at their defaults"
            )
        located = str(hf_weights.locate(self.path))
        source = PolicySource(pretrained=located, compute_dtype=self.compute_dtype or "float32")
        tokenizer = PretrainedTokenizer(path=located, chat_template=self.chat_template).load()
        policy = source.policy(partitioner)
        params = partial(source.params, policy, jax.random.key(0))
        return Opened(policy=policy, tokenizer=tokenizer, params=params, name=self.path)

    def _of_run(self, folder: Path, partitioner: Partitioner) -> Opened:
        run: Any
        run, _ = launch.build([str(folder)])
        if not isinstance(getattr(run, "policy", None), PolicySource):
            raise ValueError(f"{folder} holds no run that trains a policy: name a Hugging Face folder or a run folder")
        checkpoints = folder / ("best" if self.best else "checkpoints")
        step = last_step(checkpoints) if self.step is None else self.step
        if not (checkpoints / str(step)).is_dir():
            there = sorted(p.name for p in checkpoints.glob("*"))
            raise FileNotFoundError(f"no checkpoint {step} in {checkpoints}; there are {there}")
        source = replace(run.policy, compute_dtype=self.compute_dtype or run.policy.compute_dtype)
        policy, tokenizer = source.policy(partitioner), run.tokenizer.load()
        if self.chat_template:
            tokenizer.chat_template = self.chat_template
        params = partial(_read, policy, checkpoints, step)
        return Opened(policy=policy, tokenizer=tokenizer, params=params, name=f"{self.path} step {step}")


def _read(policy: Any, folder: Path, step: int) -> Any:
    return read_policy(folder, step, policy.abstract())
