"""Compiles programs side by side, and before the calls that run them.

XLA compiles a program mostly in one thread, and the calls that need several come to them one after the other. JAX keeps what
`Lowered.compile` made, and a call of the same function for the same shapes and shardings finds it.
"""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from jaxrl_llm.distributed.memory import half_free
from jaxrl_llm.distributed.xla_flags import cores

_log = logging.getLogger(__name__)
CORES = 8  # cores of this process; with fewer, the compiler's own threads take all of them for one program


def worthwhile() -> bool:
    """Returns whether programs are compiled before the call that runs them: not where several processes must compile in one order, nor on
    few cores."""
    return jax.process_count() == 1 and cores() >= CORES


def compiled(programs: Iterable[jax.stages.Lowered]) -> int:
    """Compiles programs side by side, and returns their number."""
    several = list(programs)
    with ThreadPoolExecutor(max(len(several), 1)) as threads:
        return len(list(threads.map(lambda program: program.compile(), several)))


class Background:
    """Programs that are lowered and compiled beside the work of the calling thread, which waits for them before it calls them.

    Nothing is compiled where devices have too little memory left for the compiler to try kernels.
    """

    def __init__(self, programs: Callable[[], Iterable[jax.stages.Lowered]]) -> None:
        thread = ThreadPoolExecutor(1)
        self._work: Future[int] = thread.submit(lambda: compiled(programs()) if half_free() else 0)
        thread.shutdown(wait=False)

    def wait(self) -> int:
        """Returns the number of programs; what could not be compiled is said at the first call, and left to those that run it."""
        if error := self._work.exception():
            _log.warning("programs are compiled when they are called, since that failed ahead of it: %r", error)
            self._work = Future()
            self._work.set_result(0)
        return self._work.result()
