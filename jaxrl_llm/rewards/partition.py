"""Groups responses into classes of equal meaning by a pairwise classifier (DARLING, arXiv 2509.02534).

equal(a, b) = 2 |words(a) and words(b)| >= m          where the longer text has m <= 5 words, letter case ignored
              P(similar | a, b) > threshold           else
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from jaxrl_llm import components
from jaxrl_llm.rewards.pairs import Pair, Pairwise


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Divides a group of texts into classes.

    Attributes:
      pairs: rates the similarity of two texts.
      threshold: probability above which two texts are equal; DARLING uses 0.5 for maths and 0.32 for chat.
      linkage: "single" (transitive closure of equality, DARLING's in training), "complete" (a text joins the first
        class in which it equals every member), "greedy" (it joins the first class with an equal first member, NoveltyBench's).
      short_words: largest number of words of texts that are compared by the words they share; 0 always asks the classifier.
    """

    pairs: Pairwise
    threshold: float = 0.5
    linkage: Literal["single", "complete", "greedy"] = "single"
    short_words: int = 5

    def __post_init__(self) -> None:
        components.choices(self)
        components.within(self, "[0, 1)", "threshold")
        components.at_least(self, 0, "short_words")

    async def classes(self, texts: Sequence[str]) -> Int[np.ndarray, "G"]:
        """Returns the class of each text, numbered in the order of their first members.

        Raises:
          wrap.Failed: the classifier could not be asked.
        """
        return linked(await self.equal(texts), self.linkage)

    async def equal(self, texts: Sequence[str]) -> Bool[np.ndarray, "G G"]:
        """Returns which texts are equal: a symmetric matrix, True on its diagonal. Identical texts are equal without asking the classifier."""
        found = np.eye(len(texts), dtype=bool)
        asked: dict[Pair, list[tuple[int, int]]] = {}
        for i, j in combinations(range(len(texts)), 2):
            a, b = texts[i], texts[j]
            known = True if a == b else short_texts_equal(a, b, self.short_words)
            if known is None:
                asked.setdefault((a, b), []).append((i, j))
            else:
                found[i, j] = found[j, i] = known
        if asked:
            for places, p in zip(asked.values(), await self.pairs.similar(list(asked)), strict=True):
                for i, j in places:
                    found[i, j] = found[j, i] = p > self.threshold
        return found


def short_texts_equal(first: str, second: str, most_words: int = 5) -> bool | None:
    """Returns whether two short texts share at least half the longer one's words; None where one is longer than `most_words`."""
    a, b = first.lower().split(), second.lower().split()
    longest = max(len(a), len(b))
    return None if longest > most_words or most_words == 0 else 2 * len(set(a) & set(b)) >= longest


def linked(equal: Bool[np.ndarray, "G G"], linkage: str) -> Int[np.ndarray, "G"]:
    """Returns the classes of a matrix of equality, numbered in the order of their first members."""
    if linkage == "single":
        reach = equal.copy()
        while True:  # each turn doubles the length of the paths
            further = (reach.astype(np.int64) @ reach) > 0
            if np.array_equal(further, reach):
                break
            reach = further
        firsts = reach.argmax(1) if len(reach) else np.zeros(0, np.int64)
        return np.unique(firsts, return_inverse=True)[1].reshape(-1).astype(np.int64)
    members: list[list[int]] = []
    for i in range(len(equal)):
        for members_of_one in members:
            compared = members_of_one if linkage == "complete" else members_of_one[:1]
            if all(equal[j, i] for j in compared):
                members_of_one.append(i)
                break
        else:
            members.append([i])
    classes = np.zeros(len(equal), np.int64)
    for number, members_of_one in enumerate(members):
        classes[members_of_one] = number
    return classes


def class_sizes(classes: Int[np.ndarray, "G"]) -> Int[np.ndarray, "G"]:
    """Returns the size of each text's class."""
    return np.sum(classes[:, None] == classes[None], axis=1)
