"""Prefilled prompts on their way into slots."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax
import numpy as np

from jaxrl_llm.models.transformer import Cache
from jaxrl_llm.samplers.embedded.pages import Shared
from jaxrl_llm.samplers.requests import Draft, Request

Prefix = tuple[Request, int]  # a request and the index of one of its prefixes

NO_TOKEN = -1


def bytes_of(prefix: Prefix) -> bytes:
    """Returns the place of a prefix's adapters and its token ids as bytes, by which equal prefixes are found."""
    request, index = prefix
    return np.asarray([request.place, *request.prefixes[index]], np.int32).tobytes()


@dataclass(eq=False)
class Recorded:
    """The experts of the tokens of a block's prompts, [N, T, L, k], copied from the device at the first use."""

    device: jax.Array

    @cached_property
    def host(self) -> np.ndarray:
        return np.asarray(self.device)


@dataclass(kw_only=True)
class Block:
    """Prefilled prompts: rows of `cache`, `tokens` (padded with -1) and `places` of their adapters, and the sequences that are still to be
    copied into slots; `shared` has the pages of rows that are in slots."""

    cache: Cache
    tokens: np.ndarray
    places: np.ndarray
    version: int
    drafts: deque[tuple[int, Draft]]
    routes: Recorded | None = None
    shared: Shared = field(default_factory=dict)

    def length(self, row: int) -> int:
        """Returns the number of tokens of a row."""
        return int(np.sum(self.tokens[row] != NO_TOKEN))


def padded(pairs: Sequence[tuple[int, int]], size: int, none: int) -> np.ndarray:
    """Returns int32 [size, 2] pairs, and (none, 0) for the rest."""
    found = np.full((size, 2), (none, 0), np.int32)
    found[: len(pairs)] = np.reshape(pairs, (-1, 2))
    return found
