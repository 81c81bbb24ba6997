"""Makes one step of a stage: groups are collected and packed, token stats and advantages are computed, and the learner updates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms.batch import Advantages, Sequences
from jaxrl_llm.distributed.ahead import Background
from jaxrl_llm.distributed.memory import explained
from jaxrl_llm.distributed.mesh import to_host
from jaxrl_llm.distributed.preemption import Preemption
from jaxrl_llm.experience import Group
from jaxrl_llm.learner.ahead import compile_updates
from jaxrl_llm.learner.batch import Batch
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.score import TokenStats, means_of_rollouts, token_stats, with_routes
from jaxrl_llm.learner.state import TrainState
from jaxrl_llm.learner.trajectory import bounded
from jaxrl_llm.metrics import diagnostics, rollout_rows, trajectories
from jaxrl_llm.protocols import Down, GroupLoader, Params
from jaxrl_llm.rollouts.collect import Collector
from jaxrl_llm.train import settings
from jaxrl_llm.train.evaluation import HeldOut
from jaxrl_llm.train.frozen_models import REFERENCE, FrozenModels, base_sizes
from jaxrl_llm.train.old_logprobs import TAKEN
from jaxrl_llm.train.phases import WHOLE, Phase
from jaxrl_llm.train.progress import Progress, part
from jaxrl_llm.train.stage import Stage

UNREWARDED = 3  # number of steps in a row without a valid reward, after which a run ends


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """The results of a step, from which its metrics and the rollouts for people to read are made.

    Attributes:
      batch: the groups that were learned from.
      stats: token stats, {name: float32 [S, T]}.
      advantages: the algorithm's advantages, on the host.
      measured: means of the metrics of the updates.
    """

    batch: Batch
    stats: TokenStats
    advantages: Advantages
    measured: Mapping[str, float]

    @property
    def sequences(self) -> int:
        """The number of sequences that were learned from."""
        return len(self.batch.rollouts)


@dataclass(kw_only=True, eq=False)
class StageTrainer:
    """A stage in progress.

    Attributes:
      config: the stage's configuration.
      number: the stage's number in the run, from 0.
      offset: number of the run's steps before the stage.
      learner: scores and updates, in a phase without a view, a loss or frozen parameters of its own.
      ahead: programs of the first step that are compiled while the run evaluates and samples; None where they are not.
      loader: gives the groups of each step.
      collector: scores groups again whose reward needs token stats; None where the stage samples nothing.
      frozen: the models that are not trained.
      held_out: the data that the stage is evaluated on.
      sources: names of the data sources.
      bases: {model name: frozen parameters}, of models whose adapters alone are trained; no checkpoint holds them.
      preemption: listens for signals, which end the wait for groups.
      progress: is told which part of the step the run is in.
      contents: {"data": hash, "tokenizer": hash}, by which a checkpoint identifies what it learned from.
      controls: values of the controllers of the algorithm and of the schedule.
      phase: the phase of the current step.
      unrewarded: number of steps in a row until now without a valid reward.
      aside: metrics that parts of the step measure, of its environments and agents and of the policy's own output.
    """

    config: Stage
    number: int = 0
    offset: int = 0
    learner: Learner
    ahead: Background | None = None
    loader: GroupLoader
    collector: Collector | None = None
    frozen: FrozenModels
    held_out: HeldOut
    sources: Sequence[str]
    bases: Mapping[str, Params] = field(default_factory=dict)
    preemption: Preemption
    progress: Progress
    contents: Mapping[str, str] = field(default_factory=dict)
    controls: dict[str, float] = field(default_factory=dict)
    phase: Phase = WHOLE
    unrewarded: int = 0
    aside: dict[str, float] = field(default_factory=dict)

    # -- the step ------------------------------------------------------------------------------------------------------

    async def step(self, state: TrainState, step: int) -> tuple[TrainState, dict[str, float], StepResult]:
        """Makes one step of the run; returns the new state, the step's metrics and its results."""
        self.enter(step)
        await self.frozen.refresh(state.policy, step - self.offset - 1)
        groups = await self.groups(step)
        batch = await self.pack(groups)
        batch, stats = with_routes(batch, await self.token_stats(state, batch, step))
        if self.rescores:
            batch = await self.rescored(batch, stats)
        self.check_rewards(batch)
        sequences = self.sequences(batch, stats)
        advantages = await self.advantages(sequences)
        state, measured = await self.update(state, batch, sequences, advantages, step)
        result = StepResult(batch=batch, stats=stats, advantages=advantages, measured=measured)
        metrics = self.metrics(result, step)
        self.check(metrics, state)
        return state, metrics, result

    @part("collecting", "collect")
    async def groups(self, step: int) -> list[Group]:
        """Returns the groups of a step; raises Stopping where a signal comes first.

        Where the sampler cannot draw while the learner computes, calls of rollouts in progress wait from the end of this to the next step's.
        """
        if service := self.collector and self.collector.generator.holds:
            service.flow()
        pending = self.loader.next(step)
        found = await (pending if self.preemption.processes.count > 1 else self.preemption.unless(pending))
        if service:
            await self.preemption.unless(service.hold())
        return found

    @part("scoring", "score")
    def pack(self, groups: Sequence[Group]) -> Batch:
        """Packs the groups of a step into minibatches."""
        config = self.config
        if self.ahead is not None:
            self.ahead.wait()
        if not groups:
            raise ValueError(
                f"the filter of stage {config.name!r} kept no group of a step: raise its max_draws or PROMPTS_PER_STEP, or look at "
                "reward/unfiltered: the task may be solved, or too hard"
            )
        if config.plays:
            kept = bounded(groups, config.packing, config.branches_kept)
            self.aside |= trajectories.of_groups(groups, kept)
            groups = kept.groups
        return Batch.build(
            groups, config.packing, minibatches=config.minibatches, sources=self.sources,
            response_tokens=config.response_tokens, capacity=config.sequences,
        )  # fmt: skip

    @part("scoring", "score")
    @explained("scoring")
    def token_stats(self, state: TrainState, batch: Batch, step: int) -> TokenStats:
        """Returns token stats [S, T] of the current phase but those that nothing reads at this step, and measures the policy's own where due."""
        if not (self.scores_policy(step) or self.frozen.score):
            return {}
        within = step - self.offset
        if self.phase.view is not None and (within == 1 or within % self.config.gap_every == 0):
            own = self.stats_of(self.learner, state, batch)
            self.aside |= diagnostics.gap(batch, own) | diagnostics.drift(batch, own)
        return self.stats_of(self.phase_learner, state, batch, policy=self.scores_policy(step))

    @part("scoring", "score")
    async def rescored(self, batch: Batch, stats: TokenStats) -> Batch:
        """Returns the batch with the rewards that need its token stats."""
        groups, scores = batch.groups, []
        if self.preemption.processes.main:
            assert self.collector is not None
            scores = [g.scores for g in await self.collector.rescore(groups, means_of_rollouts(groups, stats))]
        scores = self.preemption.processes.broadcast(scores)
        return replace(batch, groups=[replace(g, scores=s) for g, s in zip(groups, scores, strict=True)])

    @part("scoring", "score")
    def advantages(self, sequences: Sequences) -> Advantages:
        """Returns the algorithm's advantages, on the host."""
        return jax.tree.map(to_host, self.phase_learner.advantages(sequences))

    @part("updating", "update")
    @explained("updating")
    def update(
        self, state: TrainState, batch: Batch, sequences: Sequences, advantages: Advantages, step: int
    ) -> tuple[TrainState, dict[str, float]]:
        """Makes all updates of the step and returns the mean of their metrics; each epoch after the first deals its groups to minibatches anew."""
        learner, config, found = self.phase_learner, self.config, list[Any]()
        for epoch in range(config.epochs):
            read = batch.shuffled(config.packing, (self.learner.seed, step, epoch)) if epoch else batch
            read = read.without(config.packing, advantages.silent) if config.skip_silent else read
            minibatches = read.micro_batches(sequences, advantages, learner.algorithm.constant, learner.partitioner)
            if config.packing.tail:
                compile_updates(learner, minibatches, self.bases)
            for minibatch in minibatches:
                state, metrics = learner.update(state, minibatch, self.bases)
                found.append(metrics)
        values = jax.device_get(found)
        return state, {n: float(np.mean([v[n] for v in values])) for n in values[0]}

    # -- what the parts read -------------------------------------------------------------------------------------------

    @property
    def overlaps(self) -> bool:
        """Whether the sampler runs while the learner computes, and so needs the event loop meanwhile."""
        return self.config.max_staleness > 0

    @property
    def rescores(self) -> bool:
        """Whether the reward needs token stats."""
        config = self.config
        return config.samples and config.reward is not None and config.reward.needs_stats

    def scores_policy(self, step: int) -> bool:
        """Returns whether advantages, reward or metrics of a step depend on the policy's token stats."""
        config, needs = self.config, self.config.needs | self.phase_learner.algorithm.needs
        if not config.samples:
            return bool(needs & {"reference", "critic"})
        reads = (
            self.rescores
            or self.learner.router.replay == "R2"
            or bool(needs & {"critic", "entropy", "sum_p2", "uniform_logprob"})
        )
        return reads or config.scores(step, self.controls)

    def stats_of(self, learner: Learner, state: TrainState, batch: Batch, *, policy: bool = True) -> TokenStats:
        """Returns token stats as `learner` reads them; those of the policy and the critic only where `policy` is True."""
        params, frozen = state.params if policy else None, self.frozen
        return token_stats(learner, params, batch, self.bases, reference=frozen.reference, teacher=frozen.teacher)

    @property
    def from_sampler(self) -> bool:
        """Whether the old log-probs that advantages read are the sampler's."""
        source = self.config.old_from
        return source in ("sampler", "update") or (source == "measured" and bool(self.controls[TAKEN]))

    def sequences(self, batch: Batch, stats: TokenStats) -> Sequences:
        """Returns the unpacked batch with token stats [S, T]; old log-probs are the sampler's where the stage says so.

        The sampler has no log-probs to compare with those that are read inside the model: the weight of every token is 1 then.
        """
        if self.phase.view is not None:
            stats = {**stats, "sampler_logprobs": stats["old_logprobs"]}
        if self.config.samples and self.from_sampler:
            stats = {**stats, "old_logprobs": batch.fields["sampler_logprobs"]}
        controls = {name: self.controls[name] for name in self.config.algorithm.controls}
        return batch.sequences(stats, controls, self.config.prompts_per_step)

    # -- phases --------------------------------------------------------------------------------------------------------

    def enter(self, step: int) -> None:
        """Sets the phase of a step, of which nothing is measured yet."""
        self.aside = {}
        if self.config.schedule is not None:
            self.phase = self.config.schedule.phase(step - self.offset, self.controls)

    @cached_property
    def learners(self) -> dict[str, Learner]:
        """The learner of each phase; they share one state."""

        def learner(phase: Phase) -> Learner:
            if phase.loss is None and phase.view is None and phase.trainable is None:
                return self.learner
            loss = self.config.algorithm if phase.loss is None else phase.loss
            return replace(self.learner, algorithm=loss, capture=phase.view, trainable=phase.trainable)

        return {phase.name: learner(phase) for phase in self.config.phases}

    @property
    def phase_learner(self) -> Learner:
        """The learner of the current phase."""
        return self.learners[self.phase.name]

    @property
    def layers(self) -> int | None:
        """The number of first layers that an update of the current phase runs; None for all."""
        return None if self.phase.view is None else self.phase.view.layer + 1

    @property
    def compilations(self) -> int:
        """The number of programs compiled so far by the learners of all phases."""
        return sum(x.compilations for x in {id(x): x for x in (self.learner, *self.learners.values())}.values())

    # -- after the step ------------------------------------------------------------------------------------------------

    def evaluates(self, step: int) -> bool:
        """Returns whether the stage is evaluated after a step."""
        return self.is_last(step) or step % self.config.evaluate_every == 0

    def is_last(self, step: int) -> bool:
        """Returns whether the stage ends with a step."""
        return step == self.offset + self.config.steps

    def metrics(self, result: StepResult, step: int) -> dict[str, float]:
        """Returns metrics of the updates, of the step's rollouts and of its phase."""
        batch, stats = result.batch, result.stats
        values = {**result.measured, **diagnostics.of_rollouts(batch)}
        values |= {name: float(x) for name, x in result.advantages.metrics.items()}
        if self.config.schedule is not None:
            values["phase"] = float([phase.name for phase in self.config.phases].index(self.phase.name))
        if TAKEN in self.controls:
            values[TAKEN] = self.controls[TAKEN]
        if self.config.samples and "old_logprobs" in stats:
            values |= diagnostics.by_source(batch, stats)
            if self.phase.view is not None:
                values |= diagnostics.inside(batch, stats)
            else:
                values |= diagnostics.gap(batch, stats) | diagnostics.drift(batch, stats)
        return values | (diagnostics.staleness(batch, stats, step - 1) if self.overlaps else {}) | self.aside

    def check(self, metrics: Mapping[str, float], state: TrainState) -> None:
        """Stops after too many gradients that are not finite; warns or stops where sampler and learner disagree."""
        diagnostics.check_gradients(int(to_host(state.skipped)), self.config.max_skipped, metrics)
        diagnostics.check_gap(metrics, warn=self.config.gap_warn, stop=self.config.gap_stop)

    def check_rewards(self, batch: Batch) -> None:
        """Raises Down after UNREWARDED steps in a row in which no rollout had a valid reward."""
        had = not self.config.samples or any(group.valid().any() for group in batch.groups)
        self.unrewarded = 0 if had else self.unrewarded + 1
        if self.unrewarded >= UNREWARDED:
            raise Down(
                f"no reward could be had in {UNREWARDED} steps in a row of stage {self.config.name!r}: look at the first traceback above, and "
                "mend the reward or the service that it asks"
            )

    def adapt(self, step: int, metrics: Mapping[str, float], sequences: int) -> None:
        """Moves the controllers of the algorithm, the schedule and the gap rule after a step on `sequences` sequences."""
        before = self.controls
        self.controls = dict(self.config.algorithm.adapt(before, metrics, sequences))
        if TAKEN in before:
            self.controls |= self.config.gap_rule.moved(before, metrics, tells=self.preemption.processes.main)
        if self.config.schedule is not None:
            self.controls |= self.config.schedule.adapt(step - self.offset, self.controls, metrics)

    def rows(self, result: StepResult) -> list[rollout_rows.Row]:
        """Returns the step's first rollouts, for people to read."""
        stats = result.stats if self.config.samples else {}
        return rollout_rows.of_step(result.batch, stats, result.advantages, **self.held_out.reading)

    def measure(self, state: TrainState) -> dict[str, float]:
        """Measures the loss and its metrics on responses that are never learned from, as "eval/..."."""
        groups, learner = self.held_out.given, self.learner
        if not groups:
            return {}
        batch = Batch.build(
            groups, self.config.packing, minibatches=1, sources=self.sources, response_tokens=self.config.response_tokens,
            capacity=sum(len(g.rollouts) for g in groups),
        )  # fmt: skip
        scored = self.scores_policy(0) or self.frozen.score
        stats = self.stats_of(learner, state, batch, policy=self.scores_policy(0)) if scored else {}
        sequences = batch.sequences(stats, {n: self.controls[n] for n in self.config.algorithm.controls}, len(groups))
        advantages = jax.tree.map(to_host, learner.advantages(sequences))
        (minibatch,) = batch.micro_batches(sequences, advantages, learner.algorithm.constant, learner.partitioner)
        found = jax.device_get(learner.measure(state.params, minibatch, self.bases))
        return {f"eval/{name}": float(x) for name, x in found.items()}

    # -- state ---------------------------------------------------------------------------------------------------------

    def begin(self, params: Params, key: jax.Array) -> TrainState:
        """Returns the state that the stage starts from; frozen models copy `params`, and value models start as the stage configures them."""
        self.frozen.begin(params)
        models = {"policy": params}
        for name, source in self.config.value_models.items():
            whole = self.learner.policy.merged(params, self.bases.get("policy"))
            models[name] = source.params(self.learner.models[name], whole, key)
        return self.learner.init(models)

    @property
    def abstract(self) -> dict[str, Any]:
        """The shapes, dtypes and shardings of the arrays that a checkpoint of this stage holds."""
        return {"state": self.learner.abstract, **self.frozen.abstract}

    def host(self) -> dict[str, Any]:
        """Returns the host's state that a checkpoint of this stage holds."""
        return {
            "feed": self.loader.state(), "controls": self.controls, "bases": self._base_sizes, "phase": self.phase.name,
            "contents": dict(self.contents),
        }  # fmt: skip

    @cached_property
    def _base_sizes(self) -> dict[str, float]:
        """The mean |weight| of the frozen bases, by which a resumed run recognises them."""
        return base_sizes(self.learner, self.bases)

    def resume(self, host: Mapping[str, Any], trees: Mapping[str, Any], *, as_new: bool = False) -> None:
        """Takes up a checkpoint; `as_new` leaves the controllers where the configuration starts them.

        Raises:
          ValueError: its adapters were trained on other frozen weights, or its data or tokens are others.
        """
        settings.recognised(self.config.name, host, self.contents, self._base_sizes, as_new=as_new)
        if not as_new or host.get("contents", {}).get("data") == self.contents.get("data"):
            self.loader.restore(host["feed"])
        if not as_new:
            self.controls = dict(host["controls"])
        self.frozen.params = {n: t for n, t in trees.items() if n not in ("state", REFERENCE)}
        if REFERENCE in trees:
            self.frozen.refer(trees[REFERENCE])
