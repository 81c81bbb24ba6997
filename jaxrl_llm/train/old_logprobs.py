"""Chooses the source of a stage's old log-probs: a scoring pass, the sampler, the update's own pass, or a measured rule.

The clip of an update compares the policy with the one before the step. In a step's only update these are the same, so that no scoring
pass is needed. In a step of several updates the sampler's log-probs can replace it where sampler and learner hardly differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_llm import components
from jaxrl_llm.algorithms.grpo import PolicyGradient

TAKEN = "old_logprobs/sampler"  # control: whether the sampler's are taken
CALM = "old_logprobs/calm"  # control: the number of small measures in a row


@dataclass(frozen=True, kw_only=True)
class GapRule:
    """A rule that takes the sampler's log-probs as old ones while their measured gap to the learner's is small, with hysteresis.

    The measure is `gap/p99` of a step, the size in nats that the gap of one token in a hundred passes. It multiplies that token's ratio
    by exp(gap), so that at the clip range, 0.2, one token in a hundred is clipped by the gap alone.

    Attributes:
      below: largest gap/p99 at which the sampler's may be taken, in nats.
      above: gap/p99 above which the learner scores again, in nats; at least `below`.
      steps: number of measured steps in a row that must be at most `below`.
      every: number of steps of the run between measures while the sampler's are taken; each costs a scoring pass.
    """

    below: float = 0.1
    above: float = 0.2
    steps: int = 3
    every: int = 10

    def __post_init__(self) -> None:
        components.above(self, 0, "below")
        components.at_least(self, 1, "steps", "every")
        components.at_least(self, self.below, "above")

    @property
    def controls(self) -> Mapping[str, float]:
        """The state that a run starts from: the learner scores."""
        return {TAKEN: 0.0, CALM: 0.0}

    def measures(self, controls: Mapping[str, float], step: int) -> bool:
        """Returns whether the learner scores a step."""
        return not controls[TAKEN] or step % self.every == 0

    def moved(
        self, controls: Mapping[str, float], metrics: Mapping[str, float], *, tells: bool = False
    ) -> Mapping[str, float]:
        """Returns the state after a step with `metrics`; without a measure it stays, and a gap that is no number counts as large.

        With `tells` it prints a line where the source of old log-probs changes.
        """
        gap = metrics.get("gap/p99")
        if gap is None:
            return {name: controls[name] for name in (TAKEN, CALM)}
        calm = controls[CALM] + 1 if gap <= self.below else 0.0
        taken = gap <= self.above if controls[TAKEN] else calm >= self.steps
        if tells and taken != bool(controls[TAKEN]):
            small = f"at most {self.below:g} nats in {self.steps} measures in a row: old log-probs are the sampler's from here on"
            large = f"above {self.above:g} nats: the learner scores old log-probs again"
            print(f"gap/p99 is {gap:.3g}, {small if taken else large} (train.GapRule)", flush=True)
        return {TAKEN: float(taken), CALM: min(calm, float(self.steps))}


def automatic(stage: Any) -> str:
    """Returns the source that 'auto' stands for in a stage that samples: "update" where nothing is against it, else "measured", by `GapRule`."""
    if not stage.samples:
        return "learner"
    return "measured" if against_update(stage) else "update"


def against_update(stage: Any) -> str:
    """Returns the reason why the update's own log-probs cannot be the old ones; "" where they can."""
    algorithm, updates = stage.algorithm, stage.minibatches * stage.epochs
    if updates > 1:
        return f"a step makes {updates} updates (set MINIBATCHES and EPOCHS to 1)"
    if not isinstance(algorithm, PolicyGradient):
        return f"{type(algorithm).__name__} is no policy gradient"
    if stage.schedule is not None:
        return "its phases read other log-probs"
    if algorithm.rejections or (algorithm.correction is not None and not algorithm.correction.by_token):
        return "rejections, or a correction of whole sequences or batches, need them before the update"
    return ""


def check(stage: Any) -> None:
    """Raises ValueError where a stage cannot have the old log-probs that it asks for."""
    source, name = stage.old_logprobs, type(stage.algorithm).__name__
    if source == "update" and (reason := against_update(stage)):
        raise ValueError(
            f"Stage.old_logprobs of stage {stage.name!r} is 'update' and {reason}: set it to 'learner', 'sampler' or 'auto'"
        )
    taken = source == "sampler" or stage.old_from == "measured"
    if taken and isinstance(stage.algorithm, PolicyGradient) and stage.algorithm.selects:
        raise ValueError(
            f"{name} leaves out tokens by the ratio of old to sampler log-probs, and with Stage.old_logprobs = {source!r} of stage "
            f"{stage.name!r} that ratio is 1 everywhere: set Stage.old_logprobs = 'learner', or rejections = () and a correction "
            "that truncates"
        )
