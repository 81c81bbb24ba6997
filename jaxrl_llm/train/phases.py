"""Phases of a stage: where log-probs are read from, which loss is minimised, what learns; and BuPO's and TokenBuncher's schedules."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxrl_llm import components
from jaxrl_llm.algorithms.token_noiser import TokenNoiser
from jaxrl_llm.learner.optimizer import Trainable
from jaxrl_llm.models.architecture import Capture
from jaxrl_llm.protocols import Algorithm


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of a stage, which says how its steps score and learn.

    Attributes:
      name: name of the phase in metrics and checkpoints.
      view: place in the model where log-probs and entropies are read; None for the model's own output.
      loss: the objective; None for the stage's algorithm.
      trainable: which parameters learn; None for all.
    """

    name: str
    view: Capture | None = None
    loss: Algorithm | None = None
    trainable: Trainable | None = None


# The only phase of a stage that has no schedule.
WHOLE = Phase(name="whole")

_log = logging.getLogger(__name__)

ENDED, BEST = "bupo/ended", "bupo/best_reward"


@dataclass(frozen=True, kw_only=True)
class BuPO:
    """BuPO: the policy inside a layer of the model is optimised first, then the model itself; phases "layer" and "whole".

        pi^k = softmax(H^k E^T / T),  H^k the residual stream after layer k;   phase 1 for the first `steps` steps

    https://arxiv.org/abs/2512.19673. Rollouts are always the model's own; phase 1 reads old and new log-probs from layer k,
    runs no later layer, and trains the embedding, layers 0..k and the head, whatever the stage's algorithm is (the paper's is
    GRPO). Layers count from 0 here and in the original's settings, from 1 in the paper. The original lets weight decay act on
    the final norm in phase 1, and advances the optimizer's one step count; here what does not learn stays bit for bit, its
    count included. Too long a first phase collapses (paper, table 6), hence the guards, which the original lacks.

    Attributes:
      layer: k, from 0; the last layer is refused, since its policy differs from the model's own in the final norm alone.
      steps: largest number of steps of the first phase.
      final_norm: apply the model's final norm to the layer's state, and train it; the paper finds this worse.
      max_reward_drop: the first phase ends where a step's mean reward is this much below the best so far; None sets no limit.
      max_kl: the first phase ends where KL(policy || policy at the start) of the model's own output is above it, in nats
        per token, at a step that measures it (Stage.gap_every); it keeps a frozen copy of the start. None sets no limit.
    """

    layer: int
    steps: int = 30
    final_norm: bool = False
    max_reward_drop: float | None = None
    max_kl: float | None = None

    def __post_init__(self) -> None:
        components.at_least(self, 0, "steps")
        components.above(self, 0, "max_reward_drop", "max_kl")

    @property
    def phases(self) -> Sequence[Phase]:
        view = Capture(layer=self.layer, final_norm=self.final_norm)
        trainable = Trainable(layers=self.layer + 1, frozen=() if self.final_norm else ("norm",))
        return Phase(name="layer", view=view, trainable=trainable), Phase(name="whole")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset() if self.max_kl is None else frozenset({"reference"})

    @property
    def controls(self) -> Mapping[str, float]:
        return {ENDED: 0.0, BEST: -1e30}

    def check(self, layers: int) -> None:
        """Raises ValueError where `layer` is not one of the model's, or its last."""
        if not 0 <= self.layer < layers - 1:
            raise ValueError(
                f"train.BuPO.layer must be in 0..{layers - 2}, a layer below the last of the model's {layers} (got {self.layer}): "
                "set BUPO_LAYER; jaxrl_llm.eval.entropy_flow proposes one"
            )

    def phase(self, step: int, controls: Mapping[str, float]) -> Phase:
        first, whole = self.phases
        return first if step <= self.steps and not controls[ENDED] else whole

    def adapt(self, step: int, controls: Mapping[str, float], metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Ends the first phase where a guard's limit is passed."""
        if step > self.steps or controls[ENDED]:
            return controls
        reward = metrics.get("reward/mean", controls[BEST])
        best = max(reward, controls[BEST])
        dropped = self.max_reward_drop is not None and best - reward > self.max_reward_drop
        drifted = self.max_kl is not None and metrics.get("drift/kl", 0.0) > self.max_kl
        if dropped or drifted:
            _log.warning(
                "step %d: the first phase ends early, its %s passed its limit", step, "reward" if dropped else "KL"
            )
        return {**controls, BEST: best, ENDED: float(dropped or drifted)}


@dataclass(frozen=True, kw_only=True)
class TokenBuncher:
    """TokenBuncher (https://arxiv.org/abs/2508.20697): entropy steps, and after the warm-up a noiser step at every `period`-th step.

    Attributes:
      noiser: the objective of the noiser steps.
      warmup_steps: number of first steps, which are all entropy steps; the paper takes an eighth of all steps.
      period: with the stage's steps numbered from 0, those that `period` divides are noiser steps.
    """

    noiser: TokenNoiser
    warmup_steps: int = 25
    period: int = 2

    def __post_init__(self) -> None:
        components.at_least(self, 0, "warmup_steps")
        components.at_least(self, 1, "period")

    @property
    def phases(self) -> Sequence[Phase]:
        return Phase(name="entropy"), Phase(name="noiser", loss=self.noiser)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    @property
    def controls(self) -> Mapping[str, float]:
        return {}

    def check(self, layers: int) -> None:
        del layers  # any model will do

    def phase(self, step: int, controls: Mapping[str, float]) -> Phase:
        del controls
        number = step - 1
        return self.phases[number >= self.warmup_steps and number % self.period == 0]

    def adapt(self, step: int, controls: Mapping[str, float], metrics: Mapping[str, float]) -> Mapping[str, float]:
        del step, metrics
        return controls
