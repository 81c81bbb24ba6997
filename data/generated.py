"""Shared parts of generated task families: the held-out split, the choice of problems and noisy demonstrations."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice, zip_longest
from typing import Literal

import numpy as np

from jaxrl_llm import components

Split = Literal["train", "heldout"]

# Problem spaces up to this size are enumerated; larger ones are sampled.
LISTED = 2**18


def check(family: object) -> None:
    """Raises ValueError where an option that the families share is out of its range."""
    components.choices(family)
    components.at_least(family, 1, "size")
    for name, interval in (("heldout_share", "(0, 1)"), ("noise", "[0, 1]")):
        if hasattr(family, name):
            components.within(family, interval, name)


def held_out(key: str, share: float) -> bool:
    """Returns whether the problem named `key` is held out: a fixed property of the problem, independent of seed and size."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


@dataclass(frozen=True, kw_only=True)
class Family:
    """A dataset of generated problems; those that are held out never occur in training.

    Attributes:
      split: "train" or "heldout".
      heldout_share: share of the problems that are held out, chosen by a hash of the problem.
      size: number of rows; None gives every problem once; with more rows, problems repeat, demonstrations with fresh noise.
      seed: seed of the rows, of their order and of their demonstrations.
    """

    split: Split = "train"
    heldout_share: float = 0.1
    size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)

    def within(self, key: str) -> bool:
        """Returns whether the problem named `key` belongs to the split."""
        return held_out(key, self.heldout_share) == (self.split == "heldout")

    def problems(self, spaces: Sequence[int], key: Callable[[int, int], str]) -> list[tuple[int, int]]:
        """Returns `size` problems (stratum, index) of the split, taken from the strata in turn; they repeat once all were used.

        Args:
          spaces: number of problems in each stratum (an operator, a length).
          key: (stratum, index) -> key that decides the split.

        Raises:
          ValueError: the split has no problems, or there are too many problems to enumerate.
        """
        size = self.size
        if size is None and max(spaces) > LISTED:
            raise ValueError(f"a task of {sum(spaces)} problems is too large to list (limit {LISTED}): set `size`")

        def stratum(number: int) -> Iterator[tuple[int, int]]:
            for index in _indices(spaces[number], np.random.default_rng([self.seed, number])):
                if self.within(key(number, index)):
                    yield number, index

        in_turn = (p for p in chain.from_iterable(zip_longest(*map(stratum, range(len(spaces))))) if p is not None)
        found = list(islice(in_turn, size))
        if not found:
            raise ValueError(
                f"the split {self.split!r} of a task of {sum(spaces)} problems is empty: widen the task or change heldout_share"
            )
        return list(islice(cycle(found), size)) if size is not None else found


def _indices(space: int, random: np.random.Generator) -> Iterator[int]:
    """Yields every index below `space` once, in random order."""
    if space <= LISTED:
        yield from map(int, random.permutation(space))
        return
    seen: set[int] = set()
    while len(seen) < space:
        index = int(random.integers(space))
        if index not in seen:
            seen.add(index)
            yield index


def corrupt(answer: str, alphabet: str, share: float, random: np.random.Generator) -> str:
    """Replaces each character of `answer` that is in `alphabet`, with probability `share`, by another one of `alphabet`."""
    wrong = random.random(len(answer)) < share
    step = random.integers(1, max(2, len(alphabet)), len(answer))
    return "".join(
        alphabet[(alphabet.index(c) + step[i]) % len(alphabet)] if wrong[i] and c in alphabet else c
        for i, c in enumerate(answer)
    )
