"""The configuration of a run, with everything that it is composed of; a gin file builds it."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import components
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.distributed.preemption import STOPPED, Preemption
from jaxrl_llm.distributed.processes import Hosts, Processes
from jaxrl_llm.metrics.console import Console
from jaxrl_llm.metrics.run_folder import writable
from jaxrl_llm.metrics.run_lock import locked
from jaxrl_llm.metrics.watchdog import Watchdog
from jaxrl_llm.metrics.writers import Jsonl, TensorBoard, WriterComponent
from jaxrl_llm.protocols import SamplerFactory
from jaxrl_llm.train.checkpoint import Checkpointing
from jaxrl_llm.train.stage import Stage
from jaxrl_llm.train.trainer import SIGNAL, Trainer


@dataclass(frozen=True, kw_only=True)
class Run:
    """The configuration of a run; a gin file builds it, and `run` runs it.

    Attributes:
      run_dir: the run's folder: configuration, metrics, rollouts, checkpoints, TensorBoard.
      seed: seed of initial weights, data order and sampling.
      policy: source of the policy's weights.
      tokenizer: source of the tokenizer.
      sampler: starts the sampler, which generates rollouts.
      stages: the stages, in the order in which they run.
      stop_after_s: seconds of training after which the process saves and ends; the same command resumes it. None runs to the end.
      stop_limit_s: seconds from SIGTERM or the first SIGINT within which the process saves and ends; after them it ends by force.
      mesh: sizes of the mesh axes.
      hosts: time limits of the waits between processes of several hosts.
      checkpoints: when to save and what to keep.
      writers: writers of metrics, such as the console and TensorBoard.
      profile_steps: steps that are traced for TensorBoard's profile tab.
      watch: the watchdog: where the run's health is written, and when a stalled run is reported or stopped.
      resume_as_new: whether a resume takes up changed settings that affect what is learned; `launch --resume_as_new` sets it for one start.
    """

    run_dir: str
    seed: int = 0
    policy: Any
    tokenizer: Any
    sampler: SamplerFactory
    stages: Sequence[Stage]
    stop_after_s: float | None = None
    stop_limit_s: float = 25.0
    mesh: MeshConfig = field(default_factory=MeshConfig)
    hosts: Hosts = field(default_factory=Hosts)
    checkpoints: Checkpointing = field(default_factory=Checkpointing)
    writers: Sequence[WriterComponent] = (Console(), Jsonl(), TensorBoard())
    profile_steps: Sequence[int] = ()
    watch: Watchdog = field(default_factory=Watchdog)
    resume_as_new: bool = False

    def __post_init__(self) -> None:
        for name, value, method, example in (
            ("MODEL (train.Run.policy)", self.policy, "policy", "@sources.PolicySource()"),
            ("TOKENIZER (train.Run.tokenizer)", self.tokenizer, "load", "@tokenizer.PretrainedTokenizer()"),
            ("SAMPLER (train.Run.sampler)", self.sampler, "start", "@embedded.EmbeddedSampler()"),
        ):
            if not hasattr(value, method):
                raise ValueError(f"{name} must be a component such as {example} (got {value!r})")
        components.at_least(self, 0, "seed")
        if not self.stages:
            raise ValueError("a run needs at least one stage: set train.Run.stages")
        names = [s.name for s in self.stages]
        if len(set(names)) != len(names):
            raise ValueError(f"stages need different names (got {names}): set Stage.name")

    @property
    def max_length(self) -> int:
        """The largest number of tokens of a prompt and its response together, over all stages and evaluations."""
        lengths = [s.max_prompt_tokens + s.settings.max_tokens for s in self.stages]
        lengths += [s.max_prompt_tokens + e.settings.max_tokens for s in self.stages for e in s.evaluations]
        return max(lengths)

    @property
    def starts(self) -> list[int]:
        """The global steps after which the stages start; the last entry is the last step of the run."""
        return [sum(s.steps for s in self.stages[:i]) for i in range(len(self.stages) + 1)]

    def partitioner(self, devices: Sequence[Any] | None = None) -> Partitioner:
        """Returns the learner's mesh: `devices` (default: all of the run's), without those that the sampler has for itself.

        Raises:
          ValueError: train.MeshConfig does not fit them, or the sampler leaves none.
        """
        found = list(jax.devices() if devices is None else devices)
        left = self.sampler.left(found) if hasattr(self.sampler, "left") else found
        try:
            return Partitioner.create(self.mesh, left)
        except ValueError as error:
            own = len(found) - len(left)
            raise ValueError(
                f"{error}; {own} of {len(found)} devices are the sampler's own" if own else str(error)
            ) from error

    def run(
        self,
        config: str = "",
        processes: Processes | None = None,
        *,
        preemption: Preemption | None = None,
        beside: Sequence[WriterComponent] = (),
    ) -> int:
        """Trains from the last checkpoint in `run_dir`, or from the start.

        Args:
          config: the gin text, kept with the run.
          processes: the processes of the run; None for this one alone.
          preemption: what may stop the run, such as its caller by `Preemption.stop`; None makes one.
          beside: further writers, which are no part of the run's settings.

        Returns:
          The exit status: 0, or `preemption.STOPPED` where a signal ended the run and the same command resumes it.
        """
        processes = Processes() if processes is None else processes
        processes.same("the configuration", config)
        run_dir = Path(self.run_dir)
        with contextlib.ExitStack() as held:
            if processes.main:
                held.enter_context(locked(writable(run_dir)))
            if preemption is None:
                preemption = Preemption(self.stop_limit_s, processes)
            held.callback(preemption.close)
            return self._run(run_dir, config, preemption, beside)

    def _run(self, run_dir: Path, config: str, preemption: Preemption, beside: Sequence[WriterComponent]) -> int:
        partitioner = self.partitioner()
        for stage in self.stages:
            stage.check_devices(partitioner.batch_shards)
        preemption.processes.share(run_dir)
        preemption.listen()
        with asyncio.Runner() as runner:
            trainer = Trainer(self, run_dir, partitioner, preemption, beside)
            try:
                runner.run(trainer.run(config))
            finally:
                runner.run(trainer.close())
        return STOPPED if trainer.stopped == SIGNAL else trainer.status
