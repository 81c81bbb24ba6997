"""Times a function on an accelerator, whose work is queued, by groups of calls, so that launches are hidden as in training."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

WARM_UP = 3
GROUP_S = 0.03


def timed(call: Callable[[], Any], wait: Callable[[Any], Any], runs: int) -> float:
    """Returns the seconds of one call: the median over `runs` groups of calls, each of which takes about GROUP_S and ends with a wait.

    A group takes long compared with a launch and the wait, as a kernel inside a training step does.
    """
    for _ in range(WARM_UP):
        start = time.perf_counter()
        wait(call())
        once = time.perf_counter() - start
    calls = min(max(int(GROUP_S / once), 1), 10)
    seconds = []
    for _ in range(runs):
        start, last = time.perf_counter(), None
        for _ in range(calls):
            last = call()
        wait(last)
        seconds.append((time.perf_counter() - start) / calls)
    return float(np.median(seconds))
