"""Want of device memory ends a run with the bindings that take less."""

import re
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm import launch
from jaxrl_llm.batch import Credit
from jaxrl_llm.global_batch import GlobalBatch
from jaxrl_llm.packing import Packing
from jaxrl_llm.stage_run import StageRun
from jaxrl_llm.train_state import TrainState


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


@pytest.mark.parametrize("doing", ["updating", "scoring"])
def test_the_error_of_a_step_names_what_to_lower_and_what_it_is_now(doing):
    run, batch = stage()
    with pytest.raises(MemoryError) as raised:
        if doing == "updating":
            StageRun.update(run, Mock(spec=TrainState), batch, {}, Mock(spec=Credit))
        else:
            StageRun.score(run, Mock(spec=TrainState), batch)
    text = str(raised.value)
    assert re.search(rf"ran out of memory while {doing} \[RESOURCE_EXHAUSTED.*\d+ bytes", text)
    names = (
        "ROWS",
        "ROW_TOKENS",
        "now 16 rows of 2048",
        "remat = 'full'",
        "MeshConfig.fsdp",
        "offload = True",
        "last checkpoint",
    )
    assert all(name in text for name in names)


def test_another_error_of_a_step_stays_what_it_is(monkeypatch):
    run, batch = stage()
    monkeypatch.setattr(Full, "update", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        StageRun.update(run, Mock(spec=TrainState), batch, {}, Mock(spec=Credit))


def test_a_command_ends_with_one_line_that_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(launch, "build", lambda *_: (SimpleNamespace(run=lambda *_: too_much()), ""))
    assert launch.main(["--gin_file=any.gin"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: a device ran out of memory") and "embedded.EmbeddedSampler.slots" in printed
    assert "Traceback" not in printed
