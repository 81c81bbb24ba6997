"""Runs stages of publish, sample, score, learn, evaluate and save, resumable after every save."""

import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import components
from jaxrl_llm.distributed.mesh import Partitioner
from jaxrl_llm.distributed.preemption import STOPPED, Preemption, Stopping
from jaxrl_llm.learner.state import TrainState
from jaxrl_llm.metrics import diagnostics, profiling
from jaxrl_llm.metrics.profiling import Compilations
from jaxrl_llm.metrics.rollout_rows import Row
from jaxrl_llm.metrics.run_folder import provenance
from jaxrl_llm.metrics.writers import WriterComponent, Writers
from jaxrl_llm.protocols import Down, Retiring, Sampler, Steered
from jaxrl_llm.rollouts.player import Player
from jaxrl_llm.train import settings
from jaxrl_llm.train.build import check_tokens, compiling, new_key, open_stage, sampled_policy
from jaxrl_llm.train.checkpoint import Checkpoints
from jaxrl_llm.train.describe import announce, describe
from jaxrl_llm.train.frozen_models import REFERENCE, AuxiliaryModel, own_sizes
from jaxrl_llm.train.progress import Progress, part
from jaxrl_llm.train.step import StageTrainer, StepResult

_log = logging.getLogger(__name__)

SIGNAL = "a signal"  # the value of Trainer.stopped where a signal stops the run


