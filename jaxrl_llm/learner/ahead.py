"""Compiles the programs that a step's updates need side by side, before the first of them runs.

Micro-batches of each number of rows (`Packing.tail`) are a program of their own, as are a minibatch of one and of several, and the
optimizer's step. Where updates come to them one after the other, they are compiled one after the other. What is small, and an offloaded
optimizer's many parts, are left to the updates. A stage's first programs, that of scoring among them, are compiled from their shapes
alone while the stage is evaluated before its first step and samples for it.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax

from jaxrl_llm.algorithms.batch import MicroBatch
from jaxrl_llm.distributed.ahead import compiled, worthwhile
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.score import NO_BASES, Bases

_known: WeakKeyDictionary[Learner, set[Any]] = WeakKeyDictionary()


def compile_updates(learner: Learner, minibatches: Sequence[Sequence[MicroBatch]], bases: Bases = NO_BASES) -> int:
    """Compiles what updates by these minibatches run and no earlier ones ran, where that is several programs; returns their number.

    The learner's own calls then find them compiled.
    """
    if not worthwhile():
        return 0
    found = _lowered(learner, [(micro, min(len(mini), 2)) for mini in minibatches for micro in mini], bases)
    return compiled(found) if len(found) > 1 else 0


def first_programs(
    learner: Learner, shapes: Callable[[], Sequence[MicroBatch]], count: int, bases: Bases, *, scores: bool
) -> list[jax.stages.Lowered]:
    """Lowers what updates by micro-batches of these shapes run in minibatches of 1, or 2 for several, and with `scores` what scores them."""
    micros = shapes()
    scoring = [learner.lowered(_bare(micro), 0, bases)["score"] for micro in micros] if scores else []
    return scoring + _lowered(learner, [(micro, count) for micro in micros], bases)


def _lowered(learner: Learner, wanted: Sequence[tuple[MicroBatch, int]], bases: Bases) -> list[jax.stages.Lowered]:
    """Returns the programs, of those of updates with micro-batches in minibatches of 1 or 2 (several), that were not returned before."""
    known, found = _known.setdefault(learner, set()), list[jax.stages.Lowered]()
    for micro, count in wanted:
        kind = jax.tree.structure(micro), tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(micro)), count
        if kind in known:
            continue
        known.add(kind)
        for name, program in learner.lowered(micro, count, bases).items():
            if name != "apply" or name not in known:
                found.append(program)
                known.add(name)
    return found


def _bare(micro: MicroBatch) -> MicroBatch:
    """Returns the shapes of a micro-batch with the tokens alone, as `batch.bare` makes them."""
    absent = dict.fromkeys(("ref_logprobs", "old_values", "returns", "weights"))
    return micro.replace(**absent, aux={}, counts={})
