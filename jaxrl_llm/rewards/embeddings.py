"""Semantic diversity: how far the meaning of a response lies from those of its group, by embeddings of the texts.

    distance_i = mean over j != i of (1 - cos(e_i, e_j)),  0 for equal directions, 1 for orthogonal ones

Its mean over a group is the diversity of the group: one less its mean pairwise cosine similarity.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Protocol, runtime_checkable
from zlib import crc32

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.experience import Rollout, Scores
from jaxrl_llm.rewards.service import Service
from jaxrl_llm.rewards.wrap import Failed, none_judged, part


@runtime_checkable
class Embedder(Protocol):
    """Embeds texts."""

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Float [N, D]; raises wrap.Failed where it cannot."""
        ...


@dataclass(frozen=True, kw_only=True)
class ServedEmbedder:
    """A server of OpenAI's POST /v1/embeddings, such as vLLM with an embedding model.

    Attributes:
      service: where it is, without "/v1".
      model: the model's name there.
    """

    service: Service
    model: str

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """What the server gives; raises wrap.Failed for another number of embeddings, or sizes that differ."""

        def read(answer: Any) -> np.ndarray:
            rows = sorted(answer["data"], key=lambda row: row["index"])
            found = np.array([row["embedding"] for row in rows], np.float64)
            if found.ndim != 2 or len(found) != len(texts):
                raise ValueError(f"embeddings of shape {found.shape} for {len(texts)} texts")
            return found

        return await self.service.post("/v1/embeddings", {"model": self.model, "input": list(texts)}, read)


@dataclass(frozen=True, kw_only=True)
class HashedWords:
    """Counts of words and pairs of words, hashed to `size` numbers: needs no model, and knows no synonyms.

    Attributes:
      size: numbers of an embedding.
    """

    size: int = 4096

    def __post_init__(self) -> None:
        components.at_least(self, 1, "size")

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Counts; a text without words is at 0."""
        found = np.zeros((len(texts), self.size))
        for row, text in zip(found, texts, strict=True):
            words = re.findall(r"[^\W_]+", text.lower())
            for gram in [*words, *map(" ".join, pairwise(words))]:
                row[crc32(gram.encode()) % self.size] += 1
        return found


@dataclass(frozen=True, kw_only=True)
class SemanticDistance:
    """Part "semantic_distance": of each response to the others of its group; 0 where it is alone.

    Attributes:
      embedder: embeds the responses.
      name: the part's name; one that starts with "log/" is measured and not added to the reward.
    """

    needs_stats: ClassVar[bool] = False

    embedder: Embedder
    name: str = "semantic_distance"

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """One part [G]; invalid throughout where the embedder fails."""
        del stats
        try:
            found = await self.embedder.embed([rollout.text for rollout in rollouts])
        except Failed as failure:
            return none_judged(self.name, rollouts, failure)
        return part(self.name, distances(found).tolist())


def distances(embeddings: np.ndarray) -> np.ndarray:
    """Mean cosine distance of each of [G, D] to the others [G]; an embedding of length 0 is orthogonal to all."""
    size = np.linalg.norm(embeddings, axis=1, keepdims=True)
    unit = embeddings / np.where(size > 0, size, 1.0)
    count = len(unit)
    if count < 2:
        return np.zeros(count)
    cosine = unit @ unit.T
    return 1 - (cosine.sum(axis=1) - np.diag(cosine)) / (count - 1)
