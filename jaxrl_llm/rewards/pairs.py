"""Pairwise similarity of two responses, between 0 and 1: classifiers over HTTP, and two offline measures.

`hf_classifier.HfClassifier` runs a classifier in this process. Classifiers do not see the prompt. They need not be
symmetric and are only asked about (earlier, later).
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Protocol, runtime_checkable

from jaxrl_llm import components
from jaxrl_llm.rewards.service import Service

Pair = tuple[str, str]


@runtime_checkable
class Pairwise(Protocol):
    """A measure of the similarity of two texts."""

    async def similar(self, pairs: Sequence[Pair]) -> Sequence[float]:
        """Returns P(same class) of each pair, in [0, 1]; raises wrap.Failed where it could not be obtained."""
        ...


@dataclass(frozen=True, kw_only=True)
class Classify:
    """Asks servers that answer /classify in vLLM's format (`vllm serve MODEL --runner pooling`), including this package's server.

    Attributes:
      service: the servers; batches of pairs go to them in turn.
      model: the name under which they serve the model.
      form: how a pair is sent: "tokens" (ids CLS a SEP b SEP of `tokenizer`, as classifiers are trained), "words" (the
        same in words with the marks spelled out, as DARLING sends them: white space is lost and words are counted, not
        tokens), "pair" (both texts, for this package's server).
      tokenizer: folder or Hugging Face id, for "tokens".
      cls: the token that opens a pair.
      sep: the token that ends each text.
      budget: largest number of tokens, or words, of a pair; each text is cut to half of what the marks leave.
      batch: number of pairs in one request.
    """

    service: Service
    model: str = "similarity"
    form: Literal["tokens", "words", "pair"] = "tokens"
    tokenizer: str = ""
    cls: str = "<|im_start|>"
    sep: str = "<|im_end|>"
    budget: int = 4096
    batch: int = 32

    def __post_init__(self) -> None:
        components.choices(self)
        if self.form == "tokens" and not self.tokenizer:
            raise ValueError("Classify.form = 'tokens' needs Classify.tokenizer, the classifier's folder or id")
        components.at_least(self, 5, "budget")
        components.at_least(self, 1, "batch")

    async def similar(self, pairs: Sequence[Pair]) -> list[float]:
        """Returns the last probability of each pair: that of the class "similar"."""
        starts = range(0, len(pairs), self.batch)
        answers = await asyncio.gather(*(self._batch(pairs[i : i + self.batch]) for i in starts))
        return [p for answer in answers for p in answer]

    async def _batch(self, pairs: Sequence[Pair]) -> list[float]:
        def read(answer: Any) -> list[float]:
            rows = sorted(answer["data"], key=lambda row: row.get("index", 0))
            found = [float(row["probs"][-1]) for row in rows]
            if len(found) != len(pairs) or not all(0 <= p <= 1 for p in found):
                raise ValueError(f"{len(found)} answers for {len(pairs)} pairs, or no probabilities: {found[:4]}")
            return found

        body = {"model": self.model, "input": [self.sent(a, b) for a, b in pairs]}
        return await self.service.post("/classify", body, read)

    def sent(self, first: str, second: str) -> Any:
        """Returns a pair in the form in which it is sent."""
        half = (self.budget - 3) // 2
        if self.form == "pair":
            return [first, second]
        if self.form == "words":
            a, b = (" ".join(text.split()[:half]) for text in (first, second))
            return f"{self.cls} {a} {self.sep} {b} {self.sep}"
        return pair_ids(_tokenizer(self.tokenizer), (first, second), (self.cls, self.sep), self.budget)


@dataclass(frozen=True, kw_only=True)
class SharedWords:
    """An offline measure: n-grams of words that both texts share over all of both (Jaccard), letter case ignored.

    Attributes:
      n: number of words in an n-gram.
    """

    n: int = 1

    def __post_init__(self) -> None:
        components.at_least(self, 1, "n")

    async def similar(self, pairs: Sequence[Pair]) -> list[float]:
        """Returns |A and B| / |A or B| of each pair; 1 for two texts without n-grams."""
        grams = [(ngrams(a.lower(), self.n), ngrams(b.lower(), self.n)) for a, b in pairs]
        return [len(set(a) & set(b)) / len(set(a) | set(b)) if a or b else 1.0 for a, b in grams]


@dataclass(frozen=True, kw_only=True)
class SameText:
    """An offline measure: 1 where two responses are equal, white space at the ends aside, else 0; for tasks with many answers.

    Attributes:
      pattern: regular expression of the compared part, or its first group where it has one; empty compares the
        whole response. A response without a match is compared as a whole.
    """

    pattern: str = ""
    _compiled: "re.Pattern[str]" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "_compiled", re.compile(self.pattern, re.DOTALL))
        except re.error as error:
            raise ValueError(f"SameText.pattern={self.pattern!r} is no regular expression: {error}") from error

    async def similar(self, pairs: Sequence[Pair]) -> list[float]:
        """Returns 0 or 1 for each pair."""
        return [float(self._compared(a) == self._compared(b)) for a, b in pairs]

    def _compared(self, text: str) -> str:
        found = self._compiled.search(text) if self.pattern else None
        return (found[found.re.groups and 1] or "" if found else text).strip()


def pair_ids(tokenizer: Any, pair: Pair, marks: tuple[str, str], budget: int) -> list[int]:
    """Returns CLS a SEP b SEP, the form in which classifiers of pairs are trained and asked; each text is cut to half the budget.

    Args:
      marks: the tokens CLS and SEP.
      budget: largest number of tokens.

    Raises:
      ValueError: a mark is not a token.
    """
    cls, sep = tokenizer.convert_tokens_to_ids(list(marks))
    if cls is None or sep is None or tokenizer.unk_token_id in (cls, sep):
        raise ValueError(f"cls and sep of pairs must be tokens of {tokenizer.name_or_path!r} (got {marks})")
    half = (budget - 3) // 2
    a, b = (tokenizer.encode(text, add_special_tokens=False)[:half] for text in pair)
    return [cls, *a, sep, *b, sep]


def ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    """Returns the n-grams of a text's words, in order; none for a text of fewer than n words."""
    words = text.split()
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


@cache
def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
