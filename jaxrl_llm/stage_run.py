"""A stage in progress: its data, its learner and its frozen models."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import diagnostics, offload, shown, teaching
from jaxrl_llm.ahead import AheadFeed
from jaxrl_llm.batch import Credit, View
from jaxrl_llm.companions import Companions
from jaxrl_llm.data.pipeline import Encoder
from jaxrl_llm.eval.evaluate import evaluate
from jaxrl_llm.experience import Prompt, ScoredGroup
from jaxrl_llm.feeds import Feed, LedFeed, SampleFeed, stats_of
from jaxrl_llm.global_batch import GlobalBatch, bare, to_device
from jaxrl_llm.hosts import Processes
from jaxrl_llm.learner import Learner
from jaxrl_llm.mesh import Partitioner, to_host
from jaxrl_llm.out_of_memory import explained
from jaxrl_llm.phase_run import PhaseRun
from jaxrl_llm.protocols import Params
from jaxrl_llm.rollouts import Asking, stopping
from jaxrl_llm.stage_parts import (
    companions_of,
    feed_of,
    given_groups,
    learner_of,
    new_key,
    say,
    teacher_of,
    value_bases,
)
from jaxrl_llm.stages import Stage
from jaxrl_llm.train_state import TrainState

_log = logging.getLogger(__name__)

VIEW_NAMES = {"logprob": "old_logprobs", "value": "values"}


@dataclass(kw_only=True, eq=False)
class StageRun:
    """A stage in progress.

    Attributes:
      config: what the stage is.
      number: its place in the run.
      learner: scores and updates.
      phases: the phases of the stage, and their learners.
      feed: gives the groups of each step.
      asking: asks the sampler, for evaluations too.
      held_out: encoded prompts of each evaluation.
      measured: groups of responses that are measured at each evaluation and never learned from.
      sources: names of the data sources.
      teacher: scores samples, where the algorithm needs it.
      companions: the models that the rewards ask.
      frozen: {"reference": parameters}, where the algorithm needs it, and the copies of companions that follow the policy.
      controls: values of the controllers.
      seed: of the run, for the values of new parameters.
      bases: {model name: frozen parameters}, of models whose adapters alone are trained; no checkpoint holds them.
      processes: those of the run.
    """

    config: Stage
    number: int
    learner: Learner
    phases: PhaseRun
    feed: Feed
    asking: Asking
    held_out: Sequence[Sequence[Prompt]]
    sources: Sequence[str]
    companions: Companions
    measured: Sequence[ScoredGroup] = ()
    teacher: teaching.Teacher | None = None
    frozen: dict[str, Params] = field(default_factory=dict)
    controls: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    bases: dict[str, Params] = field(default_factory=dict)
    processes: Processes = field(default_factory=Processes)

    @classmethod
    def open(cls, config: Stage, training: Any, number: int) -> "StageRun":
        """Reads and encodes the data and prepares the learner; nothing is compiled yet.

        Args:
          training: the run in progress: policy, tokenizer, sampler, seed.
        """
        if config.max_staleness and not getattr(training.sampler, "overlaps", False):
            raise ValueError(
                f"Stage.max_staleness={config.max_staleness} of stage {config.name!r} samples while the learner updates, which a sampler "
                "on the learner's own devices cannot: include gin/samplers/vllm.gin, or set MAX_STALENESS = 0"
            )
        settings = stopping(config.settings, training.tokenizer)
        encoder = Encoder(
            tokenizer=training.tokenizer, max_prompt_tokens=config.max_prompt_tokens, max_response_tokens=config.settings.max_tokens,
            truncation=config.truncation, template_kwargs=config.template_kwargs,
        )  # fmt: skip
        rows = config.data.rows()
        ends = [[row.source, row.id] for row in (*rows[:1], *rows[-1:])]
        training.processes.same(f"the rows of stage {config.name!r}", [len(rows), ends])
        together = training.processes if getattr(training.sampler, "everywhere", False) else Processes()
        asking = Asking(
            sampler=training.sampler, tokenizer=training.tokenizer, environment=config.environment, marker=config.marker,
            max_turns=config.max_turns, processes=together,
        )  # fmt: skip
        seed = training.config.seed
        feed = feed_of(config, encoder, rows, replace(asking, counters=Counter()), settings, training)
        say(f"stage {config.name}: {len(rows)} rows", training.processes.summed(encoder.counts()))
        held_out = []
        for evaluation in config.evaluations:
            other = replace(encoder, max_response_tokens=None)
            held_out.append(other.prompts(list(evaluation.data.rows())[: evaluation.limit]))
            say(f"evaluation {evaluation.name}: {len(held_out[-1])} prompts", other.counts())
        unseen = [] if config.held_out is None else list(config.held_out.rows())
        measured = given_groups(config, encoder, unseen, seed) if unseen else []
        learner = learner_of(config, training.policy, seed)
        return cls(
            config=config, number=number, learner=learner, phases=PhaseRun(config=config, learner=learner), feed=feed, asking=asking, held_out=held_out,
            sources=sorted({r.source for r in (*rows, *unseen)}), measured=measured, teacher=teacher_of(config, training, learner),
            companions=companions_of(config, training), controls=config.controls, seed=seed,
            bases=dict(training.bases) | value_bases(config, learner, new_key(seed, number)), processes=training.processes,
        )  # fmt: skip

    # -- state ---------------------------------------------------------------------------------------------------------

    def begin(self, params: Params) -> TrainState:
        """The state the stage starts from; its reference is a copy of `params`, its value models begin as the stage says."""
        if "reference" in self.config.needs:
            away = self.config.offload_reference
            self.frozen["reference"] = offload.to_host(params) if away else jax.tree.map(jnp.copy, params)
        self.frozen |= self.companions.begin(params)
        models = {"policy": params}
        for name, source in self.config.value_models.items():
            whole = self.learner.policy.merged(params, self.bases.get("policy"))
            models[name] = source.params(self.learner.models[name], whole, new_key(self.seed, self.number))
        return self.learner.init(models)

    @property
    def abstract(self) -> dict[str, Any]:
        """What a checkpoint of this stage holds on the device."""
        trees: dict[str, Any] = {"state": self.learner.abstract}
        if "reference" in self.config.needs:
            shapes = self.learner.policy.abstract()
            trees["reference"] = offload.shapes_on_host(shapes) if self.config.offload_reference else shapes
        return trees | self.companions.abstract

    def host(self) -> dict[str, Any]:
        """What a checkpoint of this stage holds of the host."""
        return {
            "feed": self.feed.state(), "controls": self.controls, "bases": self._base_sizes, "phase": self.phases.phase.name,
        }  # fmt: skip

    @cached_property
    def _base_sizes(self) -> dict[str, float]:
        """Mean |weight| of the frozen bases, by which a checkpoint knows them again."""
        return {n: float(np.mean([jnp.mean(jnp.abs(x)) for x in jax.tree.leaves(b)])) for n, b in self.bases.items()}

    def resume(self, host: Mapping[str, Any], trees: Mapping[str, Any]) -> None:
        """Takes up a checkpoint.

        Raises:
          ValueError: its adapters were trained on other frozen weights.
        """
        for name, size in host.get("bases", {}).items():
            if not np.isclose(self._base_sizes.get(name, np.nan), size, rtol=1e-4):
                raise ValueError(
                    f"the adapters of the {name} in the checkpoint were trained on other frozen weights: set SEED and "
                    "policy_source.PolicySource as they were, or give the run another RUN_DIR"
                )
        self.feed.restore(host["feed"])
        self.controls = dict(host["controls"])
        self.frozen = {n: t for n, t in trees.items() if n != "state"}

    # -- a step --------------------------------------------------------------------------------------------------------

    @property
    def partitioner(self) -> Partitioner:
        return self.learner.partitioner

    def pack(self, groups: Sequence[ScoredGroup]) -> GlobalBatch:
        """The step's groups as packed mini-batches."""
        config = self.config
        if not groups:
            raise ValueError(
                f"the filter of stage {config.name!r} kept no group of a step: raise its max_draws or PROMPTS_PER_STEP, or look at "
                "reward/unfiltered: the task may be solved, or too hard"
            )
        return GlobalBatch.build(
            groups, config.packing, minibatches=config.minibatches, sources=self.sources,
            response_tokens=config.response_tokens, capacity=config.sequences,
        )  # fmt: skip

    def _scores(self, step: int) -> bool:
        """Whether credit, reward or the step's metrics depend on the policy's streams."""
        config, needs = self.config, self.config.algorithm.needs
        if not config.samples:
            return bool(needs & {"reference", "critic"})
        reads = self.rescores or bool(needs & {"critic", "entropy", "sum_p2", "uniform_logprob"})
        return reads or config.old_logprobs == "learner" or step % config.score_every == 0

    @explained("scoring")
    def score(self, state: TrainState, batch: GlobalBatch, step: int = 0) -> dict[str, np.ndarray]:
        """The learner's streams [S, T] under their names in the view; those that nothing reads at `step` are left out."""
        policy = self._scores(step)
        if not (policy or "reference" in self.frozen or self.teacher is not None):
            return {}
        if self.phases.due:
            self.phases.measure(batch, self._streams(self.learner, state, batch))
        return self._streams(self.phases.present, state, batch, policy=policy)

    def _streams(
        self, learner: Learner, state: TrainState, batch: GlobalBatch, *, policy: bool = True
    ) -> dict[str, np.ndarray]:
        """What the models say of the batch where `learner` reads them; the policy and the critic only where asked."""
        device = [to_device(bare(rows), self.partitioner) for rows in batch.rows]
        streams: dict[str, np.ndarray] = {}
        # It travels, where it has to, while the policy is scored.
        reference = offload.to_device(self.frozen["reference"]) if "reference" in self.frozen else None
        if policy:
            scored = [learner.score(state.params, b, self.bases) for b in device]
            streams = {
                VIEW_NAMES.get(n, n): batch.unpack([to_host(s[m][n]) for s in scored])
                for m in scored[0]
                for n in scored[0][m]
            }
        if reference is not None:
            found = [learner.score_frozen(reference, b, self.bases) for b in device]
            streams["ref_logprobs"] = batch.unpack([to_host(x) for x in found])
        if self.teacher is not None:
            streams["teacher_logprobs"] = batch.unpack([to_host(self.teacher.logprobs(b)) for b in device])
        return streams

    @property
    def rescores(self) -> bool:
        """Whether the reward waits for the learner's statistics."""
        config = self.config
        return config.samples and config.reward is not None and config.reward.needs_stats

    async def rescore(self, batch: GlobalBatch, streams: Mapping[str, np.ndarray]) -> GlobalBatch:
        """The batch with rewards that needed the learner's statistics."""
        groups = batch.groups
        if self.processes.main:
            feed = self.feed.feed if isinstance(self.feed, LedFeed) else self.feed
            assert isinstance(feed, SampleFeed | AheadFeed)
            groups = await feed.collector.rescore(groups, stats_of(groups, streams))
        return replace(batch, groups=self.processes.broadcast(groups))

    def view(self, batch: GlobalBatch, streams: Mapping[str, np.ndarray]) -> View:
        """The step's view; old log-probs are the sampler's where the stage says so."""
        streams = self.phases.seen(streams)
        if self.config.samples and self.config.old_logprobs == "sampler":
            streams = {**streams, "old_logprobs": batch.fields["sampler_logprobs"]}
        return batch.view(streams, self._controls, self.config.prompts_per_step)

    @property
    def _controls(self) -> dict[str, float]:
        """The controllers that the algorithm reads."""
        return {name: self.controls[name] for name in self.config.algorithm.controls}

    def credit(self, batch: GlobalBatch, streams: Mapping[str, np.ndarray]) -> Credit:
        """The algorithm's credit, on the host."""
        return jax.device_get(self.phases.present.advantages(self.view(batch, streams)))

    @explained("updating")
    def update(
        self, state: TrainState, batch: GlobalBatch, streams: Mapping[str, np.ndarray], credit: Credit
    ) -> tuple[TrainState, dict[str, float]]:
        """All updates of the step, and the mean of their metrics."""
        minis = batch.batches(
            self.view(batch, streams), credit, self.phases.present.algorithm.constant, self.partitioner
        )
        found = []
        for _ in range(self.config.epochs):
            for mini in minis:
                state, metrics = self.phases.present.update(state, mini, self.bases)
                found.append(metrics)
        values = jax.device_get(found)
        return state, {n: float(np.mean([v[n] for v in values])) for n in values[0]}

    def describe(self, batch: GlobalBatch, streams: Mapping[str, np.ndarray], credit: Credit) -> dict[str, float]:
        """What the host knows of the step."""
        values = diagnostics.of_rollouts(batch) | {n: float(x) for n, x in credit.metrics.items()}
        return values | self.phases.describe(batch, streams)

    def check(self, metrics: Mapping[str, float], state: TrainState) -> None:
        """Warns or stops where sampler and learner disagree, and stops after too many gradients that are not finite."""
        config, skipped = self.config, int(to_host(state.skipped))
        if skipped > config.max_skipped:
            raise FloatingPointError(
                f"{skipped} updates in a row had a gradient that is not finite (loss {metrics['loss/total']}): lower "
                "Optimizer.learning_rate, or look at the last rollouts; the checkpoints from before are whole"
            )
        if (size := metrics.get("gap/mean", 0.0)) > config.gap_stop:
            raise FloatingPointError(
                f"learner and sampler disagree by {size:.3g} nats a token on average, more than Stage.gap_stop={config.gap_stop}: "
                "is the sampler's model, dtype or temperature another one?"
            )
        lags = [int(name.removeprefix("gap/lag")) for name in metrics if name.startswith("gap/lag")]
        lag = min(lags, default=0)  # older tokens differ by what was learned since
        if (size := metrics.get(f"gap/lag{lag}", size)) > config.gap_warn:
            _log.warning(
                "learner and sampler disagree by %.3g nats a token on average%s (Stage.gap_warn=%g)",
                size, f", on tokens of {lag} versions before, part of which was learned since" if lag else "", config.gap_warn,
            )  # fmt: skip

    def adapt(self, step: int, metrics: Mapping[str, float], sequences: int) -> None:
        """Moves the controllers of the algorithm and of the schedule after a step of the stage."""
        self.controls = dict(self.config.algorithm.adapt(self.controls, metrics, sequences))
        if self.config.schedule is not None:
            self.controls |= self.config.schedule.adapt(step, self.controls, metrics)

    def rows_to_read(self, batch: GlobalBatch, streams: Mapping[str, np.ndarray], credit: Credit) -> list[shown.Row]:
        """The step's first rollouts, for people to read."""
        streams = streams if self.config.samples else {}
        return shown.of_step(batch, streams, credit, **self._reading)

    @property
    def _reading(self) -> dict[str, Any]:
        """How rollouts are shown."""
        config = self.config
        return {"tokenizer": self.asking.tokenizer, "rollouts": config.show_rollouts, "tokens": config.show_tokens}

    async def refresh(self, state: TrainState, steps: int) -> None:
        """Gives companions the weights that are due after `steps` steps of the stage."""
        await self.companions.refresh(self.frozen, state.policy, steps)

    async def evaluate(self) -> tuple[dict[str, float], list[shown.Row]]:
        """All evaluations of the stage, with the weights that the sampler holds, and their first rollouts, to be read."""
        led = self.processes.count > self.asking.processes.count
        found = await self._evaluated() if self.processes.main or not led else ({}, [])
        return self.processes.broadcast(found[0]), found[1]

    async def _evaluated(self) -> tuple[dict[str, float], list[shown.Row]]:
        metrics: dict[str, float] = {}
        rows: list[shown.Row] = []
        for evaluation, prompts in zip(self.config.evaluations, self.held_out, strict=True):
            reward = evaluation.reward or self.config.reward
            if reward is None:
                raise ValueError(
                    f"evaluation {evaluation.name!r} has no reward: set Evaluation.reward, or Stage.reward of stage {self.config.name!r}"
                )
            asked = replace(evaluation, settings=stopping(evaluation.settings, self.asking.tokenizer))
            found, groups = await evaluate(asked, prompts, self.asking, reward)
            metrics |= found
            rows += shown.held_out(evaluation.name, list(evaluation.kinds), groups, **self._reading)
        return metrics, rows

    def measure(self, state: TrainState) -> dict[str, float]:
        """The loss and its metrics on responses that are never learned from, as "eval/..."."""
        if not self.measured:
            return {}
        batch = GlobalBatch.build(
            self.measured, self.config.packing, minibatches=1, sources=self.sources, response_tokens=self.config.response_tokens,
            capacity=sum(len(g.rollouts) for g in self.measured),
        )  # fmt: skip
        view = batch.view(self.score(state, batch), self._controls, len(self.measured))
        credit = jax.device_get(self.learner.advantages(view))
        (mini,) = batch.batches(view, credit, self.config.algorithm.constant, self.partitioner)
        found = jax.device_get(self.learner.measure(state.params, mini, self.bases))
        return {f"eval/{name}": float(x) for name, x in found.items()}
