"""Chooses the reward by the prompt's source, so that one run learns from several kinds of task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from jaxrl_llm.experience import Group, Rollout, Scores
from jaxrl_llm.protocols import Reward


@dataclass(frozen=True, kw_only=True)
class BySource:
    """A reward that scores each group with the reward of its source.

    The total is one part, "by_source", for every source, so that an algorithm sees the same parts at each step. The parts of
    the chosen reward are logged as "log/name/part", where `name` is the key that matched without its "*", or "default".

    Attributes:
      rewards: {source, or a pattern such as "aime*": reward}; an equal name wins over patterns, then the first match counts.
      default: reward of the sources that match no key; None makes them an error.
    """

    rewards: Mapping[str, Reward]
    default: Reward | None = None

    def __post_init__(self) -> None:
        if not self.rewards:
            raise ValueError("BySource.rewards must name at least one source (got none)")

    @property
    def needs_stats(self) -> bool:
        """Whether one of the rewards needs the learner's token stats."""
        return any(reward.needs_stats for reward in self._all)

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns the part "by_source" [G], the total of the chosen reward.

        Raises:
          ValueError: the source has no reward.
        """
        if not rollouts:
            return Scores(parts={"by_source": np.zeros(0)}, valid={"by_source": np.zeros(0, bool)})
        name, reward = self.chosen(rollouts[0].prompt.source)
        group = Group(rollouts=rollouts, scores=await reward.score(rollouts, stats))
        logged = {f"log/{name}/{part.removeprefix('log/')}": part for part in group.scores.parts}
        return Scores(
            parts={"by_source": group.total()} | {new: group.scores.parts[old] for new, old in logged.items()},
            valid={"by_source": group.valid()} | {new: group.scores.valid[old] for new, old in logged.items()},
        )

    def chosen(self, source: str) -> tuple[str, Reward]:
        """Returns (name, reward) of a source."""
        if source in self.rewards:
            return source, self.rewards[source]
        for pattern, reward in self.rewards.items():
            if fnmatchcase(source, pattern):
                return pattern.replace("*", ""), reward
        if self.default is None:
            raise ValueError(
                f"no reward for the source {source!r}: BySource.rewards has {sorted(self.rewards)}; add it, or set "
                "BySource.default"
            )
        return "default", self.default

    @property
    def _all(self) -> list[Reward]:
        return [*self.rewards.values(), *([] if self.default is None else [self.default])]
