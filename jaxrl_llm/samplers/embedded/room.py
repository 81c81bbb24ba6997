"""Computes how many slots fit in a device's memory.

    taken = keys and values, or pages of them, or states + table of seen tokens + COPIES x float32 logits,  at most SHARE x (limit - in use)

The rest is for a block of prompts being prefilled, workspaces of libraries and fragmentation.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.samplers.embedded.capacity import Capacity, bucket

SHARE = 0.9
COPIES = 4  # copies of a step's logits: the logits, noise, and sorted logits where a filter is set
APART = 0.1
LEAST = 4  # fewest pages: those of slots that fill a quarter of their longest sequence
MIB, GIB = 2**20, 2**30

_log = logging.getLogger(__name__)


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
