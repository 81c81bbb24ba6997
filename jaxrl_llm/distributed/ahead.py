"""Compiles programs side by side, and before the calls that run them.

XLA compiles a program mostly in one thread, and the calls that need several come to them one after the other. JAX keeps what
`Lowered.compile` made, and a call of the same function for the same shapes and shardings finds it.
"""

import concurrent.futures
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakSet

import jax

from jaxrl_llm.distributed.memory import half_free
from jaxrl_llm.distributed.xla_flags import cores

_log = logging.getLogger(__name__)
THREADS = "ahead"  # what the names of threads in the background begin with
WAITED = "/jaxrl_llm/ahead/waited"  # name of the event that JAX's listeners get for each wait
_begun: WeakSet[Future[int]] = WeakSet()
CORES = 8  # cores of this process; with fewer, the compiler's own threads take all of them for one program


def worthwhile() -> bool:
    """Returns whether programs are compiled before the call that runs them: not where several processes must compile in one order, nor on
    few cores."""
    return jax.process_count() == 1 and cores() >= CORES


def compiled(programs: Iterable[jax.stages.Lowered], threads: str = "") -> int:
    """Compiles programs side by side, in threads whose names begin with `threads`, and returns their number."""
    several = list(programs)
    with ThreadPoolExecutor(max(min(len(several), cores()), 1), threads) as pool:
        return len(list(pool.map(lambda program: program.compile(), several)))


class Background:
    """Programs that are lowered and compiled beside the work of the calling thread, which waits for them before it calls them.

    Nothing is compiled where devices have too little memory left for the compiler to try kernels.
    """

    def __init__(self, programs: Callable[[], Iterable[jax.stages.Lowered]]) -> None:
        pool = ThreadPoolExecutor(1, THREADS)
        self._work: Future[int] = pool.submit(lambda: compiled(programs(), THREADS) if half_free() else 0)
        _begun.add(self._work)
        pool.shutdown(wait=False)

    def wait(self) -> int:
        """Returns the number of programs; what could not be compiled is said at the first call, and left to those that run it."""
        if not self._work.done():
            begin = time.perf_counter()
            concurrent.futures.wait([self._work])
            jax.monitoring.record_event_duration_secs(WAITED, time.perf_counter() - begin)
        if error := self._work.exception():
            _log.warning("programs are compiled when they are called, since that failed ahead of it: %r", error)
            self._work = Future()
            self._work.set_result(0)
        return self._work.result()


def busy() -> bool:
    """Returns whether anything is still being compiled in the background."""
    return any(not work.done() for work in _begun)
