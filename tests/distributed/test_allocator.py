"""Memory that a program gives back stays with the process, and the next call's pages need not be filled anew."""

import ctypes
import subprocess
import sys

import pytest

from jaxrl_llm.distributed import memory

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")

# 20 blocks of 100 MiB, one after the other, each written in all its pages of 4 KiB by a thread of its own.
PROGRAM = """
import ctypes, resource, sys, threading
from jaxrl_llm.distributed import memory
print(memory.keep({}) if "keep" in sys.argv else False)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size, page = 100 * 2**20, 4096
def call():
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*words: str) -> tuple[str, int]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)
    kept, count = done.stdout.split()
    return kept, int(count)


def test_pages_are_filled_once_and_not_at_each_call() -> None:
    pages = 100 * 2**20 // 4096
    assert faults()[1] > 19 * pages
    kept, count = faults("keep")
    assert kept == "True" and count < 1.1 * pages


def test_an_allocator_that_the_user_has_set_stays() -> None:
    assert not memory.keep({"MALLOC_ARENA_MAX": "4"})
    assert not memory.keep({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})
