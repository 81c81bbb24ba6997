"""The best checkpoint is the best of the run that goes on: a crash leaves none of a future that is given up, and hides no later one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.state import TrainState
from jaxrl_llm.train.checkpoint import Checkpointing, Checkpoints, read_host
from jaxrl_llm.train.step import StageTrainer
from jaxrl_llm.train.trainer import Trainer

DUE = 50


def state(weights: float) -> TrainState:
    """Weights that are all one number."""
    params = {"policy": {"w": jnp.full(4, weights, jnp.float32)}}
    return TrainState(step=jnp.int32(0), skipped=jnp.int32(0), params=params, moments={"policy": {}})


def abstract() -> dict[str, Any]:
    return {"state": jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0.0))}


def stage() -> Mock:
    policy = SimpleNamespace(abstract=dict, sizes=dict)
    learner = Mock(spec=Learner, sizes=abstract()["state"], policy=policy)
    frozen = SimpleNamespace(params={}, saved={}, lasting=False)
    one = Mock(spec=StageTrainer, number=0, frozen=frozen, abstract=abstract(), learner=learner)
    one.host.return_value = {"feed": {}}
    return one


def started(folder: Path) -> Trainer:
    """A run in `folder` that keeps the best by eval/reward and saves every 50 steps, as a start of the command opens it."""
    trainer = object.__new__(Trainer)
    trainer.checkpoints = Checkpoints(folder, Checkpointing(best="eval/reward", keep=5))
    trainer.config = SimpleNamespace(checkpoints=trainer.checkpoints.config, resume_as_new=False)  # type: ignore[assignment]
    trainer.watching, trainer.sampler = SimpleNamespace(at=lambda *_, **__: None), SimpleNamespace(version=0)  # type: ignore[assignment]
    trainer.best, trainer.left, trainer.stopped, trainer.status = None, None, "", 0
    trainer.saves = lambda stage, step: step % DUE == 0  # type: ignore[method-assign]
    return trainer


def steps(trainer: Trainer, rewards: dict[int, float], weights: float) -> None:
    """Steps of a run with what they were evaluated at; then it is killed."""
    for step, reward in rewards.items():
        trainer.save(stage(), state(weights + step), step, {"eval/reward": reward})
        trainer.checkpoints.wait()
    assert not trainer.stopped
    trainer.checkpoints.close()


def best(folder: Path) -> tuple[int, float, float]:
    """The step of the best checkpoint, the value that it is said to have, and what its weights are."""
    step = max(int(place.name) for place in (folder / "best").iterdir())
    copy = folder / "copy"
    copy.mkdir()
    (folder / "best").rename(copy / "checkpoints")
    checkpoints = Checkpoints(copy, Checkpointing())
    held = checkpoints.restore(step, abstract())["state"].policy["w"]
    checkpoints.close()
    return step, read_host(copy / "checkpoints", step)["best"], float(np.asarray(held)[0])


FIRST = {40: 0.4, 50: 0.5, 60: 0.9}  # killed after step 60, which is the best and not among the checkpoints


@pytest.mark.parametrize(
    ("then", "wanted"),
    [
        ({60: 0.7}, (60, 0.7, 1060.0)),  # the same step again, with other weights
        ({60: 0.7, 70: 0.8}, (70, 0.8, 1070.0)),  # better than all of this run, worse than what was given up
        ({60: 0.3, 70: 0.45}, (50, 0.5, 50.0)),  # what was best before the crash is best again
        ({60: 0.3, 70: 0.45, 100: 0.2, 110: 0.6}, (110, 0.6, 1110.0)),
    ],
)
def test_after_a_crash_the_best_is_of_the_run_that_goes_on(tmp_path, then, wanted):
    steps(started(tmp_path), FIRST, 0.0)
    again = started(tmp_path)
    again._restored(stage(), 50)
    assert again.best == 0.5
    steps(again, then, 1000.0)
    assert best(tmp_path) == wanted


def test_no_more_is_kept_than_a_start_may_need(tmp_path):
    trainer = started(tmp_path)
    steps(trainer, {10: 0.1, 20: 0.2, 50: 0.3, 60: 0.4, 70: 0.5, 100: 0.1, 110: 0.6, 120: 0.7}, 0.0)
    assert sorted(int(place.name) for place in (tmp_path / "best").iterdir()) == [70, 110, 120]
    assert best(tmp_path) == (120, 0.7, 120.0)
