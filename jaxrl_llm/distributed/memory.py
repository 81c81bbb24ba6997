"""The memory of a run: what a process on a CPU keeps of it, how much devices have free, and advice where one has none left.

On a CPU XLA's programs allocate their memory at each call and free it at its end. By default glibc returns free large blocks, and free
memory at the ends of its arenas, to the system. The next call gets pages that the system fills with zeros one by one: 5.8 million in the
quickstart, which took a sixth of its processor seconds.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

_MARK = "RESOURCE_EXHAUSTED"
_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")
# The options of mallopt(3): glibc's malloc.h numbers them.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
MMAP_LIMIT = 32 * 2**20  # bytes; the highest threshold of every version
# Bytes: larger blocks cost more to compute than to fill with zeros, and are returned to the system when they are free.
BLOCK = 256 * 2**20
FREE = 2**30  # bytes at the heap's end that stay when they are free
OPTIONS = ((ARENA_MAX, 1), (TRIM_THRESHOLD, FREE), (MMAP_THRESHOLD, MMAP_LIMIT), (MMAP_THRESHOLD, BLOCK))


def keep(environment: Mapping[str, str] = os.environ) -> bool:
    """Lets this process keep the memory that its programs free; called before JAX starts its threads. Returns whether it does.

    A process whose environment sets the allocator (MALLOC_..., GLIBC_TUNABLES) is left as it is, and so is one with another C library.
    """
    chosen = any(name.startswith("MALLOC_") for name in environment) or "malloc" in environment.get(
        "GLIBC_TUNABLES", ""
    )
    mallopt: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)
    if chosen or mallopt is None:
        return False
    # A version that refuses BLOCK keeps the threshold that it took before.
    return all([mallopt(*option) for option in OPTIONS][:-1])


def half_free() -> bool:
    """Returns whether each device of this process has at least half of its memory free, or does not report it, as a CPU's."""
    import jax  # this module is loaded before JAX is set up

    known = [found for device in jax.local_devices() if (found := device.memory_stats())]
    return all(2 * found.get("bytes_in_use", 0) <= found.get("bytes_limit", 0) for found in known)


def ran_out(error: BaseException) -> bool:
    """Returns whether the error is XLA's out-of-memory error."""
    return type(error).__name__ in _ERRORS and _MARK in str(error)


def advice(error: BaseException, doing: str, rows: int | None = None, row_tokens: int | None = None) -> str:
    """Returns the message that says which bindings to lower, the cheapest first."""
    line = next((part for part in str(error).splitlines() if _MARK in part), "")[:300]
    now = "" if rows is None else f" (now {rows} rows of {row_tokens} positions)"
    return (
        f"a device ran out of memory while {doing} [{line.strip()}]. Lower ROWS, then ROW_TOKENS, which are a micro-batch{now}; have the "
        "backward pass recompute more by sources.PolicySource.remat = 'full'; spread over more devices by train.MeshConfig.fsdp; "
        "keep moments on the host by train.Optimizer.offload = True. An embedded sampler takes less with a smaller "
        "embedded.EmbeddedSampler.slots, a vLLM server on the same GPU with a smaller VLLM_MEMORY. --dry_run predicts what a device "
        "needs; the same command goes on from the last checkpoint"
    )


def explained(doing: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps a method of a StageTrainer: an out-of-memory error becomes a MemoryError that says what to do.

    Its arguments may have been donated by then, so the step is not tried again: the run ends, and a restart resumes from its last checkpoint.
    """

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(stage: Any, *arguments: Any, **named: Any) -> Any:
            try:
                return method(stage, *arguments, **named)
            except Exception as error:
                if not ran_out(error):
                    raise
                packing = stage.config.packing
                raise MemoryError(advice(error, doing, packing.rows, packing.row_tokens)) from error

        return run

    return wrap
