"""Programs compiled side by side: the updates that need them then compile none, and are the same."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest
from learner_cases import GRPO_CASE, PACKING, batches_of, fresh_state, leaves, make_batch, make_learner

from jaxrl_llm.algorithms.batch import MicroBatch
from jaxrl_llm.distributed import ahead
from jaxrl_llm.distributed.mesh import MeshConfig
from jaxrl_llm.learner.ahead import compile_updates
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.learner.packing import PackedRows
from jaxrl_llm.metrics.profiling import EVENT

compiled: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **more: compiled.append(str(more.get("fun_name"))) if event == EVENT else None
)


def minibatch(learner: Learner, tail: int, count: int) -> list[MicroBatch]:
    """`count` sequences of the step, each in a row of its own, in micro-batches of 4 rows and then of fewer."""
    packing, batch = replace(PACKING, rows=4, sequences_per_row=1, tail=tail), make_batch()
    prompts, responses = (list(column) for column in zip(*((r.prompt.tokens, r.tokens) for r in batch.rollouts)))
    placed = packing.place([len(p) + len(r) - 1 for p, r in zip(prompts, responses)][:count])
    rows = [PackedRows.build(packing, placement, prompts, responses) for placement in placed]
    return batches_of(learner, replace(batch, minibatches=[rows]))


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "cores", lambda: 8)


def own(names: Sequence[str]) -> list[str]:
    """The names of the learner's own programs among those compiled."""
    return sorted(name for name in names if any(part in name for part in ("accumulate", "applied", "whole", "only")))


@pytest.mark.parametrize(
    ("mesh", "sizes", "offload"),
    [(MeshConfig(), [4, 2, 1], False), (MeshConfig(), [4, 2, 1], True), (MeshConfig(fsdp=2), [4, 2], False)],
    ids=["one device", "moments on the host", "two devices"],
)
def test_an_update_compiles_no_shape_that_was_compiled_ahead(
    mesh: MeshConfig, sizes: Sequence[int], offload: bool
) -> None:
    optimizers = {"policy": Optimizer(learning_rate=1e-3, offload=offload)}
    made_for = make_learner(GRPO_CASE, mesh, max(mesh.fsdp, 1))
    plain, learner = replace(made_for, optimizers=optimizers), replace(made_for, optimizers=optimizers)
    micro = minibatch(learner, sizes[-1], 4 + sum(sizes))
    assert [len(b.tokens) for b in micro] == [4, *sizes]
    expected, want = plain.update(fresh_state(plain), micro)

    state = fresh_state(learner)
    compiled.clear()
    made = compile_updates(learner, [micro])
    assert made == len(sizes) + (not offload) and len(own(compiled)) == made
    compiled.clear()
    state, got = learner.update(state, micro)
    assert own(compiled) == [] and compile_updates(learner, [micro]) == 0
    assert {n: float(x) for n, x in got.items()} == {n: float(x) for n, x in want.items()}
    found = leaves(state)
    for path, x in leaves(expected).items():
        np.testing.assert_array_equal(found[path], x, err_msg=path)


def test_minibatches_of_one_and_of_several_micro_batches_have_programs_of_their_own() -> None:
    learner = make_learner(GRPO_CASE)
    several, alone = minibatch(learner, 0, 8), minibatch(learner, 0, 4)
    assert [len(several), len(alone)] == [2, 1]
    assert compile_updates(learner, [several, alone]) == 3  # with the update behind a sum
    compiled.clear()
    state = fresh_state(learner)
    for mini in (several, alone):
        state, _ = learner.update(state, mini)
    assert own(compiled) == []


def test_one_new_program_is_left_to_the_update() -> None:
    learner = make_learner(GRPO_CASE)
    alone = minibatch(learner, 0, 4)
    compiled.clear()
    assert compile_updates(learner, [alone]) == 0 and own(compiled) == []


def test_few_cores_leave_it_to_the_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "cores", lambda: 2)
    learner = make_learner(GRPO_CASE)
    assert compile_updates(learner, [minibatch(learner, 0, 8), minibatch(learner, 0, 4)]) == 0
