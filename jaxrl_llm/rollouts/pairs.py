"""Builds preferences from the policy's own samples: rewards decide which are preferred and rejected, or a demonstration is preferred to one.

A loss of preferences learns from these groups as from the pairs of a dataset. Where a prompt's rewards prefer none, its group stays, and
nothing is learned from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxrl_llm.data.pipeline import Encoder
from jaxrl_llm.experience import Group, Rollout, Scores
from jaxrl_llm.protocols import GroupLoader, Pairing

SIDE = "log/side"


@dataclass(frozen=True, kw_only=True)
class BestAgainstWorst:
    """Prefers the sample of the highest reward and rejects that of the lowest, the first of equal ones."""

    demonstrates: bool = field(default=False, init=False)

    def sides(self, rewards: np.ndarray) -> np.ndarray:
        sides = np.zeros(len(rewards), int)
        if np.ptp(rewards) > 0:
            sides[np.argmax(rewards)], sides[np.argmin(rewards)] = 1, -1
        return sides


@dataclass(frozen=True, kw_only=True)
class AboveTheMean:
    """Prefers the samples whose reward is above the mean of their prompt's samples, and rejects those below it.

    Losses that value each answer on its own, such as KTO's, learn from such groups; losses of pairs need one of each side.
    """

    demonstrates: bool = field(default=False, init=False)

    def sides(self, rewards: np.ndarray) -> np.ndarray:
        return np.sign(rewards - rewards.mean()).astype(int) if np.ptp(rewards) > 0 else np.zeros(len(rewards), int)


@dataclass(frozen=True, kw_only=True)
class DemonstrationAgainstSample:
    """Rejects a prompt's first sample, whatever its reward, and prefers the response that the dataset gives (SPIN)."""

    demonstrates: bool = field(default=True, init=False)

    def sides(self, rewards: np.ndarray) -> np.ndarray:
        return -(np.arange(len(rewards)) == 0).astype(int)


@dataclass(kw_only=True, eq=False)
class PairedGroups:
    """A group loader whose groups hold only the preferred and the rejected answers of each prompt.

    Attributes:
      loader: gives the groups of all samples.
      pairing: says which samples are preferred and which rejected.
      encoder: encodes demonstrations.
    """

    loader: GroupLoader
    pairing: Pairing
    encoder: Encoder
    _told: dict[str, float] = field(default_factory=dict)

    async def next(self, step: int) -> list[Group]:
        groups = await self.loader.next(step)
        paired = [self.paired(group) for group in groups]
        self._told = told(groups, paired)
        return paired

    def state(self) -> dict[str, Any]:
        return self.loader.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.loader.restore(state)

    def take(self) -> dict[str, float]:
        """Returns the loader's counters and, for the last step, the rewards of all samples and the share of prompts without a preference."""
        return {**self.loader.take(), **self._told}

    def paired(self, group: Group) -> Group:
        """Returns the preferred and the rejected answers of a group, or two samples without sides where there is no preference.

        Raises:
          ValueError: the pairing needs a demonstration, and the prompt has none.
        """
        known, sides = sampled(group), np.zeros(len(group.rollouts), int)
        if len(known):
            sides[known] = self.pairing.sides(group.total()[known])
        shown = self._demonstration(group) if self.pairing.demonstrates and sides.any() else None
        if not sides.any() or (self.pairing.demonstrates and shown is None):
            return _picked(group, np.arange(min(2, len(group.rollouts))), np.zeros(2, int))
        if shown is None:
            return _picked(group, np.flatnonzero(sides), sides[sides != 0])
        (sample,) = np.flatnonzero(sides).tolist()
        both = np.array([1.0, -1.0])
        return Group(
            rollouts=[shown, group.rollouts[sample]], scores=Scores(parts={SIDE: both}, valid={SIDE: np.ones(2, bool)})
        )

    def _demonstration(self, group: Group) -> Rollout | None:
        """Returns the prompt's own response as a rollout; None where it is longer than responses may be."""
        prompt = group.rollouts[0].prompt
        if prompt.response is None:
            raise ValueError(
                f"prompt {prompt.id!r} has no response to prefer to the policy's: SPIN needs demonstrations (Prompt.response); rows.Rows.response "
                "names their column"
            )
        found = self.encoder.demonstration(prompt)
        return None if found is None else replace(found, role="given")


def sampled(group: Group) -> np.ndarray:
    """Returns the numbers of the rollouts that were sampled and have a reward."""
    return np.flatnonzero(group.valid() & [r.role == "sample" for r in group.rollouts])


def _picked(group: Group, rows: np.ndarray, sides: np.ndarray) -> Group:
    scores = group.scores
    parts = {name: np.asarray(x)[rows] for name, x in scores.parts.items()}
    valid = {name: np.asarray(x)[rows] for name, x in scores.valid.items()}
    parts[SIDE], valid[SIDE] = sides[: len(rows)].astype(float), np.ones(len(rows), bool)
    return Group(rollouts=[group.rollouts[i] for i in rows], scores=replace(scores, parts=parts, valid=valid))


def told(groups: Sequence[Group], paired: Sequence[Group]) -> dict[str, float]:
    """Returns mean and standard deviation of all samples' rewards, and the share of prompts without a preference."""
    rewards = [group.total()[sampled(group)] for group in groups]
    found = {"pairs/none": float(np.mean([not np.any(group.scores.parts[SIDE]) for group in paired]))} if paired else {}
    if not sum(map(len, rewards)):
        return found
    every = np.concatenate(rewards)
    return found | {"reward/mean": float(every.mean()), "reward/std": float(every.std())}