class Trainer:
    """A run in progress: `run`, a `run.Run`, on a mesh; `beside` are writers beside those of the run."""

    overlaps = False  # its own parts need the event loop

    def __init__(
        self,
        run: Any,
        run_dir: Path,
        partitioner: Partitioner,
        preemption: Preemption,
        beside: Sequence[WriterComponent] = (),
    ) -> None:
        self.config, self.run_dir, self.partitioner = run, run_dir, partitioner
        self.preemption, self.processes, self.beside = preemption, preemption.processes, beside
        self.policy = run.policy.policy(partitioner)  # first: a model that is not supported is refused at once
        self.tokenizer = run.tokenizer.load()
        check_tokens(run, self.policy, self.tokenizer, partitioner)
        for stage in run.stages:
            stage.check_depth(self.policy.architecture.layers)
        described = describe(run, self.policy)
        ahead = any(stage.max_staleness for stage in run.stages)
        self.checkpoints = Checkpoints(run_dir, run.checkpoints, deferred=ahead)
        self.sampler: Sampler = run.sampler.start(
            sampled_policy(run.sampler, self.policy), self.tokenizer, max_length=run.max_length, run_dir=run_dir
        )
        self.watching = run.watch.start(run_dir, jax.process_index())
        announce(described, main=self.processes.main)
        self.progress = Progress(self.watching)
        self.bases: dict[str, Any] = {}
        self.auxiliary: list[AuxiliaryModel] = []
        self.players: list[Player] = []  # players of environments and agents, which stages add
        self.writers = Writers.open((), run_dir, None, 0)
        self.state: Any = None  # a TrainState, from the first stage on
        self.best: float | None = None
        self.pending: dict[str, Any] | None = None  # a step whose evaluation is left to this start
        self.left: int | None = None  # the step whose checkpoint leaves its evaluation to a later start
        self.compilations = Compilations()
        self.began: float | None = None
        self.changed: list[settings.Change] = []  # changes since the run folder was written
        self.text = ""  # the gin text of this start
        self.stopped = ""  # the reason why the run stops, or ""
        self.status = 0  # exit status of the process
        self.before: dict[str, Any] | None = None  # the host's state after the last step

    # -- the run -------------------------------------------------------------------------------------------------------

    async def run(self, config: str) -> None:
        """Runs the remaining stages."""
        restored = self.open(config)
        async for stage, steps in self.stages_left(restored):
            for step in steps:
                with self.around(stage, step):
                    self.state = await self.step(stage, self.state, step)
                if self.stopped:
                    break
        self.watching.at("saving")
        self.written(self.checkpoints.wait)

    async def step(self, stage: StageTrainer, state: TrainState, step: int) -> TrainState:
        """Makes one step of the run; an evaluation that is cut short, and what comes after it, are left to the next start."""
        if stage.config.samples:
            await self.publish(state, version=step - 1)
        state, metrics, result = await self.learn(stage, state, step)
        with self.leaving(stage, state, step, metrics, result):
            if stage.evaluates(step) or self.stopped:
                self.show(step, stage.rows(result))
                metrics |= await self.evaluated(stage, state, step, metrics, result.sequences)
            metrics |= self.measures(stage, result, step)
            metrics = self.processes.broadcast(metrics)  # what the run does next depends on them
            stage.adapt(step, metrics, result.sequences)
            self.write(step, metrics)
            self.save(stage, state, step, metrics)
        return state

    async def learn(
        self, stage: StageTrainer, state: TrainState, step: int
    ) -> tuple[TrainState, dict[str, float], StepResult]:
        """Makes the stage's step, and asks whether the run stops after it."""
        state, metrics, result = await stage.step(state, step)
        metrics["time/compile_s"] = self.compilations.spent()
        self.stopped = self.stopped or self.ends(2 * step)
        return state, metrics | {"stage": float(stage.number), "update/step": float(step)}, result

    async def evaluated(
        self, stage: StageTrainer, state: TrainState, step: int, metrics: Mapping[str, float], sequences: int
    ) -> dict[str, float]:
        """Returns what an evaluation after a step measures; no signal ends it on devices of several hosts, where the step is saved before it.

        Raises:
          Stopping: a signal came before it where one is due, or comes in it.
          Down: a service is down.
        """
        if self.processes.count > 1 and self.left != step and self.saves(stage, step):
            self.save(stage, state, step, metrics, pending=sequences)
        if self.stopped == SIGNAL and stage.evaluates(step):
            raise Stopping
        if self.stopped == SIGNAL:
            return {}
        work = self.evaluate(stage, state, step)
        return await (work if self.processes.count > 1 else self.preemption.unless(work))

    def show(self, step: int, rows: Sequence[Row]) -> None:
        """Writes rollouts for people to read."""
        with self.writing():
            self.writers.rollouts(step, rows)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step, and asks whether the run stops after it."""
        with self.writing():
            self.writers.write(step, metrics)
        self.stopped = self.stopped or self.ends(2 * step + 1)

    # -- around the step -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def around(self, stage: StageTrainer, step: int) -> Iterator[None]:
        """Begins a step's clocks, traces it where that is wanted, and tells after which step the run stops.

        A signal, or a service that is down, that ends the step before anything is learned in it has the run saved as it was before.
        """
        wanted = self.processes.main and step in self.config.profile_steps
        with profiling.traced(self.run_dir / "tensorboard", wanted):
            self.progress.begin()
            self.compilations.spent()  # on what came before the step
            self.watching.at("beginning a step", step=step)
            try:
                yield
            except (Stopping, Down) as stop:
                self.stop(stop)
                if self.before is not None and self.before["step"] != self.checkpoints.latest():
                    with self.writing():
                        self.store(stage, self.before["step"], self.state, self.before)
        if self.stopped:
            self.tell_stop(step - (self.before is None or self.before["step"] < step))

    @contextlib.contextmanager
    def leaving(
        self, stage: StageTrainer, state: TrainState, step: int, metrics: dict[str, float], result: StepResult
    ) -> Iterator[None]:
        """Saves a step as it is where a signal, or a service that is down, leaves its evaluation to the next start."""
        try:
            yield
        except (Stopping, Down) as stop:
            if self.stopped != SIGNAL:
                self.stop(stop)
            metrics |= self.measures(stage, result, step)
            self.save(stage, state, step, metrics, pending=result.sequences)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Ends the run resumably where a write meets a full disk; earlier checkpoints are whole."""
        try:
            yield
        except OSError as error:
            if self.status != STOPPED:  # where a disk is full, several writes fail: the first is reported
                self.stop(error)

    def written(self, end: Callable[[], None]) -> None:
        """Calls the end of writing in the background; a disk that was full there is reported here, unless the run was stopped before."""
        before = self.stopped
        with self.writing():
            end()
        if self.stopped != before:
            print(f"stopped by {self.stopped}; the same command goes on", flush=True)

    @part("publishing", "publish")
    async def publish(self, state: TrainState, version: int) -> None:
        """Publishes the policy that a step samples from."""
        await self._serve(state, version)

    async def _serve(self, state: TrainState, version: int) -> None:
        """Publishes the policy of `state` as `version`, where the sampler serves another version."""
        base = self.bases.get("policy")
        if self.sampler.version != version and getattr(self.sampler, "adapted", False):
            await self.sampler.publish(self.policy.joined(state.policy, base), version)
        elif self.sampler.version != version:
            if self.policy is not self.policy.plain and isinstance(self.sampler, Retiring):
                self.sampler.retire()  # before the sum of base and adapters is made anew
            await self.sampler.publish(self.policy.merged(state.policy, base), version)

    @part("evaluating", "evaluate")
    async def evaluate(self, stage: StageTrainer, state: TrainState, step: int) -> dict[str, float]:
        """Evaluates a stage on its held-out data; returns the metrics and writes the first rollouts."""
        metrics = stage.measure(state)
        if stage.config.evaluations:
            await self._serve(state, step)
            found, rows = await stage.held_out.answers()
            metrics |= found
            self.show(step, rows)
        return metrics

    def measures(self, stage: StageTrainer, result: StepResult, step: int) -> dict[str, float]:
        """Returns times, speed and counts of a step."""
        seconds = self.progress.seconds
        metrics = {f"time/{name}_s": s for name, s in seconds.items()} | profiling.peak_memory()
        metrics |= diagnostics.speed(
            result.batch, self.policy.architecture, stage.config.epochs, seconds, list(self.partitioner.mesh.devices.flat), stage.layers,
        )  # fmt: skip
        metrics |= {**self.sampler.metrics(), **stage.loader.take(), "compilations": float(stage.compilations)}
        if isinstance(self.sampler, Steered):
            self.sampler.steer(metrics)
        return metrics | {"compilations/step": float(self.compilations.take())}

    def saves(self, stage: StageTrainer, step: int) -> bool:
        """Returns whether a save is due after a step."""
        return bool(self.stopped) or stage.is_last(step) or step % self.config.checkpoints.every == 0

    def save(
        self,
        stage: StageTrainer,
        state: TrainState,
        step: int,
        metrics: Mapping[str, float],
        *,
        pending: int | None = None,
    ) -> None:
        """Saves a checkpoint where one is due, and the best one where the evaluation is the best so far.

        Args:
          pending: number of sequences that the step learned from, where its evaluation is left to the start that resumes from here.
        """
        self.watching.at("saving", version=self.sampler.version)
        name = self.config.checkpoints.best
        value = metrics.get(name) if name else None
        improved = value is not None and (self.best is None or value > self.best)
        if improved:
            self.best = value
        self.before = {"stage": stage.number, "step": step, "best": self.best, **stage.host()}
        if pending is not None:
            self.before["pending"] = {"metrics": dict(metrics), "sequences": pending}
        due = self.saves(stage, step)
        with self.writing():
            if self.left == step and pending is None:
                self.checkpoints.amend(step, self.before)
            self.store(stage, step, state, self.before, last=due, best=improved)
        if pending is not None and due:
            self.left = step

    def store(self, stage: StageTrainer, step: int, state: TrainState, host: dict[str, Any], **kinds: bool) -> None:
        """Writes a checkpoint of the kinds that `Checkpoints.save` takes, and before a stage's first one its lasting reference, which all share."""
        sizes = own_sizes(stage.learner, stage.abstract)
        if stage.frozen.lasting and (not kinds or any(kinds.values())):
            host = host | self.checkpoints.keep(stage.offset, stage.frozen.params[REFERENCE], sizes)
        self.checkpoints.save(step, {"state": state, **stage.frozen.saved}, host, sizes=sizes, **kinds)

    # -- start, resume, end --------------------------------------------------------------------------------------------

    def open(self, config: str) -> int | None:
        """Compares the run with its folder and opens the frozen parameters under adapters; returns the step after which it resumes, or None."""
        restored = self.processes.broadcast(self.checkpoints.latest())
        host = {} if restored is None else self.checkpoints.host(restored)
        self.pending, self.text = host.get("pending"), config
        self.watching.at("opening", step=restored or 0)
        if restored != self.config.starts[-1] or self.pending is not None:
            number = host.get("stage", 0)
            self.changed = settings.compared(self.processes, self.run_dir, self.config, restored, number)
            base = self.config.policy.base(self.policy, jax.random.key(self.config.seed))
            self.bases = {} if base is None else {"policy": base}
        if restored is None:
            self.note(None, 0)
        return restored

    def note(self, restored: int | None, number: int) -> None:
        """Writes what reproduces the run and which settings changed, and opens the writers; called after all that may refuse the run."""
        if not self.processes.main:
            return
        for change in self.changed:
            print(f"changed after step {restored}: {change}", flush=True)
        settings.note(self.run_dir, self.config, self.changed, restored, number)
        provenance(self.run_dir, self.config.seed, self.text)
        written = restored if restored is None or self.pending is None else restored - 1
        self.writers = Writers.open((*self.config.writers, *self.beside), self.run_dir, written, self.config.starts[-1])
        if self.text and restored is None:
            self.writers.text("config", f"```\n{self.text}\n```")

    async def stages_left(self, restored: int | None) -> AsyncIterator[tuple[StageTrainer, range]]:
        """Yields each stage from that of the checkpoint on with the steps that are left of it; sets `self.state` to its first state."""
        if restored == self.config.starts[-1] and self.pending is None:
            _log.warning("%s holds a finished run (%d steps); set RUN_DIR to start another", self.run_dir, restored)
            return
        first = 0 if restored is None else self.checkpoints.host(restored)["stage"]
        for number, config in list(enumerate(self.config.stages))[first:]:
            if self.status or self.stopped:
                return
            self.watching.at("beginning", stage=config.name)
            stage = open_stage(config, self, number)
            if restored is not None and number == first:
                start, self.state = restored, self._restored(stage, restored)
                self.note(restored, number)
            else:
                first_key = jax.random.key(self.config.seed)
                params = self.config.policy.params(self.policy, first_key) if self.state is None else self.state.policy
                start, self.state = stage.offset, stage.begin(params, new_key(self.config.seed, number))
            _log.info("stage %s goes on after step %d", config.name, start)
            await stage.frozen.refresh(self.state.policy, start - stage.offset)
            stage.ahead = compiling(stage, start + 1)
            if start == 0:
                self.writers.write(0, await self.evaluate(stage, self.state, 0))
            if self.pending is not None:
                pending, self.pending, self.left = self.pending, None, start
                if not await self.catch_up(stage, start, **pending):
                    return
            self.began = self.began or time.monotonic()
            yield stage, range(start + 1, stage.offset + config.steps + 1)

    async def catch_up(self, stage: StageTrainer, step: int, metrics: dict[str, float], sequences: int) -> bool:
        """Ends the step whose evaluation an earlier start left to this one; returns whether the run goes on, which a signal ends first."""
        try:
            metrics |= await self.evaluated(stage, self.state, step, metrics, sequences)
        except (Stopping, Down) as stop:
            self.stop(stop)
            self.tell_stop(step)
            return False
        metrics = self.processes.broadcast(metrics)
        stage.adapt(step, metrics, sequences)
        self.write(step, metrics)
        self.save(stage, self.state, step, metrics)
        return not self.stopped

    def _restored(self, stage: StageTrainer, step: int) -> TrainState:
        host = self.checkpoints.whole_host(step)
        abstract, sizes = stage.abstract, own_sizes(stage.learner, stage.abstract)
        if stage.frozen.lasting and REFERENCE not in host:  # an earlier version's checkpoints hold it themselves
            abstract[REFERENCE] = stage.frozen.reference_of("float32")
        trees = self.checkpoints.restore(step, abstract, sizes)
        if stage.frozen.lasting and REFERENCE in host:
            trees[REFERENCE] = self.checkpoints.kept(stage.offset, host[REFERENCE], stage.frozen.reference_of, sizes)
        stage.resume(host, trees, as_new=self.config.resume_as_new)
        self.best = self.checkpoints.best_until(step)
        print(f"resuming from step {step} of {self.checkpoints.folder}", flush=True)
        return trees["state"]

    def ends(self, place: int) -> str:
        """Returns why this start ends at `place`, a number that grows from call to call, or ""; all processes get the same answer."""
        if self.preemption.reached(place):
            return SIGNAL
        limit = self.config.stop_after_s
        over = limit is not None and self.began is not None and time.monotonic() - self.began >= limit
        return self.processes.broadcast("train.Run.stop_after_s" if over else "")

    def stop(self, why: BaseException) -> None:
        """Ends the run after its present work, for a reason that may be gone when the same command runs again."""
        self.stopped = SIGNAL if isinstance(why, Stopping) else str(why)
        self.status = STOPPED

    def tell_stop(self, step: int) -> None:
        """Says after which step the run stops."""
        print(f"stopped after step {step} by {self.stopped}; the same command goes on", flush=True)

    async def close(self) -> None:
        """Stops the sampler and the rewards' processes and closes files; where one fails, the others are closed all the same."""
        self.watching.at("closing")
        async with contextlib.AsyncExitStack() as closing:
            closing.push(lambda _, error, __: self.watching.end(error or sys.exception()))
            closing.callback(self.written, self.writers.close)
            closing.callback(self.written, self.checkpoints.close)
            for stage in self.config.stages:
                closing.callback(components.close, stage.closing)
            for end in (*(player.close for player in self.players), *(model.stop for model in self.auxiliary)):
                closing.push_async_callback(end)
            closing.push_async_callback(self.sampler.close)
