"""Weighted sum of rewards: each part is logged separately, and a part that fails stays invalid."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.experience import Rollout, Scores
from jaxrl_llm.protocols import Down, Reward
from jaxrl_llm.rewards.wrap import Failed, none_judged


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """Scores with several rewards at once.

    A reward with one part gives a part named `name`; one with several parts gives "name/part". Its logged parts become
    "log/name/part".

    Attributes:
      parts: {name: reward}.
      weights: {name: weight}; the default weight is 1, and a part of weight 0 is only logged.
      limit_s: time limit of a reward for one group in seconds; beyond it the reward's part is invalid.
    """

    parts: Mapping[str, Reward]
    weights: Mapping[str, float] = field(default_factory=dict)
    limit_s: float = 300.0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.weights) - set(self.parts))
        if not self.parts or unknown:
            raise ValueError(
                f"Weighted.weights names {unknown}, and Weighted.parts has {sorted(self.parts)}: every weight needs "
                "its part, and there must be one"
            )
        reserved = [name for name in self.parts if "/" in name or name == "log"]
        if reserved:
            raise ValueError(f"Weighted.parts must not use the names {reserved}: no 'log' and no '/'")
        components.above(self, 0, "limit_s")

    @property
    def needs_stats(self) -> bool:
        """Whether one of the rewards needs the learner's token stats."""
        return any(reward.needs_stats for reward in self.parts.values())

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns all parts [G] and their weights; a reward that fails as a whole gives one invalid part of its name."""
        scored = await asyncio.gather(*(self._one(name, rollouts, stats) for name in self.parts))
        parts: dict[str, np.ndarray] = {}
        valid: dict[str, np.ndarray] = {}
        weights: dict[str, float] = {}
        for name, scores in zip(self.parts, scored):
            summed = [own for own in scores.parts if not own.startswith("log/")]
            for own, values in scores.parts.items():
                if own in summed:
                    key = name if len(summed) == 1 else f"{name}/{own}"
                    weights[key] = self.weights.get(name, 1.0) * scores.weights.get(own, 1.0)
                else:
                    key = f"log/{name}/{own.removeprefix('log/')}"
                parts[key], valid[key] = values, scores.valid[own]
        return Scores(parts=parts, valid=valid, weights=weights)

    async def _one(self, name: str, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None) -> Scores:
        try:
            async with asyncio.timeout(self.limit_s) as limit:
                return await self.parts[name].score(rollouts, stats)
        except Down:  # a service that stays down must stop the run
            raise
        except Exception as error:  # one service that fails must not take the other rewards with it
            late = limit.expired() and isinstance(error, TimeoutError)
            failure = Failed(f"no scores within {self.limit_s:g} s (Weighted.limit_s)") if late else error
            return none_judged(name, rollouts, failure)
