"""A stage whose micro-batch does not fit its device."""

from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp

from jaxrl_llm.global_batch import GlobalBatch
from jaxrl_llm.packing import Packing


def too_much():
    """XLA's own error, of an allocation that no machine has."""
    return jax.block_until_ready(jnp.zeros(1 << 46, jnp.uint8))


class Full:
    """A learner whose micro-batch does not fit."""

    algorithm = SimpleNamespace(constant=1.0)

    def update(self, state, batch, bases):
        return too_much(), {}

    score = update


def stage():
    config = SimpleNamespace(packing=Packing(rows=16, row_tokens=2048), epochs=1)
    batch = Mock(spec=GlobalBatch)
    batch.batches.return_value = ["a micro-batch"]
    run = SimpleNamespace(
        config=config, phases=SimpleNamespace(present=Full(), due=False), partitioner=None, bases={}, teacher=None, frozen={},
        view=lambda *_: None, _scores=lambda _: True, _streams=lambda learner, *_, **__: learner.score(None, None, None),
    )  # fmt: skip
    return run, batch
