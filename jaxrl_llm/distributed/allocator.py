"""The C library's allocator in a run on a CPU, where XLA's programs take their memory at each call and give it back at its end.

glibc returns large blocks to the system, and what its threads' arenas do not hold any more. The next call gets pages that the system
has filled with zeros one by one: in the quickstart 5.8 million, which took a sixth of its processor seconds.
"""

import ctypes
import os
from collections.abc import Callable, Mapping

# The options of mallopt(3): glibc's malloc.h numbers them.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
MMAP_LIMIT = 32 * 2**20  # bytes; the highest threshold of every version
# Bytes: larger blocks cost more to compute than to fill, and go back to the system when they are free.
BLOCK = 256 * 2**20
FREE = 2**30  # bytes at the heap's end that stay when they are free
OPTIONS = ((ARENA_MAX, 1), (TRIM_THRESHOLD, FREE), (MMAP_THRESHOLD, MMAP_LIMIT), (MMAP_THRESHOLD, BLOCK))


def keep(environment: Mapping[str, str] = os.environ) -> bool:
    """Lets this process keep what its programs give back, before JAX starts its threads; returns whether it does.

    A process whose environment sets the allocator (MALLOC_..., GLIBC_TUNABLES) stays as it is, and so does one with another C library.
    """
    chosen = any(name.startswith("MALLOC_") for name in environment) or "malloc" in environment.get(
        "GLIBC_TUNABLES", ""
    )
    mallopt: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)
    if chosen or mallopt is None:
        return False
    # A version that refuses BLOCK keeps the threshold that it took before.
    return all([mallopt(*option) for option in OPTIONS][:-1])
