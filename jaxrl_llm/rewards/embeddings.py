"""Semantic diversity reward: the distance of a response's meaning from the rest of its group, by text embeddings.

    distance_i = mean over j != i of (1 - cos(e_i, e_j)),  0 for equal directions, 1 for orthogonal ones

Its mean over a group is the group's diversity: 1 minus the mean pairwise cosine similarity.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable
from zlib import crc32

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.experience import Rollout, Scores
from jaxrl_llm.rewards.service import Service
from jaxrl_llm.rewards.wrap import Failed, PlainReward, none_judged, part


@runtime_checkable
class Embedder(Protocol):
    """An embedder of texts."""

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Returns float [N, D]; raises wrap.Failed where it cannot."""
        ...


@dataclass(frozen=True, kw_only=True)
class ServedEmbedder:
    """Embeds texts with a server of OpenAI's POST /v1/embeddings, such as vLLM with an embedding model.

    Attributes:
      service: the server's address without "/v1", and its time limits.
      model: the model's name on the server.
    """

    service: Service
    model: str

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the server's embeddings; raises wrap.Failed where their number or sizes differ."""

        def read(answer: Any) -> np.ndarray:
            rows = sorted(answer["data"], key=lambda row: row["index"])
            found = np.array([row["embedding"] for row in rows], np.float64)
            if found.ndim != 2 or len(found) != len(texts):
                raise ValueError(f"embeddings of shape {found.shape} for {len(texts)} texts")
            return found

        return await self.service.post("/v1/embeddings", {"model": self.model, "input": list(texts)}, read)


@dataclass(frozen=True, kw_only=True)
class HashedWords:
    """Embeds texts as counts of words and word pairs, hashed to `size` numbers; needs no model and knows no synonyms.

    Attributes:
      size: dimension of an embedding.
    """

    size: int = 4096

    def __post_init__(self) -> None:
        components.at_least(self, 1, "size")

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the counts; a text without words is all zeros."""
        found = np.zeros((len(texts), self.size))
        for row, text in zip(found, texts, strict=True):
            words = re.findall(r"[^\W_]+", text.lower())
            for gram in [*words, *map(" ".join, pairwise(words))]:
                row[crc32(gram.encode()) % self.size] += 1
        return found


@dataclass(frozen=True, kw_only=True)
class SemanticDistance(PlainReward):
    """Rewards the distance of each response to the others of its group; 0 for a single response.

    Attributes:
      embedder: embeds the responses.
      name: the part's name; a part whose name starts with "log/" is logged and not added to the reward.
    """

    embedder: Embedder
    name: str = "semantic_distance"

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns one part [G]; invalid for the whole group where the embedder fails."""
        del stats
        try:
            found = await self.embedder.embed([rollout.text for rollout in rollouts])
        except Failed as failure:
            return none_judged(self.name, rollouts, failure)
        return part(self.name, distances(found).tolist())


def distances(embeddings: np.ndarray) -> np.ndarray:
    """Returns the mean cosine distance [G] of each of [G, D] to the others; a zero vector is orthogonal to all."""
    size = np.linalg.norm(embeddings, axis=1, keepdims=True)
    unit = embeddings / np.where(size > 0, size, 1.0)
    count = len(unit)
    if count < 2:
        return np.zeros(count)
    cosine = unit @ unit.T
    return 1 - (cosine.sum(axis=1) - np.diag(cosine)) / (count - 1)
