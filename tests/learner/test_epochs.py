"""Each epoch of a step after the first deals the groups to minibatches anew: no group learns with the same others every time."""

import asyncio
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import too_large
from builders import make_group, make_prompt, make_rollout

from jaxrl_llm.algorithms.batch import Advantages, Sequences
from jaxrl_llm.learner.batch import Batch
from jaxrl_llm.learner.packing import Packing
from jaxrl_llm.learner.state import TrainState

GROUPS, MEMBERS, MINIBATCHES, EPOCHS = 12, 2, 4, 3
PACKING = Packing(row_tokens=8, rows=3, sequences_per_row=2)


def batch() -> Batch:
    groups = []
    for number in range(GROUPS):
        prompt = make_prompt(f"p{number}", [1, 2])
        groups.append(make_group([make_rollout(prompt, [number, i]) for i in range(MEMBERS)], {"main": [0.0, 1.0]}))
    return Batch.build(
        groups, PACKING, minibatches=MINIBATCHES, sources=[""], response_tokens=4, capacity=GROUPS * MEMBERS
    )


def held(dealt: Batch) -> list[set[int]]:
    """The groups of each minibatch, of which each has all its members there."""
    found = []
    for minibatch in dealt.minibatches:
        members = sorted(i for rows in minibatch for i in rows.members.tolist() if i >= 0)
        assert all(i ^ 1 in members for i in members), "a group is divided"
        found.append({i // MEMBERS for i in members})
    return found


@pytest.fixture
def dealt(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(seed, step) -> the groups of each minibatch, of each epoch of a step that the stage trainer makes."""

    def run(seed: int, step: int) -> list[list[set[int]]]:
        stage, _ = too_large.stage()
        stage.config.epochs, stage.config.packing = EPOCHS, PACKING
        stage.learner.seed = seed
        seen: list[list[set[int]]] = []

        def micro_batches(self: Batch, *_: Any) -> list[Any]:
            seen.append(held(self))
            return [[]]

        monkeypatch.setattr(Batch, "micro_batches", micro_batches)
        stage.learner.update.side_effect = lambda state, *_: (state, {"loss": np.float32(0)})
        asyncio.run(stage.update(Mock(spec=TrainState), batch(), Mock(spec=Sequences), Mock(spec=Advantages), step))
        return seen

    return run


def test_every_epoch_has_every_group_once_in_other_company(dealt):
    epochs = dealt(seed=0, step=1)
    assert len(epochs) == EPOCHS
    for epoch in epochs:
        assert sorted(group for minibatch in epoch for group in minibatch) == list(range(GROUPS))
        assert [len(minibatch) for minibatch in epoch] == [GROUPS // MINIBATCHES] * MINIBATCHES
    assert epochs[0] == [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9, 10, 11}], "the first as they were sampled"
    first, second, third = ({frozenset(minibatch) for minibatch in epoch} for epoch in epochs)
    assert first != second != third != first


def test_a_step_that_is_done_again_deals_alike_and_another_step_or_seed_does_not(dealt):
    assert dealt(seed=0, step=1) == dealt(seed=0, step=1)
    later = dealt(seed=0, step=1)[1:]
    assert dealt(seed=0, step=2)[1:] != later and dealt(seed=1, step=1)[1:] != later
