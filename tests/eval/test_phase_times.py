"""What the measurement of an update's time does to the process that it runs in."""

import subprocess
import sys

import pytest

FAULTS = """
import resource
from jaxrl_llm.tools.phase_times import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _ = bytes([1]) * 2**26
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = [faults(), faults()][1]
kept = keep_freed_memory()
print(int(kept), first, [faults(), faults()][1])
"""


def test_freed_memory_is_faulted_in_again_only_where_it_is_not_kept():
    out = subprocess.run([sys.executable, "-c", FAULTS], check=True, capture_output=True, text=True).stdout
    kept, before, after = map(int, out.split())
    if not kept:
        pytest.skip("the allocator is not glibc's")
    assert before >= 1000 and after < 100  # 64 MiB are 16,384 pages of 4 KiB, and at least 1,024 of 64 KiB
