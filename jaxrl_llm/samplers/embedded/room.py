"""The shapes of a batch of slots, how many slots fit in a device's memory, and the counters of what a sampler does.

    taken = keys and values, or pages of them, or states + table of seen tokens + COPIES x float32 logits,  at most SHARE x (limit - in use)

The rest is for a block of prompts being prefilled, workspaces of libraries and fragmentation.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.decode_attention import cache as caches
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.samplers.requests import Request

SHARE = 0.9
COPIES = 4  # copies of a step's logits: the logits, noise, and sorted logits where a filter is set
APART = 0.1
LEAST = 4  # fewest pages: those of slots that fill a quarter of their longest sequence
MIB, GIB = 2**20, 2**30

_SHORTEST = 16  # tokens of the shortest bucket: shorter ones would compile more programs and save nothing
_STOP_IDS = 4  # fewest stop ids that a batch has room for

_log = logging.getLogger(__name__)


def shortest() -> int:
    """Returns the shortest cache of a slot, in tokens."""
    return max(_SHORTEST, caches.page())


def bucket(size: int, unit: int = 1) -> int:
    """Returns the smallest unit x 2^k that holds `size`."""
    return unit << max(0, -(-size // unit) - 1).bit_length()


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The fixed shapes of a batch.

    Attributes:
      slots: sequences at a time.
      length: tokens of a slot's cache.
      stop_ids: stop ids of a slot.
      penalised: whether seen tokens are recorded, for a repetition penalty.
      page: entries of a page of which slots take as many as they fill; 0 where each has its own `length` entries.
      pages: number of pages of all shards; 0 where there are none.
    """

    slots: int
    length: int
    stop_ids: int
    penalised: bool
    page: int = 0
    pages: int = 0

    @classmethod
    def of(cls, requests: Sequence[Request], *, max_slots: int, shards: int, page: int = 0) -> "Capacity":
        """Returns the smallest buckets that hold `requests`; rows fill the mesh's batch shards.

        With pages of `page` entries, there are as many as all slots may fill, and one of each shard's that is nobody's.
        """
        asked = sum(request.sequences for request in requests)
        slots = bucket(max(asked, *(request.at_once for request in requests)), shards)
        length = bucket(max(request.length for request in requests), shortest())
        longest, unit = max(request.max_length for request in requests), page or caches.page()
        slots = min(slots, -(-max_slots // shards) * shards)
        length = min(bucket(length, unit), -(-longest // unit) * unit)
        return cls(
            slots=slots,
            length=length,
            stop_ids=bucket(max(len(request.settings.stop_token_ids) for request in requests), _STOP_IDS),
            penalised=any(request.settings.repetition_penalty != 1 for request in requests),
            page=page,
            pages=slots * (length // page) + shards if page else 0,
        )

    def stretched(self, other: "Capacity") -> "Capacity":
        """Returns these slots with the length of another capacity, and with its table of seen tokens."""
        pages = self.pages + (self.slots * (other.length - self.length) // self.page if self.page else 0)
        return replace(self, length=other.length, penalised=other.penalised, pages=pages)

    def holds(self, other: "Capacity") -> bool:
        return (
            self.slots >= other.slots
            and self.length >= other.length
            and self.stop_ids >= other.stop_ids
            and self.penalised >= other.penalised
        )


@dataclass(kw_only=True)
class Counters:
    """Tokens, slot-steps of decoding, and seconds of a sampler's work since the last call of its `metrics`."""

    generated: int = 0
    prefilled: int = 0
    again: int = 0
    kept: int = 0
    evicted: int = 0
    slot_steps: int = 0
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Returns the counters by name; occupancy is the share of slot-steps that gave a kept token."""
        return {
            "sampler/generated_tokens": float(self.generated),
            "sampler/prefill_tokens": float(self.prefilled),
            "sampler/prefill_again_tokens": float(self.again),
            "sampler/kept_tokens": float(self.kept),
            "sampler/evicted_tokens": float(self.evicted),
            "sampler/tokens_per_s": self.generated / self.seconds if self.seconds else 0.0,
            "sampler/occupancy": self.generated / self.slot_steps if self.slot_steps else 0.0,
            "sampler/seconds": self.seconds,
        }


# -- memory ------------------------------------------------------------------------------------------------------------


def free_bytes(devices: Sequence[Any]) -> int | None:
    """Returns the bytes that the fullest device of all processes has left; None where the backend does not report memory, as a CPU's."""
    stats = [device.memory_stats() or {} for device in devices]
    known = [found["bytes_limit"] - found.get("bytes_in_use", 0) for found in stats if found.get("bytes_limit")]
    if not known:
        return None
    least = max(min(known), 0)
    if jax.process_count() == 1:
        return least
    from jax.experimental import multihost_utils  # all processes decode the same shapes

    return MIB * int(np.min(multihost_utils.process_allgather(np.int32(least // MIB))))


def taken_bytes(policy: Policy, capacity: Capacity, dtype: str | None = None) -> int:
    """Returns the bytes of a batch of slots on one device; `dtype` is the cache's, or None for the policy's."""
    size, slots = policy.architecture, capacity.slots
    vocabulary = (slots, size.vocabulary_size)

    def on_a_device(axes: tuple[str | None, ...], shape: tuple[int, ...]) -> int:
        return math.prod(policy.partitioner.sharding(axes, shape).shard_shape(shape))

    logits = on_a_device(("batch", "vocabulary"), vocabulary)
    parts = policy.cache_shapes(slots, capacity.page or capacity.length, dtype, capacity.pages).values()
    cache = sum(math.prod(x.sharding.shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize for x in parts)
    return cache + COPIES * 4 * logits + (logits if capacity.penalised else 0)


def room_apart(policy: Policy, params: Any) -> bool:
    """Returns whether a GPU has room for a second copy of its layers' weights as separate arrays: at most APART of what is free."""
    if dispatch.device().platform != "gpu":
        return False
    free = free_bytes(policy.partitioner.mesh.local_devices)
    stacks = [params[stack] for stack in policy.architecture.stacks]
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(stacks))
    return free is not None and held <= APART * free


def fitting(policy: Policy, wanted: Capacity, free: int | None, dtype: str | None = None) -> Capacity:
    """Returns `wanted`, with fewer slots where so many do not fit: the largest shards x 2^k that does. Of pages there are as many as fit
    then, at least those of a quarter of what the slots may fill, and of the longest sequence.

    Raises:
      MemoryError: not even one slot a shard fits.
    """
    if free is None or taken_bytes(policy, wanted, dtype) <= SHARE * free:
        return wanted
    shards = policy.partitioner.batch_shards
    smaller = wanted
    while taken_bytes(policy, smaller := _paged(policy, smaller, free, dtype), dtype) > SHARE * free:
        if smaller.slots <= shards:
            raise MemoryError(
                f"the cache of one sequence of {wanted.length} tokens takes {_gib(taken_bytes(policy, smaller, dtype))} on a device, "
                f"where {_gib(SHARE * free)} may be taken: shorten prompts and responses (PROMPT_LIMIT, RESPONSE_LIMIT, or the stage's "
                "max_prompt_tokens and SamplingParams.max_tokens), set embedded.EmbeddedSampler.cache = 'float8_e4m3fn', spread "
                "over more devices by train.MeshConfig.tensor, or give JAX more by XLA_PYTHON_CLIENT_MEM_FRACTION"
            )
        smaller = replace(smaller, slots=bucket(smaller.slots, shards) // 2)
    return smaller


def fits_beside(policy: Policy, capacity: Capacity, slots: int, free: int | None, dtype: str | None = None) -> bool:
    """Returns whether a batch may move to `slots` slots: a device has room for both caches, but for pages, which stay where they are."""
    if free is None or slots == capacity.slots:
        return True
    fewer = replace(capacity, slots=slots, pages=policy.partitioner.batch_shards if capacity.page else 0)
    return taken_bytes(policy, capacity, dtype) + taken_bytes(policy, fewer, dtype) <= free


def _paged(policy: Policy, capacity: Capacity, free: int, dtype: str | None) -> Capacity:
    """Returns a capacity with as many pages as fit, or as it must have."""
    if not capacity.page:
        return capacity
    shards, each = policy.partitioner.batch_shards, capacity.length // capacity.page
    slots = capacity.slots // shards
    one, two = (taken_bytes(policy, replace(capacity, pages=n * shards), dtype) for n in (1, 2))
    fitting = 1 + int(SHARE * free - one) // (two - one)
    least = 1 + max(each, -(-slots * each // LEAST))
    return replace(capacity, pages=shards * min(max(fitting, least), 1 + slots * each))


def announce(policy: Policy, wanted: Capacity, given: Capacity, free: int, dtype: str | None = None) -> None:
    """Logs that there are fewer slots than were wanted, and why."""
    _log.warning(
        "%d slots of %d tokens take %s on a device, where %s may be taken: sampling with %d slots%s, %s. %sshorten prompts or responses, "
        "or give JAX more by XLA_PYTHON_CLIENT_MEM_FRACTION",
        wanted.slots, wanted.length, _gib(taken_bytes(policy, wanted, dtype)), _gib(SHARE * free), given.slots,
        f" and {given.pages} of {wanted.pages} pages" if wanted.page else "", _gib(taken_bytes(policy, given, dtype)),
        "Sequences that find no page wait. To change that, " if given.pages and given.slots == wanted.slots
        else "Set embedded.EmbeddedSampler.slots to that, ",
    )  # fmt: skip


def _gib(count: float) -> str:
    return f"{count / GIB:.3g} GiB"
