"""Labelled pairs of texts for a partition classifier (DARLING), read from files, in both orders, or generated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm.data import files, generated
from jaxrl_llm.experience import Prompt
from jaxrl_llm.rewards.pairs import Pair, pair_ids

Labelled = tuple[str, str, bool]


@dataclass(frozen=True, kw_only=True)
class SimilarPairs:
    """Reads rows with the columns generation_0, generation_1 and similar (0 or 1), as in DARLING's classifier data.

    Attributes:
      path: a .jsonl, .json or .parquet file, a folder of such files, or a Hugging Face dataset id.
      tokenizer: the classifier's tokenizer, a component.
      split: part of a folder or dataset.
      cls: the token that opens a pair.
      sep: the token that ends each text.
      budget: largest number of tokens of a pair; each text is cut to half of it.
      both_orders: whether each pair is repeated with its texts exchanged, since a classifier need not be symmetric.
    """

    path: str
    tokenizer: Any
    split: str = "train"
    cls: str = "<|im_start|>"
    sep: str = "<|im_end|>"
    budget: int = 4096
    both_orders: bool = True

    def rows(self) -> Sequence[Prompt]:
        """Returns all pairs; extra["desirable"] is True where the texts are of one class.

        Raises:
          ValueError: a row is bad (the message names file and row), or all labels are the same.
        """
        return as_prompts(self.labelled(), self.tokenizer.load(), (self.cls, self.sep), self.budget, self.both_orders)

    def labelled(self) -> list[Labelled]:
        """Returns (first text, second text, whether they are of one class) for each pair."""
        columns = ["generation_0", "generation_1", "similar"]
        return [
            (str(row["generation_0"]), str(row["generation_1"]), _label(row["similar"], where))
            for where, row in files.read(self.path, columns, split=self.split)
        ]


@dataclass(frozen=True, kw_only=True)
class Rearranged:
    """Generates pairs of strings, which are of one class where one rearranges the other's letters.

    Attributes:
      tokenizer: the classifier's tokenizer, a component.
      alphabet: the letters.
      length: number of letters in a string.
      similar_share: share of the pairs that are of one class.
      size: number of pairs.
      split: "train" or "heldout"; they share no string.
      cls: the token that opens a pair.
      sep: the token that ends each text.
      seed: seed of the pairs.
    """

    tokenizer: Any
    alphabet: str = "abcdefgh"
    length: int = 3
    similar_share: float = 0.5
    size: int = 4000
    split: generated.Split = "train"
    cls: str = "<bos>"
    sep: str = "<eos>"
    seed: int = 0

    def __post_init__(self) -> None:
        generated.check(self)
        if not 0 < self.similar_share < 1 or not 2 <= self.length <= len(self.alphabet):
            raise ValueError(
                "Rearranged.similar_share must be in (0, 1) and length in 2..letters of the alphabet (got "
                f"{self.similar_share} and {self.length})"
            )

    def rows(self) -> Sequence[Prompt]:
        """Returns all pairs, in the form of SimilarPairs."""
        return as_prompts(self.labelled(), self.tokenizer.load(), (self.cls, self.sep), 4 * self.length + 3, False)

    def labelled(self) -> list[Labelled]:
        """Returns (first string, second string, whether they are of one class) for each pair."""
        return list(self._drawn(np.random.default_rng([self.seed, self.split == "heldout"])))

    def _drawn(self, random: np.random.Generator) -> Iterator[Labelled]:
        for _ in range(self.size):
            first = self._string(random)
            if random.random() < self.similar_share:
                yield first, "".join(random.permutation(list(first))), True
            else:
                second = self._string(random)
                while set(second) == set(first):
                    second = self._string(random)
                yield first, second, False

    def _string(self, random: np.random.Generator) -> str:
        while True:
            letters = "".join(random.permutation(list(self.alphabet))[: self.length])
            if generated.held_out("".join(sorted(letters)), 0.1) == (self.split == "heldout"):
                return letters


def as_prompts(
    labelled: Sequence[Labelled], tokenizer: Any, marks: tuple[str, str], budget: int, both_orders: bool
) -> list[Prompt]:
    """Returns pairs as rows whose response is the last mark, at which a classifier gives its verdict.

    Raises:
      ValueError: all labels are the same, so that there is nothing to learn.
    """
    if len({similar for *_, similar in labelled}) < 2:
        raise ValueError(
            f"{len(labelled)} pairs with labels that are all the same, or none: a partition classifier needs pairs of one "
            "class and of two"
        )
    found: list[Prompt] = []
    for number, (first, second, similar) in enumerate(labelled):
        orders: list[Pair] = [(first, second), (second, first)][: 1 + both_orders]
        for turn, pair in enumerate(orders):
            ids = np.array(pair_ids(tokenizer, pair, marks, budget), np.int32)
            found.append(
                Prompt(
                    id=f"pair/{number}/{turn}",
                    tokens=ids[:-1],
                    response="",
                    source="pairs",
                    extra={"desirable": similar, "response_tokens": ids[-1:]},
                )
            )
    return found


def _label(value: Any, where: str) -> bool:
    if value not in (0, 1):
        raise ValueError(f"{where}: column 'similar' must be 0 or 1 (got {value!r})")
    return bool(value)
