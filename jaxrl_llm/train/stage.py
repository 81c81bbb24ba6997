"""The configuration of a stage: its algorithm, its data and models, and the sizes of its steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxrl_llm import components
from jaxrl_llm.algorithms.grpo import PolicyGradient
from jaxrl_llm.eval.evaluate import Evaluation
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.learner.packing import Packing
from jaxrl_llm.learner.router import Router
from jaxrl_llm.models.sources import ModelSource, ValueSource
from jaxrl_llm.protocols import (
    NEEDS,
    AgentFactory,
    Algorithm,
    Dataset,
    EnvironmentFactory,
    Filter,
    Marker,
    Needing,
    Pairing,
    Reward,
    Schedule,
)
from jaxrl_llm.rollouts.curriculum import Curriculum
from jaxrl_llm.rollouts.episodes import Episodes
from jaxrl_llm.train import old_logprobs as old
from jaxrl_llm.train.phases import WHOLE, Phase

# Needs that cost a model or rollouts, which a stage holds for all its phases.
HELD = frozenset({"reference", "critic", "reward_model", "teacher", "teacher_divergence", "greedy"})


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One algorithm on one dataset for a number of steps; stages of a run follow each other on the same policy.

    Attributes:
      name: name of the stage in logs.
      algorithm: the objective.
      schedule: the phases of the stage, which differ in what is minimised, read and trained; None is one phase, the whole model.
      gap_every: number of steps between measurements of the policy's own output in a phase that reads another view; the first step has one.
      data: the dataset.
      optimizer: optimizer of the policy, or of the reward model where the algorithm trains one.
      critic: source of the critic, for an algorithm that needs one; others ignore it.
      critic_optimizer: optimizer of the critic.
      reward_model: source of the reward model, for an algorithm that trains one, by `optimizer`; the policy stays as it is.
      teacher: the model that a distilling algorithm learns from; frozen.
      critic_warmup_steps: number of first steps, in which only the critic learns.
      steps: number of steps of this stage.
      prompts_per_step: number of prompts of a step (demonstrations, chunks or pairs, where the algorithm learns from these).
      group_size: number of rollouts of a prompt.
      minibatches: number of minibatches of whole groups that a step is split into; each gives one update per epoch.
      epochs: number of passes over a step's groups.
      settings: sampling settings of training samples, which must be drawn from the plain tempered softmax.
      reward: scores the rollouts; it may be None where `environment` or `agent` gives rewards.
      filter: which groups are learned from; None keeps all.
      curriculum: draws prompts that were all right, or all wrong, lately less often; None draws all alike.
      pairing: prefers and rejects samples of a prompt, for a loss of preferences that learns from samples; None for other algorithms.
      environment: answers the policy between turns; None for a single turn.
      agent: a program that owns its loop and reaches the policy by a gateway; None for a single turn.
      episodes: settings of rollouts that an environment or an agent plays.
      max_turns: largest number of turns of the policy with an environment.
      branches_kept: largest number of branches of a rollout that are learned from, the last ones; the tokens of others are counted. None keeps all.
      marker: names ranges of a response's tokens, such as its thought; None names none.
      max_prompt_tokens: longer prompts are treated by `truncation`.
      truncation: "drop", "left" (loses its beginning) or "error".
      template_kwargs: keyword arguments of the chat template, such as {"enable_thinking": False}.
      packing: the shape of a micro-batch.
      router: the routers' replay and balance where the policy has experts; others ignore it.
      old_logprobs: "learner" scores old log-probs by a forward pass, "sampler" takes the sampler's, "update" those of the update's own
        pass, which are the policy's before the update where a step makes one. "auto" is "update" where that is possible, and elsewhere
        the sampler's while `gap_rule` allows it. Advantages read the sampler's, except with "learner" and where `gap_rule` has the learner score.
      gap_rule: when "auto" takes the sampler's in a step of several updates.
      offload_reference: keep the reference policy in the host's pinned memory; it moves to the device while a step is scored.
      reference_every: number of steps after which the reference takes the policy's weights anew, as iterations of preference losses do; None keeps
        those that the stage began with.
      reference_dtype: element type of the reference policy's weights, "float32" or "bfloat16". None is the policy's compute dtype: the
        weights are rounded to it in each product, so that the reference's log-probs are those of float32 weights, bit for bit, and a
        bfloat16 run holds and stores half the bytes.
      score_every: with "sampler", number of steps between forward passes that measure entropy and the gap to the sampler; other
        steps need none, unless the algorithm or the reward reads token stats.
      skip_silent: leave sequences whose advantages are all 0 out of the rows that updates read, which changes no update; means of
        metrics over tokens are then those of the other sequences.
      evaluations: held-out datasets whose prompts the policy answers.
      held_out: demonstrations or pairs that are never learned from: loss and metrics on them are measured at each evaluation.
      evaluate_every: number of steps of the run between evaluations; the last step is always evaluated, and the untrained policy too.
      gap_warn: mean |log-prob gap| between learner and sampler above which a warning is printed.
      gap_stop: the gap above which the run stops.
      max_skipped: number of updates in a row whose gradient is not finite, after which the run stops.
      max_staleness: number of versions that a sample may be behind the policy that learns from it; where it is k > 0, the next k batches
        are sampled while the learner updates, by a sampler outside the learner's process. An environment or an agent may have the embedded
        sampler: its rollouts continue meanwhile, and calls that come while the learner computes wait for the next publication.
      show_rollouts: number of rollouts written to rollouts.jsonl at each evaluation step, of the step and of each evaluation's kinds.
      show_tokens: number of tokens of each such rollout whose log-prob, entropy and advantage are written; 0 writes none.
    """

    name: str
    algorithm: Algorithm
    schedule: Schedule | None = None
    gap_every: int = 1
    data: Dataset
    optimizer: Optimizer
    critic: ValueSource | None = None
    critic_optimizer: Optimizer | None = None
    reward_model: ValueSource | None = None
    teacher: ModelSource | None = None
    critic_warmup_steps: int = 0
    steps: int
    prompts_per_step: int = 32
    group_size: int = 1
    minibatches: int = 1
    epochs: int = 1
    settings: SamplingParams = field(default_factory=SamplingParams)
    reward: Reward | None = None
    filter: Filter | None = None
    curriculum: Curriculum | None = None
    pairing: Pairing | None = None
    environment: EnvironmentFactory | None = None
    agent: AgentFactory | None = None
    episodes: Episodes = field(default_factory=Episodes)
    max_turns: int = 8
    branches_kept: int | None = None
    marker: Marker | None = None
    max_prompt_tokens: int = 512
    truncation: Literal["drop", "left", "error"] = "drop"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    packing: Packing = field(default_factory=Packing)
    router: Router = field(default_factory=Router)
    old_logprobs: Literal["learner", "sampler", "update", "auto"] = "learner"
    gap_rule: old.GapRule = field(default_factory=old.GapRule)
    offload_reference: bool = False
    reference_every: int | None = None
    reference_dtype: Literal["float32", "bfloat16"] | None = None
    score_every: int = 1
    skip_silent: bool = False
    evaluations: Sequence[Evaluation] = ()
    held_out: Dataset | None = None
    evaluate_every: int = 50
    gap_warn: float = 0.05
    gap_stop: float = 1.0
    max_skipped: int = 5
    max_staleness: int = 0
    show_rollouts: int = 8
    show_tokens: int = 1024

    def __post_init__(self) -> None:
        components.choices(self)
        components.at_least(self, 1, "steps", "prompts_per_step", "group_size", "minibatches", "epochs", "score_every")
        components.at_least(
            self, 1, "max_prompt_tokens", "evaluate_every", "gap_every", "max_turns", "branches_kept", "reference_every"
        )
        if self.environment is not None and self.agent is not None:
            raise ValueError(
                f"stage {self.name!r} has an environment and an agent: set one of Stage.environment and Stage.agent"
            )
        if self.prompts_per_step % self.minibatches:
            raise ValueError(
                f"Stage.prompts_per_step ({self.prompts_per_step}) of stage {self.name!r} does not split into "
                f"{self.minibatches} mini-batches of whole groups: set Stage.minibatches to a divisor of it"
            )
        if unknown := self.algorithm.needs - NEEDS:
            raise ValueError(
                f"{type(self.algorithm).__name__}.needs names {sorted(unknown)}; known are {sorted(NEEDS)}"
            )
        if "critic" in self.algorithm.needs:
            self._check_critic()
        if "reward_model" in self.algorithm.needs and self.reward_model is None:
            raise ValueError(
                f"{type(self.algorithm).__name__} trains a reward model and Stage.reward_model of stage {self.name!r} is not set: "
                "include gin/algorithms/reward_model.gin after gin/base.gin, or set REWARD_MODEL = @sources.ValueSource()"
            )
        if self.taught and self.teacher is None:
            raise ValueError(
                f"{type(self.algorithm).__name__} learns from a teacher and Stage.teacher of stage {self.name!r} is not set: include "
                "gin/algorithms/distill.gin after gin/base.gin and set TEACHER_PATH to a Hugging Face folder or a run folder"
            )
        if self.max_staleness < 0 or (self.max_staleness and not self.samples):
            raise ValueError(
                f"Stage.max_staleness of stage {self.name!r} must be >= 0, and 0 where nothing is sampled (got {self.max_staleness}): "
                "set MAX_STALENESS"
            )
        self._check_phases()
        if self.skip_silent:
            self._check_silent()
        self._check_pairing()
        if self.samples:
            self._check_sampling()

    def _check_phases(self) -> None:
        held = self.needs & HELD
        names = [phase.name for phase in self.phases]
        if len(set(names)) < len(names):
            raise ValueError(f"the phases of stage {self.name!r} need different names (got {names})")
        for phase in self.phases:
            loss = self.algorithm if phase.loss is None else phase.loss
            if missing := (loss.needs & HELD) - held:
                raise ValueError(
                    f"phase {phase.name!r} of stage {self.name!r} learns by {type(loss).__name__}, which needs "
                    f"{sorted(missing)}, and the stage's algorithm does not: give both the same coefficients"
                )
            if loss.learns_from != self.algorithm.learns_from:
                raise ValueError(
                    f"phase {phase.name!r} of stage {self.name!r} learns from {loss.learns_from} and the stage's algorithm from "
                    f"{self.algorithm.learns_from}: make it a stage of its own"
                )
            if phase.view is None:
                continue
            if self.old_logprobs != "learner" or (self.reward is not None and self.reward.needs_stats):
                raise ValueError(
                    f"phase {phase.name!r} of stage {self.name!r} reads log-probs inside the model, which neither the sampler has nor "
                    "a reward wants: set Stage.old_logprobs = 'learner', and a reward that needs no statistics"
                )

    def _check_silent(self) -> None:
        losses = [self.algorithm, *(phase.loss for phase in self.phases if phase.loss is not None)]
        for loss in losses:
            if not (isinstance(loss, PolicyGradient) and loss.silent):
                raise ValueError(
                    f"Stage.skip_silent of stage {self.name!r} is for policy gradients to which a sequence of zero advantage adds nothing (got "
                    f"{type(loss).__name__}): set it to False, or entropy_coef and kl_coef of the algorithm to 0"
                )

    def _check_pairing(self) -> None:
        name, asked = type(self.algorithm).__name__, "sides" in self.algorithm.needs
        if asked and self.pairing is None:
            raise ValueError(
                f"{name} learns preferences among the policy's own samples and Stage.pairing of stage {self.name!r} is not set: include "
                "gin/algorithms/online_dpo.gin after gin/base.gin, or set PAIRING = @pairs.BestAgainstWorst()"
            )
        if self.pairing is None:
            return
        if not asked:
            raise ValueError(
                f"stage {self.name!r} has Stage.pairing and {name} learns from no preferences among samples: set PAIRING = None, or "
                "answers_of = 'policy' of a loss of preferences"
            )
        if self.reward is not None and self.reward.needs_stats:
            raise ValueError(
                f"stage {self.name!r} prefers samples before the learner has the statistics that its reward needs: use another reward"
            )
        if self.pairing.demonstrates and (self.plays or self.old_logprobs != "learner"):
            raise ValueError(
                f"stage {self.name!r} prefers the dataset's responses, which no sampler has drawn and no environment answers: set "
                "Stage.old_logprobs = 'learner', and neither Stage.environment nor Stage.agent"
            )

    def _check_critic(self) -> None:
        name = type(self.algorithm).__name__
        for binding, value in (("critic", self.critic), ("critic_optimizer", self.critic_optimizer)):
            if value is None:
                raise ValueError(
                    f"{name} learns with a critic and Stage.{binding} of stage {self.name!r} is not set: include "
                    "gin/algorithms/ppo.gin after gin/base.gin, or set CRITIC = @sources.ValueSource()"
                )
        if not 0 <= self.critic_warmup_steps < self.steps:
            raise ValueError(
                f"Stage.critic_warmup_steps ({self.critic_warmup_steps}) of stage {self.name!r} must be at least 0 and less than its "
                f"{self.steps} steps: set CRITIC_WARMUP_STEPS"
            )

    def _check_sampling(self) -> None:
        name = type(self.algorithm).__name__
        if self.reward is None and not self.plays:
            raise ValueError(
                f"{name} learns from samples and stage {self.name!r} has no reward: set Stage.reward, or for a function reward=FILE.py:NAME"
            )
        if self.reward is not None and not isinstance(self.reward, Reward):
            raise ValueError(
                f"REWARD (train.Stage.reward of stage {self.name!r}) must be a reward component (got {self.reward!r}): for a function, include "
                "gin/rewards/function.gin and set REWARD_FUNCTION = 'FILE.py:NAME'"
            )
        if self.held_out is not None:
            raise ValueError(
                f"stage {self.name!r} learns from samples and Stage.held_out measures given responses: set HELD_OUT = None; "
                "Stage.evaluations measure samples"
            )
        if (self.filter or self.curriculum) is not None and self.reward is not None and self.reward.needs_stats:
            raise ValueError(
                f"stage {self.name!r} filters groups before the learner has the statistics that its reward needs: "
                "set FILTER and Stage.curriculum to None, or use another reward"
            )
        if self.group_size < self.least_samples:
            raise ValueError(f"{name} needs group_size >= {self.least_samples} (got {self.group_size}): set GROUP_SIZE")
        if not self.settings.plain:
            raise ValueError(
                f"training samples of stage {self.name!r} must be drawn from the plain tempered softmax, whose log-probs the learner "
                f"computes (got {self.settings}): leave top_k, top_p, min_p, repetition_penalty and adapter of SamplingParams at their defaults "
                "and temperature > 0; evaluations may set them"
            )
        old.check(self)
        needed = self.max_prompt_tokens + self.response_tokens - 1
        if needed > self.packing.row_tokens:
            raise ValueError(
                f"a prompt of {self.max_prompt_tokens} tokens with a response of {self.settings.max_tokens} takes {needed} positions, "
                f"and a row has {self.packing.row_tokens}: set train.Packing.row_tokens >= {needed}, or lower the limits"
            )

    @property
    def samples(self) -> bool:
        """Whether the algorithm learns from the policy's own samples."""
        return self.algorithm.learns_from == "samples"

    @property
    def taught(self) -> bool:
        """Whether the algorithm learns from a teacher."""
        return not self.algorithm.needs.isdisjoint(("teacher", "teacher_divergence"))

    @property
    def least_samples(self) -> int:
        """The smallest number of samples of a prompt that leaves a learning signal."""
        if self.pairing is None:
            return self.algorithm.group_size_at_least
        return 1 if self.pairing.demonstrates else max(self.algorithm.group_size_at_least, 2)

    @property
    def closing(self) -> tuple[Any, ...]:
        """The components that may hold processes or connections."""
        return self.reward, self.environment, self.agent, [e.reward for e in self.evaluations]

    @property
    def plays(self) -> bool:
        """Whether an environment or an agent plays the rollouts."""
        return self.environment is not None or self.agent is not None

    @property
    def phases(self) -> Sequence[Phase]:
        """All phases that a step of the stage may be in."""
        return (WHOLE,) if self.schedule is None else self.schedule.phases

    @property
    def needs(self) -> frozenset[str]:
        """The needs of the algorithm, the schedule and the reward, as names of NEEDS."""
        asking = [x for x in (self.schedule, self.reward if self.samples else None) if isinstance(x, Needing)]
        return self.algorithm.needs.union(*(x.needs for x in asking))

    @property
    def controls(self) -> dict[str, float]:
        """The controllers of the algorithm, the schedule and the gap rule, with the values that the stage starts from."""
        measured = self.gap_rule.controls if self.old_from == "measured" else {}
        return {**self.algorithm.controls, **({} if self.schedule is None else self.schedule.controls), **measured}

    @property
    def old_from(self) -> str:
        """The source of old log-probs: "learner", "sampler", "update" or, by `gap_rule`, "measured"."""
        return old.automatic(self) if self.old_logprobs == "auto" else self.old_logprobs

    def scores(self, step: int, controls: Mapping[str, float]) -> bool:
        """Returns whether a step has a scoring pass for its old log-probs or their measure."""
        if self.old_from == "measured":
            return self.gap_rule.measures(controls, step)
        return self.old_from == "learner" or (self.old_from == "sampler" and step % self.score_every == 0)

    @property
    def sequences(self) -> int:
        """The largest number of sequences of a step."""
        sampled = self.group_size + ("greedy" in self.algorithm.needs)
        sampled = max(sampled, 2) if self.pairing is not None else sampled
        per_prompt = {"samples": sampled, "pairs": 2}.get(self.algorithm.learns_from, 1)
        return self.prompts_per_step * per_prompt

    @property
    def response_tokens(self) -> int:
        """The largest number of tokens of a response or a chunk, including the token that ends a response where a reward model is trained."""
        if self.algorithm.learns_from == "documents":
            return self.packing.row_tokens
        return self.settings.max_tokens + ("reward_model" in self.algorithm.needs)

    @property
    def value_models(self) -> dict[str, ValueSource]:
        """The sources of the value models that the algorithm needs, by name."""
        known = {"critic": self.critic, "reward_model": self.reward_model}
        return {name: x for name, x in known.items() if x is not None and name in self.algorithm.needs}

    @property
    def updates(self) -> int:
        """The number of optimizer updates of the stage."""
        return self.steps * self.minibatches * self.epochs

    def check_depth(self, layers: int) -> None:
        """Raises ValueError where the phases do not fit a model of `layers` layers."""
        if self.schedule is not None:
            self.schedule.check(layers)

    def check_devices(self, batch_shards: int) -> None:
        """Raises ValueError where rows do not divide over the mesh."""
        if self.packing.rows == "auto":
            raise ValueError(
                f"train.Packing.rows of stage {self.name!r} is 'auto', which a launch resolves for its device before the run is built: "
                "`python -m jaxrl_llm.tools.plan --fit` prints rows for any device"
            )
        if self.packing.rows % batch_shards or self.packing.tail % batch_shards:
            raise ValueError(
                f"train.Packing.rows ({self.packing.rows}) or tail ({self.packing.tail}) of stage {self.name!r} does not divide over the {batch_shards} shards of "
                f"data x fsdp x expert: set them to multiples of {batch_shards}"
            )
