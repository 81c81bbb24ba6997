"""DARLING's reward: quality times distinctness within the group (arXiv 2509.02534).

    r_i = q_i D_i           combine = "product", the paper's
    r_i = a q_i + b D_i     combine = "sum"

Advantages are the rewards minus their group's mean, not divided by its deviation (algorithm dr_grpo). Deviations from
the original: q is one number a response and never spread over tokens; negative qualities are refused unless `negative` allows
them, since their product with D would reward duplicates; normalisation before the sum takes effect.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float

from jaxrl_llm import components
from jaxrl_llm.experience import Group, Rollout, Scores
from jaxrl_llm.protocols import Reward
from jaxrl_llm.rewards.distinctness import Distinctness
from jaxrl_llm.rewards.wrap import Failed, PlainReward, none_judged


@dataclass(frozen=True, kw_only=True)
class Darling(PlainReward):
    """Combines a quality reward with a measure of distinctness.

    Attributes:
      quality: rates how good a rollout is; its total counts.
      distinctness: measures how distinct a rollout is in its group.
      combine: "product" or "sum".
      negative: treatment of qualities below 0 in a product: "refuse" (an error), "group_minimum" (subtracts the least
        quality of the group where that is below 0), "sigmoid" (of every quality), "raw" (multiplies them unchanged:
        the original, which prefers duplicates among bad responses).
      quality_weight: a of a sum; a product ignores it.
      distinctness_weight: b of a sum; with 0 only the quality counts.
      normalise: whether q and D are centred by their group means and divided by their group deviations before a sum.
      correct_above: quality above which a rollout counts as correct, for measures that use correctness.
    """

    quality: Reward
    distinctness: Distinctness
    combine: Literal["product", "sum"] = "product"
    negative: Literal["refuse", "group_minimum", "sigmoid", "raw"] = "refuse"
    quality_weight: float = 1.0
    distinctness_weight: float = 1.0
    normalise: bool = False
    correct_above: float = 0.5

    def __post_init__(self) -> None:
        components.choices(self)
        if self.normalise and self.combine == "product":
            raise ValueError(
                "Darling.normalise centres what is added: set Darling.combine = 'sum', or normalise = False"
            )
        if self.quality.needs_stats:
            raise ValueError(
                "Darling.quality must not need the learner's statistics: its rewards are wanted before them"
            )

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns part "darling" [G]; invalid where the quality is, and for the whole group where distinctness could not be measured.

        Greedy rollouts belong to no group: their distinctness is 1.

        Raises:
          ValueError: a quality is below 0 and `negative` is "refuse".
        """
        group = Group(rollouts=rollouts, scores=await self.quality.score(rollouts, stats))
        quality, valid = group.total(), group.valid()
        sampled = np.array([rollout.role == "sample" for rollout in rollouts], bool)
        counted = sampled & valid
        distinct, classes = np.ones(len(rollouts)), None
        try:
            own = [rollout for rollout, ok in zip(rollouts, counted) if ok]
            if own:
                distinct[counted], classes = await self.distinctness.measure(own, quality[counted] > self.correct_above)
        except Failed as failure:
            failed = none_judged("darling", rollouts, failure)
            return Scores(parts={**failed.parts, "log/quality": quality}, valid={**failed.valid, "log/quality": valid})
        parts = {
            "darling": self.combined(quality, distinct, counted),
            "log/quality": quality,
            "log/distinctness": distinct,
        }
        known = {"darling": valid, "log/quality": valid, "log/distinctness": counted}
        if classes is not None:
            parts["log/class"] = np.full(len(rollouts), -1.0)
            parts["log/class"][counted] = classes
            parts["log/classes"] = np.full(len(rollouts), float(len(set(classes[classes >= 0].tolist()))))
            known |= {"log/class": counted, "log/classes": counted}
        return Scores(parts=parts, valid=known)

    def combined(
        self, quality: Float[np.ndarray, "G"], distinct: Float[np.ndarray, "G"], counted: Bool[np.ndarray, "G"]
    ) -> Float[np.ndarray, "G"]:
        """Returns the reward; `counted` marks the rollouts that the group's statistics use."""
        if self.combine == "product":
            return self._shifted(quality, counted) * distinct
        if self.normalise:
            quality, distinct = _standard(quality, counted), _standard(distinct, counted)
        return self.quality_weight * quality + self.distinctness_weight * distinct

    def _shifted(self, quality: Float[np.ndarray, "G"], counted: Bool[np.ndarray, "G"]) -> Float[np.ndarray, "G"]:
        if self.negative == "sigmoid":
            return 1 / (1 + np.exp(-np.clip(quality, -700, 700)))
        least = float(quality[counted].min(initial=0.0))
        if least < 0 and self.negative == "refuse":
            raise ValueError(
                f"a quality of {least} times distinctness would reward duplicates: set Darling.negative to "
                "'group_minimum' or 'sigmoid' ('raw' multiplies it all the same)"
            )
        return quality - least if self.negative == "group_minimum" else quality


def _standard(values: Float[np.ndarray, "G"], counted: Bool[np.ndarray, "G"]) -> Float[np.ndarray, "G"]:
    """Returns the values minus the mean of the counted ones, divided by their standard deviation; 0 where they are all equal."""
    own = values[counted]
    if not len(own) or np.ptp(own) == 0:
        return np.zeros(len(values))
    return (values - own.mean()) / own.std()
