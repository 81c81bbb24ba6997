"""Compiles the programs that a step's updates need side by side, before the first of them runs.

Micro-batches of each number of rows (`Packing.tail`) are a program of their own, as are a minibatch of one and of several, and the
optimizer's step. Where updates come to them one after the other, they are compiled one after the other. What is small, and an offloaded
optimizer's many parts, are left to the updates.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

import jax

from jaxrl_llm.algorithms.batch import MicroBatch
from jaxrl_llm.distributed.xla_flags import cores
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.score import NO_BASES, Bases

Kind = tuple[int, int]  # rows of a micro-batch, and the number of its minibatch's micro-batches: 1, or 2 for several
CORES = 8  # cores of this process; with fewer, the compiler's own threads take all of them for one program
_known: WeakKeyDictionary[Learner, set[Kind]] = WeakKeyDictionary()


def compile_updates(learner: Learner, minibatches: Sequence[Sequence[MicroBatch]], bases: Bases = NO_BASES) -> int:
    """Compiles what updates by these minibatches run and no earlier ones ran, where that is several programs; returns their number.

    The learner's own calls then find them compiled. Several processes leave it to their updates, which compile in one order, and so do
    hosts with few cores.
    """
    if jax.process_count() > 1 or cores() < CORES:
        return 0
    found = {(len(micro.tokens), min(len(mini), 2)): micro for mini in minibatches for micro in mini}
    known = _known.setdefault(learner, set())
    new = {kind: micro for kind, micro in found.items() if kind not in known}
    known.update(new)
    lowered = {}
    for (rows, count), micro in new.items():
        for name, program in learner.lowered(micro, count, bases).items():
            lowered[name if name == "apply" else (name, rows)] = program
    if len(lowered) < 2:
        return 0
    with ThreadPoolExecutor(len(lowered)) as threads:
        return len(list(threads.map(lambda program: program.compile(), lowered.values())))
