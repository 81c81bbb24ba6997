"""The smaller batches to which a batch's last sequences move: their sizes, and their decode steps, compiled while the whole batch decodes."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxrl_llm.distributed.ahead import Background, worthwhile
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.samplers.embedded import decode
from jaxrl_llm.samplers.embedded.room import Capacity, fits_beside
from jaxrl_llm.samplers.embedded.slots import SlotBatch

FEWEST = 64  # fewest slots of a shard that a batch shrinks to: with fewer, launches alone take the time of a step


class Smaller:
    """Where a batch shrinks to, and programs for that, which are compiled for each batch of new shapes."""

    def __init__(self, policy: Policy, factor: int, dtype: str | None, record: bool) -> None:
        """Batches shrink by `factor`; `dtype` is the cache's, or None for the policy's; with `record` a step records experts."""
        self.policy, self.factor, self._dtype, self._record = policy, factor, dtype, record
        self._work = dict[
            tuple[Capacity, bool], Background
        ]()  # by the whole batch, and whether it draws from parts of distributions

    def sizes(self, batch: SlotBatch) -> list[int]:
        """Returns the numbers of slots to which a batch may shrink, step by step, the largest first."""
        shards, slots, found = self.policy.partitioner.batch_shards, batch.capacity.slots, list[int]()
        if batch.pages is not None and shards > 1:
            return []
        while slots % (self.factor * shards) == 0 and slots // self.factor >= FEWEST * shards:
            slots //= self.factor
            found.append(slots)
        return found

    def slots(self, batch: SlotBatch, steps: int, free: int | None) -> int:
        """Returns the fewest slots that hold the sequences with more than `steps` tokens to draw, where a device has room for both caches
        meanwhile; `free` is what it has without them."""
        live, now = batch.left(steps), batch.capacity.slots
        fewer = min([size for size in self.sizes(batch) if size >= live], default=now) if live else now
        return fewer if fewer < now and fits_beside(self.policy, batch.capacity, fewer, free, self._dtype) else now

    def begin(self, batch: SlotBatch, served: decode.Served, steps: int) -> None:
        """Begins to compile chunks of `steps` steps of the smaller batches, where this one is whole, new and may shrink; returns at once."""
        if batch.capacity != batch.whole or not worthwhile():
            return
        if (kind := (batch.whole, batch.cut)) in self._work:
            return
        if batch.left() is None or not (smaller := self.sizes(batch)):
            return
        weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), served)
        shapes = [self._shapes(replace(batch.whole, slots=slots), batch.seen) for slots in smaller]
        how = {"policy": self.policy, "steps": steps, "cut": kind[1], "record": self._record}
        self._work[kind] = Background(lambda: [decode.decode.lower(weights, *each, **how) for each in shapes])

    def wait(self, batch: SlotBatch) -> None:
        """Waits until what was begun for a batch is compiled."""
        if work := self._work.get((batch.whole, batch.cut)):
            work.wait()

    def _shapes(self, at: Capacity, seen: jax.Array) -> tuple[Any, ...]:
        """Returns the shapes of cache, table of seen tokens and slots, as `SlotBatch.step` gives them to `decode`."""
        policy = self.policy
        cache = policy.cache_shapes(at.slots, at.page or at.length, self._dtype, at.pages)
        slots = decode.Slots.empty(at.slots, at.stop_ids)
        if at.page:
            slots = slots._replace(table=np.zeros((at.slots, at.length // at.page), np.int32))
        table = jax.ShapeDtypeStruct((at.slots, seen.shape[1]), seen.dtype, sharding=seen.sharding)
        return cache, table, decode.on_devices(slots, slots, policy)
