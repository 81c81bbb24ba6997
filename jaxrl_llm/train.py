"""The run: stages of sample, score, learn, publish, evaluate and save, resumable after every save."""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import diagnostics, parts, profiling, teaching
from jaxrl_llm.checkpoint import Checkpointing, Checkpoints
from jaxrl_llm.compilations import Compilations
from jaxrl_llm.console import Console
from jaxrl_llm.hosts import Hosts, Processes
from jaxrl_llm.mesh import MeshConfig, Partitioner
from jaxrl_llm.metrics import Jsonl, TensorBoard, WriterComponent, Writers
from jaxrl_llm.preemption import STOPPED, Notice, Stopping
from jaxrl_llm.protocols import Companion, Sampler, SamplerFactory
from jaxrl_llm.run_folder import provenance, writable
from jaxrl_llm.stage_run import StageRun
from jaxrl_llm.stages import Stage
from jaxrl_llm.train_state import TrainState
from jaxrl_llm.watch import Watch

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
    watch: Watch = field(default_factory=Watch)

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
        notice = Notice(self.stop_limit_s, processes)
        notice.listen()
        try:
            with asyncio.Runner() as runner:
                training = Training(self, run_dir, partitioner, notice)
                try:
                    runner.run(training.run(config))
                finally:
                    runner.run(training.close())
        finally:
            notice.close()
        return STOPPED if training.stopped == SIGNAL else 0


