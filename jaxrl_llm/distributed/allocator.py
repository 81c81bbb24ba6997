"""Sets the C library's allocator for a run on a CPU, where XLA's programs allocate their memory at each call and free it at its end.

By default glibc returns free large blocks, and free memory at the ends of its arenas, to the system. The next call gets pages that the
system fills with zeros one by one: 5.8 million in the quickstart, which took a sixth of its processor seconds.
"""

import ctypes
import os
from collections.abc import Callable, Mapping

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
