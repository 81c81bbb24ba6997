"""The run: stages of sample, score, learn, publish, evaluate and save, resumable after every save."""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import components
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.distributed.preemption import STOPPED, Preemption, Stopping
from jaxrl_llm.distributed.processes import Hosts, Processes
from jaxrl_llm.learner import score
from jaxrl_llm.learner.learner import TrainState
from jaxrl_llm.metrics import diagnostics, profiling
from jaxrl_llm.metrics.console import Console
from jaxrl_llm.metrics.profiling import Compilations
from jaxrl_llm.metrics.run_folder import provenance, writable
from jaxrl_llm.metrics.watchdog import Watchdog
from jaxrl_llm.metrics.writers import Jsonl, TensorBoard, WriterComponent, Writers
from jaxrl_llm.protocols import AuxiliaryModel, Sampler, SamplerFactory
from jaxrl_llm.train.build import new_key, open_stage
from jaxrl_llm.train.checkpoint import Checkpointing, Checkpoints
from jaxrl_llm.train.progress import Progress, part
from jaxrl_llm.train.stage import Stage
from jaxrl_llm.train.step import StageTrainer, StepResult

_log = logging.getLogger(__name__)

SIGNAL = "a signal"  # stops a run


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything of a run; a gin file builds it, and `run` carries it out.

    Attributes:
      run_dir: the run's folder: configuration, metrics, rollouts, checkpoints, TensorBoard.
      seed: seed of initial weights, data order and sampling.
      policy: where the policy's weights come from.
      tokenizer: where the tokenizer comes from.
      sampler: who generates.
      stages: what is learned, in turn.
      stop_after_s: seconds of steps after which this start saves and ends; the same command goes on. None runs to the end.
      stop_limit_s: seconds from SIGTERM or the first SIGINT to the end of the process: in time saved, later by force.
      mesh: sizes of the mesh axes.
      hosts: how processes of several hosts wait for each other.
      checkpoints: when to save and what to keep.
      writers: where metrics go.
      profile_steps: steps that are traced for TensorBoard's profile tab.
      watch: where the run's health is written, and when one that stands still is reported or stopped.
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

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a run needs at least one stage: set train.Run.stages")
        names = [s.name for s in self.stages]
        if len(set(names)) != len(names):
            raise ValueError(f"stages need different names (got {names}): set Stage.name")

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its response together, over all stages and evaluations."""
        lengths = [s.max_prompt_tokens + s.settings.max_tokens for s in self.stages]
        lengths += [s.max_prompt_tokens + e.settings.max_tokens for s in self.stages for e in s.evaluations]
        return max(lengths)

    @property
    def starts(self) -> list[int]:
        """Global step that each stage starts after, and the last step of the run at the end."""
        return [sum(s.steps for s in self.stages[:i]) for i in range(len(self.stages) + 1)]

    def run(self, config: str = "", processes: Processes | None = None) -> int:
        """Trains from the last checkpoint in `run_dir`, or from the start.

        Args:
          config: the gin text, kept with the run.
          processes: those of the run; None for this one alone.

        Returns:
          The exit status: 0, or `preemption.STOPPED` where a signal ended the run and the same command goes on.
        """
        processes = Processes() if processes is None else processes
        processes.same("the configuration", config)
        run_dir = Path(self.run_dir)
        if processes.main:
            writable(run_dir)
        partitioner = Partitioner.create(self.mesh)
        for stage in self.stages:
            stage.check_devices(partitioner.batch_shards)
        if processes.main:
            provenance(run_dir, self.seed, config)
        processes.share(run_dir)
        preemption = Preemption(self.stop_limit_s, processes)
        preemption.listen()
        try:
            with asyncio.Runner() as runner:
                trainer = Trainer(self, run_dir, partitioner, preemption)
                try:
                    runner.run(trainer.run(config))
                finally:
                    runner.run(trainer.close())
        finally:
            preemption.close()
        return STOPPED if trainer.stopped == SIGNAL else 0


class Trainer:
    """A run in progress."""

    overlaps = False  # what its own parts do needs the event loop

    def __init__(self, run: Run, run_dir: Path, partitioner: Partitioner, preemption: Preemption) -> None:
        self.config, self.run_dir, self.partitioner = run, run_dir, partitioner
        self.preemption, self.processes = preemption, preemption.processes
        self.tokenizer = run.tokenizer.load()
        self.policy = run.policy.policy(partitioner)
        self._check_vocabulary()
        self._check_teachers()
        for stage in run.stages:
            stage.check_depth(self.policy.architecture.layers)
        self.checkpoints = Checkpoints(run_dir, run.checkpoints)
        self.sampler: Sampler = run.sampler.start(
            self.policy.plain, self.tokenizer, max_length=run.max_length, run_dir=run_dir
        )
        self.watching = run.watch.start(run_dir, jax.process_index())
        self.progress = Progress(self.watching)
        self.bases: dict[str, Any] = {}
        self.auxiliary: list[AuxiliaryModel] = []
        self.writers = Writers.open((), run_dir, None, 0)
        self.state: Any = None  # a TrainState, from the first stage on
        self.best: float | None = None
        self.compilations = Compilations()
        self.began: float | None = None
        self.stopped = ""  # or what by
        self.before: dict[str, Any] | None = None  # the host's state after the last step

    def _check_vocabulary(self) -> None:
        size = self.policy.architecture.vocabulary_size
        if len(self.tokenizer) > size:
            raise ValueError(
                f"the tokenizer has {len(self.tokenizer)} tokens and the model's vocabulary {size}: set TOKENIZER and MODEL to a matching pair"
            )

    def _check_teachers(self) -> None:
        """Refuses a teacher that is not there, or of other tokens, before the first stage."""
        for stage in self.config.stages:
            if stage.teacher is not None and "teacher" in stage.algorithm.needs:
                score.found(stage.teacher, self.tokenizer, self.partitioner)

    # -- the run -------------------------------------------------------------------------------------------------------

    async def run(self, config: str) -> None:
        """All stages from where the run stands."""
        restored = self.open(config)
        if restored == self.config.starts[-1]:
            _log.warning("%s holds a finished run (%d steps); set RUN_DIR to start another", self.run_dir, restored)
            return
        async for stage, start in self.stages_left(restored):
            for step in range(start + 1, stage.offset + stage.config.steps + 1):
                with self.traced(step), self.given_up(stage):
                    self.state = await self.step(stage, self.state, step)
                if self.stopped:
                    done = step - (self.before is None or self.before["step"] < step)
                    print(f"stopped after step {done} by {self.stopped}; the same command goes on", flush=True)
                    break
        self.watching.at("saving")
        self.checkpoints.wait()

    async def step(self, stage: StageTrainer, state: TrainState, step: int) -> TrainState:
        """One step of the run: publish, learn, evaluate, write, save."""
        self.progress.begin()
        self.watching.at("beginning a step", step=step)
        if stage.config.samples:
            await self.publish(state, version=step - 1)
        state, metrics, result = await stage.step(state, step)
        self.stopped = self.over()
        if self.stopped or stage.evaluates(step):
            metrics |= await self.evaluate(stage, state, step)
            self.writers.rollouts(step, stage.rows(result))
        metrics = self.processes.broadcast(metrics | self.measures(stage, result, step))  # what follows depends on them
        stage.adapt(step, metrics, len(result.batch.rollouts))
        self.writers.write(step, metrics)
        self.save(stage, state, step, metrics)
        return state

    @part("publishing", "publish")
    async def publish(self, state: TrainState, version: int) -> None:
        """Gives the sampler the policy that a step samples from."""
        await self._serve(state, version)

    async def _serve(self, state: TrainState, version: int) -> None:
        """Gives the sampler the policy of `state`, where it serves another version."""
        if self.sampler.version != version:
            weights = self.policy.merged(state.policy, self.bases.get("policy"))
            await self.sampler.publish(weights, version)

    @part("evaluating", "evaluate")
    async def evaluate(self, stage: StageTrainer, state: TrainState, step: int) -> dict[str, float]:
        """Metrics of the held-out data of a stage; writes the first rollouts."""
        metrics = stage.measure(state)
        if stage.config.evaluations:
            await self._serve(state, step)
            found, rows = await stage.held_out.answers()
            metrics |= found
            self.writers.rollouts(step, rows)
        return metrics

    def measures(self, stage: StageTrainer, result: StepResult, step: int) -> dict[str, float]:
        """Times, speed and counts of a step."""
        seconds = self.progress.seconds
        metrics = {f"time/{name}_s": s for name, s in seconds.items()}
        metrics |= {"stage": float(stage.number), "update/step": float(step)}
        metrics |= diagnostics.speed(
            result.batch, self.policy.architecture, stage.config.epochs, seconds, stage.layers
        )  # fmt: skip
        metrics |= {**self.sampler.metrics(), **stage.loader.take(), "compilations": float(stage.compilations)}
        return metrics | {"compilations/step": float(self.compilations.take())}

    def save(self, stage: StageTrainer, state: TrainState, step: int, metrics: Mapping[str, float]) -> None:
        """Saves where a save is due, and the best checkpoint where the evaluation is the best so far."""
        self.watching.at("saving", version=self.sampler.version)
        if self.preemption.reached(step):
            self.stopped = SIGNAL
        due = bool(self.stopped) or stage.is_last(step) or step % self.config.checkpoints.every == 0
        name = self.config.checkpoints.best
        value = metrics.get(name) if name else None
        improved = value is not None and (self.best is None or value > self.best)
        if improved:
            self.best = value
        self.before = {"stage": stage.number, "step": step, "best": self.best, **stage.host()}
        trees = {"state": state, **stage.frozen.params}
        self.checkpoints.save(step, trees, self.before, last=due, best=improved)

    # -- start, resume, end --------------------------------------------------------------------------------------------

    def open(self, config: str) -> int | None:
        """Opens the writers and what lies frozen under adapters; returns the step that the run goes on after, if any."""
        restored = self.processes.broadcast(self.checkpoints.latest())
        writers = self.config.writers if self.processes.main else ()
        self.writers = Writers.open(writers, self.run_dir, restored, self.config.starts[-1])
        if config and restored is None:
            self.writers.text("config", f"```\n{config}\n```")
        self.watching.at("opening", step=restored or 0)
        if restored != self.config.starts[-1]:
            base = self.config.policy.base(self.policy, jax.random.key(self.config.seed))
            self.bases = {} if base is None else {"policy": base}
        return restored

    async def stages_left(self, restored: int | None) -> AsyncIterator[tuple[StageTrainer, int]]:
        """Each stage that is not over, and the step that it goes on after; `state` is the state to begin with."""
        first = 0 if restored is None else self.checkpoints.host(restored)["stage"]
        for number, config in list(enumerate(self.config.stages))[first:]:
            if self.stopped:
                return
            self.watching.at("beginning", stage=config.name)
            stage = open_stage(config, self, number)
            if restored is not None and number == first:
                start, self.state = restored, self._restored(stage, restored)
            else:
                params = self._initial() if self.state is None else self.state.policy
                start, self.state = stage.offset, stage.begin(params, new_key(self.config.seed, number))
            _log.info("stage %s goes on after step %d", config.name, start)
            await stage.frozen.refresh(self.state.policy, start - stage.offset)
            if start == 0:
                self.writers.write(0, await self.evaluate(stage, self.state, 0))
            self.began = self.began or time.monotonic()
            yield stage, start

    def _initial(self) -> Any:
        """The weights that the run starts from."""
        return self.config.policy.params(self.policy, jax.random.key(self.config.seed))

    def _restored(self, stage: StageTrainer, step: int) -> TrainState:
        host = self.checkpoints.host(step)
        trees = self.checkpoints.restore(step, stage.abstract)
        stage.resume(host, trees)
        self.best = host["best"]
        print(f"resuming from step {step} of {self.checkpoints.folder}", flush=True)
        return trees["state"]

    def over(self) -> str:
        """What ends this start after the present step, where its time is over; all processes say the same."""
        limit = self.config.stop_after_s
        over = limit is not None and self.began is not None and time.monotonic() - self.began >= limit
        return self.processes.broadcast("train.Run.stop_after_s" if over else "")

    def traced(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Traces a step for TensorBoard's profile tab where that is wanted."""
        wanted = self.processes.main and step in self.config.profile_steps
        return profiling.traced(self.run_dir / "tensorboard", wanted)

    @contextlib.contextmanager
    def given_up(self, stage: StageTrainer) -> Iterator[None]:
        """Saves the run as it was before the step where a signal ends that step before anything is learned in it."""
        try:
            yield
        except Stopping:
            self.stopped = SIGNAL
            if self.before is not None and self.before["step"] != self.checkpoints.latest():
                trees = {"state": self.state, **stage.frozen.params}
                self.checkpoints.save(self.before["step"], trees, self.before)

    async def close(self) -> None:
        """Stops the sampler and the rewards' processes and closes files; where one fails, the others are closed all the same."""
        self.watching.at("closing")
        async with contextlib.AsyncExitStack() as closing:
            closing.push(lambda _, error, __: self.watching.end(error or sys.exception()))
            closing.callback(self.writers.close)
            closing.callback(self.checkpoints.close)
            for stage in self.config.stages:
                closing.callback(components.close, (stage.reward, [e.reward for e in stage.evaluations]))
            for model in self.auxiliary:
                closing.push_async_callback(model.stop)
            closing.push_async_callback(self.sampler.close)
