"""The phases of a stage in progress: which one it is in, the learner of each, and what is measured of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from jaxrl_llm import diagnostics
from jaxrl_llm.global_batch import GlobalBatch
from jaxrl_llm.learner import Learner
from jaxrl_llm.phases import WHOLE, Phase
from jaxrl_llm.stages import Stage

Streams = Mapping[str, np.ndarray]


@dataclass(kw_only=True, eq=False)
class PhaseRun:
    """The phases of a stage.

    Attributes:
      config: the stage.
      learner: that of the phase without a view, a loss or frozen parameters of its own.
      phase: the phase of the present step.
      due: whether the policy's own output is measured in this step, should the phase read another view.
      own: those measurements.
    """

    config: Stage
    learner: Learner
    phase: Phase = WHOLE
    due: bool = False
    own: dict[str, float] = field(default_factory=dict)

    def enter(self, step: int, controls: Mapping[str, float]) -> None:
        """Takes the phase of a step of the stage, from 1."""
        if self.config.schedule is not None:
            self.phase = self.config.schedule.phase(step, controls)
        self.own = {}
        self.due = self.phase.view is not None and (step == 1 or step % self.config.gap_every == 0)

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
    def present(self) -> Learner:
        """The learner of the present phase."""
        return self.learners[self.phase.name]

    @property
    def layers(self) -> int | None:
        """First layers that an update of the present phase runs; None for all."""
        return None if self.phase.view is None else self.phase.view.layer + 1

    @property
    def compilations(self) -> int:
        """Programs compiled so far, by the learners of all phases."""
        return sum(x.compilations for x in {id(x): x for x in (self.learner, *self.learners.values())}.values())

    def measure(self, batch: GlobalBatch, streams: Streams) -> None:
        """Keeps what the policy's own output says of the batch, in a phase that reads another view."""
        self.own = diagnostics.gap(batch, streams) | diagnostics.drift(batch, streams)

    def seen(self, streams: Streams) -> Streams:
        """The streams as credit is assigned on them.

        No log-prob of the sampler compares with those that are read inside the model: the weight of every token is 1.
        """
        return streams if self.phase.view is None else {**streams, "sampler_logprobs": streams["old_logprobs"]}

    def describe(self, batch: GlobalBatch, streams: Streams) -> dict[str, float]:
        """The phase, and what the streams of its view say."""
        values: dict[str, float] = {}
        if self.config.schedule is not None:
            values["phase"] = float([phase.name for phase in self.config.phases].index(self.phase.name))
        if not (self.config.samples and "old_logprobs" in streams):
            return values
        values |= diagnostics.by_source(batch, streams)
        if self.phase.view is not None:
            return values | diagnostics.inside(batch, streams) | self.own
        return values | diagnostics.gap(batch, streams) | diagnostics.drift(batch, streams)
