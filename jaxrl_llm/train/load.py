"""Loads a trained model by its path: a Hugging Face folder or id, or a run folder and one of its checkpoints."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import command_line
from jaxrl_llm.data.tokenizer import PretrainedTokenizer
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models import hf_weights
from jaxrl_llm.models.sources import Opened, PolicySource
from jaxrl_llm.train.checkpoint import last_step, read_model


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model to sample from.

    Attributes:
      path: a Hugging Face folder or id, or a run folder.
      step: a run's checkpoint; None takes the last one.
      best: take a run's best checkpoint by its evaluation metric.
      compute_dtype: dtype of activations, "float32" or "bfloat16"; None takes a run's own, and float32 for a Hugging Face model.
      chat_template: Jinja template that replaces the tokenizer's own; empty keeps it.
    """

    path: str
    step: int | None = None
    best: bool = False
    compute_dtype: str | None = None
    chat_template: str = ""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError(
                f"train.TrainedModel.path must name a Hugging Face folder or id, or a run folder (got {self.path!r}): set MODEL_PATH, or "
                "TEACHER_PATH where the model is a teacher"
            )

    def open(self, partitioner: Partitioner) -> Opened:
        """Opens the model on a mesh, with its tokenizer.

        Raises:
          OSError: there is no such folder, checkpoint or tokenizer.
          ValueError: the configuration does not build, or the architecture is not supported.
        """
        folder = Path(self.path).expanduser()
        if (folder / "config.gin").is_file():
            return self._of_run(folder, partitioner)
        if self.step is not None or self.best:
            raise FileNotFoundError(
                f"{self.path} is no run folder (it has no config.gin), and only a run has checkpoints: "
                "leave train.TrainedModel.step and train.TrainedModel.best at their defaults"
            )
        located = str(hf_weights.locate(self.path))
        source = PolicySource(pretrained=located, compute_dtype=self.compute_dtype or "float32")
        policy = source.policy(partitioner)
        tokenizer = PretrainedTokenizer(path=located, chat_template=self.chat_template).load()
        params = partial(source.params, policy, jax.random.key(0))
        return Opened(policy=policy, tokenizer=tokenizer, params=params, name=self.path)

    def _of_run(self, folder: Path, partitioner: Partitioner) -> Opened:
        found = saved(folder, step=self.step, best=self.best, partitioner=partitioner, compute_dtype=self.compute_dtype)
        tokenizer = found.run.tokenizer.load()
        if self.chat_template:
            tokenizer.chat_template = self.chat_template
        name = f"{self.path} step {found.step}"
        return Opened(policy=found.policy.plain, tokenizer=tokenizer, params=found.merged, name=name)


@dataclass(frozen=True)
class Saved:
    """A checkpoint of a run, whose parameters can be read.

    Attributes:
      run: the run.
      folder: the folder that holds its checkpoints.
      step: the checkpoint's step.
      policy: the policy on a mesh.
    """

    run: Any
    folder: Path
    step: int
    policy: Any

    def trained(self) -> Any:
        """Reads the trained parameters of the policy: all of them, or its adapters."""
        return read_model(self.folder, self.step, self.policy.abstract(), own=self.policy.sizes())

    def merged(self) -> Any:
        """Returns all parameters of the policy, with adapters merged."""
        base = self.run.policy.base(self.policy, jax.random.key(self.run.seed))
        return self.policy.merged(self.trained(), base)


def saved(
    run_dir: Path,
    *,
    step: int | None = None,
    best: bool = False,
    partitioner: Partitioner | None = None,
    compute_dtype: str | None = None,
) -> Saved:
    """Finds a checkpoint of a run.

    Args:
      run_dir: the run's folder, with its config.gin.
      step: the checkpoint's step; None takes the last one.
      best: take the best checkpoint by the run's evaluation metric.
      partitioner: the mesh; None takes this machine's devices.
      compute_dtype: dtype of activations; None takes the run's own.

    Raises:
      OSError: there is no such run or checkpoint.
      ValueError: the configuration does not build.
    """
    if not (run_dir / "config.gin").is_file():
        raise FileNotFoundError(f"{run_dir} is no run folder: it has no config.gin")
    run: Any
    run, _ = command_line.build([str(run_dir)])
    if not isinstance(getattr(run, "policy", None), PolicySource):
        raise ValueError(f"{run_dir} holds no run that trains a policy: name a Hugging Face folder or a run folder")
    folder = run_dir / ("best" if best else "checkpoints")
    step = last_step(folder) if step is None else step
    if not (folder / str(step)).is_dir():
        there = sorted(p.name for p in folder.glob("*"))
        raise FileNotFoundError(f"no checkpoint {step} in {folder}; there are {there}")
    source = replace(run.policy, compute_dtype=compute_dtype or run.policy.compute_dtype)
    partitioner = Partitioner.create(MeshConfig()) if partitioner is None else partitioner
    return Saved(run, folder, step, source.policy(partitioner))
