"""Distinctness of a rollout within its group, in [0, 1]: by classes of meaning, by n-grams, by log-prob (DARLING).

    by classes     D_i = max((n - s_i) / (n - 1), floor)                s_i the size of i's class, n the group's size
    by n-grams     (distinct n-grams of i that no other rollout has) / (n-grams of i, repeats counted)
    by log-prob    (max l - l_i) / (max l - min l)                      l the mean log-prob of a token; 0.5 if all are equal

The paper (arXiv 2509.02534) has no floor; its code has 0.1. A group of one rollout is fully distinct, D = 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl_llm import components
from jaxrl_llm.experience import Rollout
from jaxrl_llm.rewards.pairs import ngrams
from jaxrl_llm.rewards.partition import Partition, class_sizes


@runtime_checkable
class Distinctness(Protocol):
    """A measure of how distinct each rollout of a group is."""

    async def measure(
        self, rollouts: Sequence[Rollout], correct: Bool[np.ndarray, "G"]
    ) -> tuple[Float[np.ndarray, "G"], Int[np.ndarray, "G"] | None]:
        """Returns (distinctness, class of each rollout where the measure has classes); raises wrap.Failed."""
        ...


@dataclass(frozen=True, kw_only=True)
class ByClasses:
    """Measures distinctness by the size of a rollout's class.

    Attributes:
      partition: divides the group into classes.
      floor: smallest distinctness, so that a group of equal right answers still differs from wrong ones.
      correct_only: whether classes contain the correct rollouts alone, n being their number; the others get the floor, as
        all do where at most one is correct.
      sigmoid: squashes D to 1 / (1 + exp(-D)).
    """

    partition: Partition
    floor: float = 0.1
    correct_only: bool = False
    sigmoid: bool = False

    def __post_init__(self) -> None:
        components.within(self, "[0, 1]", "floor")

    async def measure(
        self, rollouts: Sequence[Rollout], correct: Bool[np.ndarray, "G"]
    ) -> tuple[Float[np.ndarray, "G"], Int[np.ndarray, "G"] | None]:
        """Returns the module's formula and the classes; a rollout outside them has class -1."""
        values, classes = np.full(len(rollouts), self.floor), np.full(len(rollouts), -1)
        inside = np.flatnonzero(correct) if self.correct_only else np.arange(len(rollouts))
        if len(inside):
            classes[inside] = await self.partition.classes([rollouts[int(i)].text for i in inside])
        if len(inside) > 1 or not self.correct_only:
            values[inside] = of_sizes(class_sizes(classes[inside]), self.floor)
        return (1 / (1 + np.exp(-values)) if self.sigmoid else values), classes


@dataclass(frozen=True, kw_only=True)
class ByNgrams:
    """Measures distinctness by the n-grams of words that no other rollout has.

    Attributes:
      n: number of words in an n-gram.
    """

    n: int = 4

    def __post_init__(self) -> None:
        components.at_least(self, 1, "n")

    async def measure(
        self, rollouts: Sequence[Rollout], correct: Bool[np.ndarray, "G"]
    ) -> tuple[Float[np.ndarray, "G"], Int[np.ndarray, "G"] | None]:
        """Returns the module's formula; 0 for a response of fewer than n words."""
        del correct
        grams = [ngrams(rollout.text, self.n) for rollout in rollouts]
        values = np.zeros(len(rollouts))
        for i, own in enumerate(grams):
            others = {gram for j, other in enumerate(grams) if j != i for gram in other}
            values[i] = len(set(own) - others) / len(own) if own else 0.0
        return values, None


@dataclass(frozen=True, kw_only=True)
class ByLogprob:
    """Measures how unlikely the response was under the sampler; DARLING's "unlikelihood"."""

    async def measure(
        self, rollouts: Sequence[Rollout], correct: Bool[np.ndarray, "G"]
    ) -> tuple[Float[np.ndarray, "G"], Int[np.ndarray, "G"] | None]:
        """Returns the module's formula over the tokens that the policy chose."""
        del correct
        means = np.array([r.sampler_logprobs[r.mask].sum() / max(int(r.mask.sum()), 1) for r in rollouts], np.float64)
        spread = np.ptp(means) if len(means) else 0.0
        return ((means.max() - means) / spread if spread > 0 else np.full(len(means), 0.5)), None


def of_sizes(sizes: Int[np.ndarray, "G"], floor: float = 0.1) -> Float[np.ndarray, "G"]:
    """Returns max((n - s) / (n - 1), floor) of class sizes s; 1 for a group of one."""
    n = len(sizes)
    return np.ones(n) if n == 1 else np.maximum((n - sizes) / max(n - 1, 1), floor)