class Training:
    """A run in progress."""

    def __init__(self, run: Run, run_dir: Path, partitioner: Partitioner, notice: Notice) -> None:
        self.config, self.run_dir, self.partitioner = run, run_dir, partitioner
        self.notice, self.processes = notice, notice.processes
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
        self.bases: dict[str, Any] = {}
        self.companions: list[Companion] = []
        self.writers: Writers | None = None
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
        """A teacher that is not there, or of other tokens, is refused before the first stage."""
        for stage in self.config.stages:
            if stage.teacher is not None and "teacher" in stage.algorithm.needs:
                teaching.found(stage.teacher, self.tokenizer, self.partitioner)

    # -- start, resume, end --------------------------------------------------------------------------------------------

    async def run(self, config: str) -> None:
        """All stages from where the run stands."""
        restored = self.processes.broadcast(self.checkpoints.latest())
        total = self.config.starts[-1]
        self.writers = Writers.open(self.config.writers if self.processes.main else (), self.run_dir, restored, total)
        if config and restored is None:
            self.writers.text("config", f"```\n{config}\n```")
        self.watching.at("opening", step=restored or 0)
        if restored == total:
            _log.warning("%s holds a finished run (%d steps); set RUN_DIR to start another", self.run_dir, total)
            return
        base = self.config.policy.base(self.policy, jax.random.key(self.config.seed))
        self.bases = {} if base is None else {"policy": base}
        first = 0 if restored is None else self.checkpoints.host(restored)["stage"]
        state: TrainState | None = None
        for number in range(first, len(self.config.stages)):
            self.watching.at("beginning", stage=self.config.stages[number].name)
            stage = StageRun.open(self.config.stages[number], self, number)
            if restored is not None and number == first:
                state, start = self._restore(stage, restored), restored - self.config.starts[number]
            else:
                state, start = stage.begin(await self._initial() if state is None else state.policy), 0
            state = await self._stage(stage, state, start)
            if self.stopped:
                break
        self.watching.at("saving")
        self.checkpoints.wait()

    async def _initial(self) -> Any:
        """The weights that the run starts from."""
        return self.config.policy.params(self.policy, jax.random.key(self.config.seed))

    def _restore(self, stage: StageRun, step: int) -> TrainState:
        host = self.checkpoints.host(step)
        trees = self.checkpoints.restore(step, stage.abstract)
        stage.resume(host, trees)
        self.best = host["best"]
        print(f"resuming from step {step} of {self.checkpoints.folder}", flush=True)
        return trees["state"]

    async def close(self) -> None:
        """Stops the sampler and the rewards' processes and closes files; where one fails, the others are closed all the same."""
        self.watching.at("closing")
        async with contextlib.AsyncExitStack() as closing:
            closing.push(lambda _, error, __: self.watching.end(error or sys.exception()))
            if self.writers is not None:
                closing.callback(self.writers.close)
            closing.callback(self.checkpoints.close)
            for stage in self.config.stages:
                closing.callback(parts.close, (stage.reward, [e.reward for e in stage.evaluations]))
            for companion in self.companions:
                closing.push_async_callback(companion.stop)
            closing.push_async_callback(self.sampler.close)

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def _stage(self, stage: StageRun, state: TrainState, start: int) -> TrainState:
        assert self.writers is not None
        offset = self.config.starts[stage.number]
        _log.info("stage %s goes on after step %d", stage.config.name, offset + start)
        await stage.refresh(state, start)
        if offset + start == 0:
            self.writers.write(0, await self._evaluate(stage, state, 0))
        self.began = self.began or time.monotonic()
        traces = self.config.profile_steps if self.processes.main else ()
        for step in range(start + 1, stage.config.steps + 1):
            try:
                with profiling.traced(self.run_dir / "tensorboard", offset + step in traces):
                    state = await self._step(stage, state, offset + step, last=step == stage.config.steps)
            except Stopping:
                self._give_up(stage, state)
            if self.stopped:
                done = offset + step - (self.before is None or self.before["step"] < offset + step)
                print(f"stopped after step {done} by {self.stopped}; the same command goes on", flush=True)
                break
        return state

    def _over(self) -> str:
        """What ends this start after the present step, where its time is over; all processes say the same."""
        limit = self.config.stop_after_s
        over = limit is not None and self.began is not None and time.monotonic() - self.began >= limit
        return self.processes.broadcast("train.Run.stop_after_s" if over else "")

    def _give_up(self, stage: StageRun, state: TrainState) -> None:
        """Saves the run as it was before the step that nothing was learned in."""
        self.stopped = SIGNAL
        if self.before is not None and self.before["step"] != self.checkpoints.latest():
            self.checkpoints.save(self.before["step"], {"state": state, **stage.frozen}, self.before)

    async def _step(self, stage: StageRun, state: TrainState, step: int, *, last: bool) -> TrainState:
        """One step: sample, score, learn, publish, evaluate, write, save."""
        assert self.writers is not None
        begin = time.perf_counter()
        clock = Clock()
        within = step - self.config.starts[stage.number]
        self.watching.at("publishing", step=step)
        stage.phases.enter(within, stage.controls)
        if stage.config.samples:
            await self._publish(state, step - 1)
            clock.lap("publish")
        self.watching.at("collecting")
        await stage.refresh(state, within - 1)
        coming = stage.feed.next(step)
        groups = await (coming if self.processes.count > 1 else self.notice.unless(coming))
        clock.lap("collect")
        self.watching.at("scoring")
        # A sampler that overlaps needs the event loop while the learner computes.
        aside: Callable[..., Any] = asyncio.to_thread if stage.config.max_staleness else _at_once
        batch = await aside(stage.pack, groups)
        streams = await aside(stage.score, state, batch, step)
        if stage.rescores:
            batch = await stage.rescore(batch, streams)
        credit = await aside(stage.credit, batch, streams)
        clock.lap("score")
        self.watching.at("updating")
        state, metrics = await aside(stage.update, state, batch, streams, credit)
        clock.lap("update")
        metrics |= stage.describe(batch, streams, credit)
        if stage.config.max_staleness:
            metrics |= diagnostics.staleness(batch, streams, step - 1)
        stage.check(metrics, state)
        self.stopped = self._over()
        last = last or bool(self.stopped)
        due = last or step % stage.config.evaluate_every == 0
        if due:
            metrics |= await self._evaluate(stage, state, step)
            self.writers.rollouts(step, stage.rows_to_read(batch, streams, credit))
            clock.lap("evaluate")
        metrics |= {f"time/{name}_s": s for name, s in clock.laps.items()} | {"stage": float(stage.number)}
        seconds = {**clock.laps, "step": time.perf_counter() - begin}
        metrics |= {"time/step_s": seconds["step"], "update/step": float(step)}
        metrics |= diagnostics.speed(batch, self.policy.architecture, stage.config.epochs, seconds, stage.phases.layers)
        metrics |= dict(self.sampler.metrics())
        metrics |= stage.feed.take() | {"compilations": float(stage.phases.compilations)}
        metrics["compilations/step"] = float(self.compilations.take())
        metrics = self.processes.broadcast(metrics)  # what the run does next depends on them
        stage.adapt(within, metrics, len(batch.rollouts))
        self.watching.at("saving", version=self.sampler.version)
        self.writers.write(step, metrics)
        if self.notice.reached(step):
            self.stopped = SIGNAL
        due = last or bool(self.stopped) or step % self.config.checkpoints.every == 0
        self._save(stage, state, step, metrics, due=due)
        return state

    async def _publish(self, state: TrainState, version: int) -> None:
        if self.sampler.version != version:
            weights = self.policy.merged(state.policy, self.bases.get("policy"))
            await self.sampler.publish(weights, version)

    async def _evaluate(self, stage: StageRun, state: TrainState, step: int) -> dict[str, float]:
        assert self.writers is not None
        self.watching.at("evaluating")
        metrics = stage.measure(state)
        if stage.config.evaluations:
            await self._publish(state, step)
            found, rows = await stage.evaluate()
            metrics |= found
            self.writers.rollouts(step, rows)
        return metrics

    def _save(self, stage: StageRun, state: TrainState, step: int, metrics: Mapping[str, float], *, due: bool) -> None:
        """Saves where a save is due, and the best checkpoint where the evaluation is the best so far."""
        name = self.config.checkpoints.best
        value = metrics.get(name) if name else None
        improved = value is not None and (self.best is None or value > self.best)
        if improved:
            self.best = value
        host = self.before = {"stage": stage.number, "step": step, "best": self.best, **stage.host()}
        trees = {"state": state, **stage.frozen}
        self.checkpoints.save(step, trees, host, last=due, best=improved)


async def _at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """`asyncio.to_thread` without the thread."""
    return function(*arguments)


class Clock:
    """Seconds between laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now
