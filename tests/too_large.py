"""A stage whose micro-batch does not fit its device."""

from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp

from jaxrl_llm.distributed.mesh import Partitioner
from jaxrl_llm.distributed.preemption import Preemption
from jaxrl_llm.learner.batch import Batch
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.packing import Packing
from jaxrl_llm.protocols import GroupLoader
from jaxrl_llm.train.evaluation import HeldOut
from jaxrl_llm.train.frozen_models import FrozenModels
from jaxrl_llm.train.progress import Progress
from jaxrl_llm.train.stage import Stage
from jaxrl_llm.train.step import StageTrainer


def too_much():
    """XLA's own error, of an allocation that no machine has."""
    return jax.block_until_ready(jnp.zeros(1 << 46, jnp.uint8))


def full() -> Learner:
    """A learner whose micro-batch does not fit."""
    learner = Mock(spec=Learner, algorithm=SimpleNamespace(constant=1.0), partitioner=Mock(spec=Partitioner))
    learner.update.side_effect = lambda *_: (too_much(), {})
    return learner


def stage():
    """A stage in progress whose learner is `full`, and a batch."""
    config = Mock(spec=Stage, packing=Packing(rows=16, row_tokens=2048), epochs=1, max_staleness=0, skip_silent=False)
    batch = Mock(spec=Batch)
    batch.micro_batches.return_value = [[]]
    run = StageTrainer(
        config=config, learner=full(), loader=Mock(spec=GroupLoader), frozen=Mock(spec=FrozenModels), sources=[],
        held_out=Mock(spec=HeldOut), preemption=Mock(spec=Preemption), progress=Mock(spec=Progress, watching=Mock()),
    )  # fmt: skip
    run.learners = {run.phase.name: run.learner}
    run.scores_policy = lambda step: True
    run.stats_of = lambda learner, *_, **__: too_much()
    return run, batch
