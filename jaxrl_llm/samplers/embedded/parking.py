"""Parked slots keep the keys and values of a conversation for its next turn.

A turn whose prompt begins with exactly the tokens of a parked slot takes that slot, and only the rest of the prompt is prefilled. Where
a slot is needed, the one that was parked first is evicted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxrl_llm.kernels.decode_attention import cache as caches
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.transformer import Cache
from jaxrl_llm.samplers.embedded.shelf import of_rows

KEPT = frozenset({"k", "v"})  # parts of a cache of which a prefix can be reused


@dataclass(frozen=True, kw_only=True, eq=False)
class Parked:
    """The contents of a parked slot.

    Attributes:
      conversation: the id of its conversation.
      tokens: int32 [T], the tokens of the slot's first T entries.
      version: version of the weights that computed all of the entries.
      place: the place of the adapters that did.
    """

    conversation: str
    tokens: np.ndarray
    version: int
    place: int = 0


class Parking:
    """The parked slots of a batch, in the order in which they were parked.

    Attributes:
      evicted: tokens of slots that were evicted while their conversations went on.
    """

    def __init__(self) -> None:
        self.evicted = 0
        self._slots: dict[int, Parked] = {}
        self._of: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._slots))

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def park(self, slot: int, parked: Parked) -> None:
        """Parks a slot."""
        self._slots[slot] = parked
        self._of.setdefault(parked.conversation, []).append(slot)

    def find(self, conversation: str, prompt: np.ndarray, version: int, place: int = 0) -> int | None:
        """Returns the slot that holds the longest beginning of a prompt, int32 [P], by the weights of `version` and the adapters of
        `place`; None for no slot."""
        held = [(len(self._slots[slot].tokens), slot) for slot in self._of.get(conversation, ())]
        for length, slot in sorted(held, reverse=True):
            parked = self._slots[slot]
            same = (parked.version, parked.place) == (version, place)
            if same and length < len(prompt) and np.array_equal(parked.tokens, prompt[:length]):
                return slot
        return None

    def take(self, slot: int) -> Parked:
        """Ends the parking of a slot; returns its contents."""
        parked = self._slots.pop(slot)
        others = self._of[parked.conversation]
        others.remove(slot)
        if not others:
            del self._of[parked.conversation]
        return parked

    def evict(self, slot: int | None = None) -> int:
        """Evicts a slot, or the one that was parked first, and returns its number."""
        slot = next(iter(self._slots)) if slot is None else slot
        self.evicted += len(self.take(slot).tokens)
        return slot

    def forget(self, conversation: str) -> None:
        """Frees the slots of a conversation that has ended."""
        for slot in list(self._of.get(conversation, ())):
            self.take(slot)

    def clear(self, place: int | None = None) -> None:
        """Evicts all slots, or those of the adapters in a place."""
        for slot in [slot for slot, parked in self._slots.items() if place in (None, parked.place)]:
            self.evicted += len(self.take(slot).tokens)


@partial(jax.jit, static_argnames=("policy",), donate_argnames=("cache",))
def lengthen(
    params: Params,
    cache: Cache,
    tokens: Int[Array, "N T"],
    starts: Int[Array, " N"],
    slots: Int[Array, " N"],
    places: Int[Array, " N"] | None = None,
    table: Int[Array, "N P"] | None = None,
    *,
    policy: Policy,
) -> Cache:
    """Writes the keys and values of right-padded `tokens` after the first `starts` entries of `slots`.

    A row whose slot is beyond the last one is padding. Entries of padding lie behind those of the tokens, where they are overwritten
    before they are read, or beyond the end of the slot, where they are dropped. `places` are the rows' sets of adapters, where several
    are served. `table` has the numbers of the slots' pages, among those of all shards, where the cache is one of pages.
    """
    params = of_rows(params, places)
    taken = (
        partial(jnp.take, indices=slots, axis=1, mode="clip")
        if table is None
        else partial(caches.gathered, table=table)
    )
    rows = {name: taken(entries) for name, entries in cache.items()}
    positions = starts[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    _, rows, _ = policy.looped.routed_extend(params, rows, tokens, positions)
    if table is None:
        return {name: entries.at[:, slots].set(rows[name], mode="drop") for name, entries in cache.items()}
    # Pages that several rows share get the same entries from each.
    size, numbers = cache["k"].shape[caches.entry_axis()], table.reshape(-1)
    return {name: entries.at[:, numbers].set(caches.parts(rows[name], size)) for name, entries in cache.items()}
