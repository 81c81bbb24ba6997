"""Want of device memory ends a run with the bindings that take less."""

import asyncio
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from too_large import stage, too_much

from jaxrl_llm import command_line, launch
from jaxrl_llm.algorithms.batch import Advantages, Sequences
from jaxrl_llm.learner.state import TrainState


@pytest.mark.parametrize("doing", ["updating", "scoring"])
def test_the_error_of_a_step_names_what_to_lower_and_what_it_is_now(doing):
    run, batch = stage()
    with pytest.raises(MemoryError) as raised:
        if doing == "updating":
            asyncio.run(run.update(Mock(spec=TrainState), batch, Mock(spec=Sequences), Mock(spec=Advantages), 1))
        else:
            asyncio.run(run.token_stats(Mock(spec=TrainState), batch, 1))
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


def test_another_error_of_a_step_stays_what_it_is():
    run, batch = stage()
    run.learner.update.side_effect = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run.update(Mock(spec=TrainState), batch, Mock(spec=Sequences), Mock(spec=Advantages), 1))


def test_a_command_ends_with_one_line_that_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(command_line, "build", lambda *_: (SimpleNamespace(run=lambda *_: too_much()), ""))
    assert launch.main(["--gin_file=any.gin"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: a device ran out of memory") and "embedded.EmbeddedSampler.slots" in printed
    assert "Traceback" not in printed
