"""Draws prompts less often that taught nothing lately, all right or all wrong: their samples cost as much as others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrl_llm import components
from jaxrl_llm.data.pipeline import PromptStream
from jaxrl_llm.experience import Group, Prompt


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """A rule of chances: a prompt that was all right the last c times in a row is drawn with the chance max(least, share ^ c) at each
    of its turns, and one that was all wrong the last c times with max(least, wrong_share ^ c) (both sides:
    https://arxiv.org/abs/2506.02177, section 4).

    A prompt is all right where every valid sample of its group has the reward `right` or more, and all wrong where every one has the
    same reward below it. Any other group brings its prompt back to every turn. In the end a pass over the data draws the share `least`
    of the prompts that are always right, so that forgotten ones are noticed.

    Attributes:
      right: smallest reward of a sample that is right.
      share: factor of a prompt's chance for each time in a row that it was all right.
      wrong_share: the same for each time in a row that it was all wrong; 1 draws those at each of their turns.
      least: smallest chance.
    """

    right: float = 1.0
    share: float = 0.5
    wrong_share: float = 1.0
    least: float = 0.1

    def __post_init__(self) -> None:
        components.within(self, "(0, 1]", "share", "wrong_share", "least")

    def chance(self, streak: int) -> float:
        """Returns the chance of a prompt that was all right `streak` times in a row, or all wrong `-streak` times."""
        share = self.share if streak > 0 else self.wrong_share
        return max(self.least, share ** abs(streak)) if streak else 1.0

    def next_streak(self, streak: int, totals: NDArray[np.floating[Any]]) -> int:
        """Returns what a streak becomes with a group's rewards, of which there is one at least."""
        if np.all(totals >= self.right):
            return max(streak, 0) + 1
        return min(streak, 0) - 1 if np.ptp(totals) == 0 else 0


class CurriculumStream:
    """A stream of prompts that passes some over, by a `Curriculum`, and keeps the order of the stream that it reads.

    Whether a prompt is passed over depends on the seed, on its place in the order and on the groups that were learned about before, so that a
    run that goes on from a state draws what it would have drawn.

    Args:
      stream: all prompts, in their order.
      rule: the chances.
    """

    def __init__(self, stream: PromptStream[Prompt], rule: Curriculum) -> None:
        self.stream, self.rule = stream, rule
        # number of a row -> times in a row that it was all right, or minus those that it was all wrong, where that is not 0
        self.streaks: dict[int, int] = {}
        self._numbers: dict[tuple[str, str], int] = {}  # (source, id) of a prompt that was drawn -> number of its row
        self._turns = self._passed = 0

    @property
    def rows(self) -> Sequence[Prompt]:
        return self.stream.rows

    @property
    def epoch(self) -> float:
        return self.stream.epoch

    @property
    def position(self) -> int:
        """The position in the order of all prompts, those that were passed over included."""
        return self.stream.position

    @position.setter
    def position(self, place: int) -> None:
        self.stream.position = place

    def next_batch(self, n: int) -> list[Prompt]:
        """Returns the next `n` prompts that are not passed over."""
        numbers: list[int] = []
        while len(numbers) < n:
            place = self.stream.position
            number = self.stream.next_number()
            drawn = self._drawn(place, number)
            self._turns, self._passed = self._turns + 1, self._passed + (not drawn)
            numbers += [number] if drawn else []
        prompts = self.stream.numbered(numbers)
        self._numbers |= {(p.source, p.id): number for p, number in zip(prompts, numbers, strict=True)}
        return prompts

    def _drawn(self, place: int, number: int) -> bool:
        chance = self.rule.chance(self.streaks.get(number, 0))
        return chance >= 1 or float(np.random.default_rng((self.stream.seed, place)).random()) < chance

    def learn(self, groups: Sequence[Group]) -> None:
        """Notes which prompts were all right or all wrong; a group without a valid sample changes nothing."""
        for group in groups:
            prompt = group.rollouts[0].prompt
            totals = group.total()[group.valid() & [r.role == "sample" for r in group.rollouts]]
            number = self._numbers.get((prompt.source, prompt.id))
            if number is None or not len(totals):
                continue
            if streak := self.rule.next_streak(self.streaks.pop(number, 0), totals):
                self.streaks[number] = streak

    def take(self) -> dict[str, float]:
        """Returns the passes over the data, the share of turns that were passed over since the last call, and the shares of all prompts
        that were last all right and all wrong."""
        found = {
            "curriculum/passed_over": self._passed / max(self._turns, 1),
            "curriculum/all_right": sum(c > 0 for c in self.streaks.values()) / len(self.stream.rows),
            "curriculum/all_wrong": sum(c < 0 for c in self.streaks.values()) / len(self.stream.rows),
        }
        self._turns = self._passed = 0
        return {**self.stream.take(), **found}

    def state(self) -> dict[str, Any]:
        """Returns JSON-like state: that of the stream that it reads, and the streaks of prompts."""
        return {**self.stream.state(), "streaks": sorted([n, c] for n, c in self.streaks.items())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`; raises ValueError where the rows or their order are not those of `state`."""
        self.stream.restore(state)
        self.streaks = {int(number): int(streak) for number, streak in state.get("streaks", ())}
