"""Diversity of a prompt's sampled answers, measured by word n-grams.

distinct-n  = different n-grams / n-grams, over all answers together (arXiv 1510.03055)
unique-n    = mean over answers of the number of different n-grams that no other answer has
unique_share = mean over answers of that number at n = 4, over the answer's positions of 4-grams
               (the n-gram diversity that DARLING compares with, arXiv 2509.02534)
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.eval.answered import Answered, mean

SHARE_N = 4


def words(text: str) -> list[str]:
    """Returns the lower-case runs of letters and digits."""
    return re.findall(r"[^\W_]+", text.lower())


def ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    """Returns the n-grams of words, in order; none for a text of fewer than n words."""
    tokens = words(text)
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Returns the share of different n-grams among all n-grams; NaN where there are none."""
    found = [gram for text in texts for gram in ngrams(text, n)]
    return len(set(found)) / len(found) if found else float("nan")


def unique_counts(texts: Sequence[str], n: int) -> list[int]:
    """Returns, for each text, the number of its different n-grams that no other text has."""
    sets = [set(ngrams(text, n)) for text in texts]
    holders = Counter(gram for grams in sets for gram in grams)
    return [sum(holders[gram] == 1 for gram in grams) for grams in sets]


def unique_shares(texts: Sequence[str], n: int = SHARE_N) -> list[float]:
    """Divides `unique_counts` by the number of each text's n-gram positions; 0 for a text of fewer than n words."""
    return [count / max(len(ngrams(text, n)), 1) for text, count in zip(texts, unique_counts(texts, n), strict=True)]


@dataclass(frozen=True, kw_only=True)
class NgramDiversity:
    """Measures distinct_n and unique_n for each n, and unique_share at n = 4.

    Attributes:
      sizes: the values of n.
    """

    sizes: Sequence[int] = (1, 2, 3, 4)

    def __post_init__(self) -> None:
        if not self.sizes or any(n < 1 for n in self.sizes):
            raise ValueError(f"ngrams.NgramDiversity.sizes must be >= 1 (got {list(self.sizes)})")

    def measure(self, answered: Sequence[Answered]) -> Mapping[str, np.ndarray]:
        """Returns one value per prompt, over its sampled answers; NaN where there are none."""
        groups = [[record["response"] for record in one.of("sampled")] for one in answered]
        found = {f"distinct_{n}": [distinct_n(texts, n) for texts in groups] for n in self.sizes}
        found |= {
            f"unique_{n}": [mean([float(c) for c in unique_counts(texts, n)]) for texts in groups] for n in self.sizes
        }
        found["unique_share"] = [mean(unique_shares(texts)) for texts in groups]
        return {name: np.array(values, np.float64) for name, values in found.items()}
