"""Compiles the programs of an update side by side, before the first update.

With a tail (`Packing.tail`) a minibatch's last micro-batches have fewer rows, and each number of rows is a program of its own. Compiled
where an update first comes to them, they follow one another, in the first steps of a run.
"""

import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from jaxrl_llm.algorithms.batch import MicroBatch
from jaxrl_llm.distributed.mesh import Partitioner
from jaxrl_llm.learner.batch import packed_axes
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.score import NO_BASES, Bases

_ready: weakref.WeakSet[Learner] = weakref.WeakSet()  # learners for which nothing is left to compile here


def shaped(batch: MicroBatch, rows: int, partitioner: Partitioner) -> MicroBatch:
    """Returns the shapes and shardings, on the mesh, of a micro-batch like `batch` with another number of rows."""

    def described(x: jax.Array) -> jax.ShapeDtypeStruct:
        shape = (x.shape[0] * rows // len(batch.tokens), *x.shape[1:]) if x.ndim else ()
        sharding = partitioner.sharding(packed_axes(x), shape) if x.ndim >= 2 else partitioner.replicated
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    return jax.tree.map(described, batch)


def compile_updates(
    learner: Learner, minibatch: Sequence[MicroBatch], sizes: Sequence[int], bases: Bases = NO_BASES
) -> int:
    """Compiles, once for a learner, what updates by micro-batches of `sizes` rows run, of which `minibatch` is an example; returns the
    number of programs.

    A call of the learner's functions with such shapes finds its program compiled. Nothing is done where there is one size, and where
    several processes train, which compile programs in one order.
    """
    if len(sizes) < 2 or jax.process_count() > 1 or learner in _ready:
        return 0
    _ready.add(learner)
    several = min(len(minibatch), 2)
    lowered = [
        program
        for number, rows in enumerate(sizes)
        for name, program in learner.lowered(shaped(minibatch[0], rows, learner.partitioner), several, bases).items()
        if name != "apply" or number == 0
    ]
    with ThreadPoolExecutor(len(lowered)) as threads:
        return len(list(threads.map(lambda program: program.compile(), lowered)))
