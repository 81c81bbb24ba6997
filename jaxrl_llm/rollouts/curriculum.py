"""Draws prompts less often that the policy has lately answered right: they teach nothing, and cost as much as others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.data.pipeline import PromptStream
from jaxrl_llm.experience import Group, Prompt


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """A rule of chances: a prompt that was all right the last c times in a row is drawn with the chance max(least, share ^ c) at each
    of its turns.

    A prompt is all right where every valid sample of its group has the reward `right`. One sample that is wrong brings it back to every
    turn. In the end a pass over the data draws the share `least` of the prompts that are always right, so that forgotten ones are
    noticed.

    Attributes:
      right: smallest reward of a sample that is right.
      share: factor of a prompt's chance for each time in a row that it was all right.
      least: smallest chance.
    """

    right: float = 1.0
    share: float = 0.5
    least: float = 0.1

    def __post_init__(self) -> None:
        components.within(self, "(0, 1]", "share", "least")

    def chance(self, streak: int) -> float:
        """Returns the chance of a prompt that was all right `streak` times in a row."""
        return max(self.least, self.share**streak) if streak else 1.0


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
        self.streaks: dict[
            int, int
        ] = {}  # number of a row -> times in a row that it was all right, where that is not 0
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
        """Notes which prompts were all right; a group without a valid sample changes nothing."""
        for group in groups:
            prompt = group.rollouts[0].prompt
            totals = group.total()[group.valid() & [r.role == "sample" for r in group.rollouts]]
            number = self._numbers.get((prompt.source, prompt.id))
            if number is None or not len(totals):
                continue
            if np.all(totals >= self.rule.right):
                self.streaks[number] = self.streaks.get(number, 0) + 1
            else:
                self.streaks.pop(number, None)

    def take(self) -> dict[str, float]:
        """Returns the passes over the data, the share of turns that were passed over since the last call, and the share of all prompts
        that were all right."""
        found = {
            "curriculum/passed_over": self._passed / max(self._turns, 1),
            "curriculum/all_right": len(self.streaks) / len(self.stream.rows),
        }
        self._turns = self._passed = 0
        return {**self.stream.take(), **found}

    def state(self) -> dict[str, Any]:
        """Returns JSON-like state: that of the stream that it reads, and the prompts that were all right."""
        return {**self.stream.state(), "streaks": sorted([n, c] for n, c in self.streaks.items())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`; raises ValueError where the rows or their order are not those of `state`."""
        self.stream.restore(state)
        self.streaks = {int(number): int(streak) for number, streak in state.get("streaks", ())}
