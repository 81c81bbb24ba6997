"""Whole runs in the bitwise mode: learner and sampler agree on every token of every step, to the bit."""

from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny_run

from jaxrl_llm.algorithms.sft import SFT
from jaxrl_llm.data.sorting import Sorting
from jaxrl_llm.environments.calculator import Calculator
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.train import build
from jaxrl_llm.train.phases import BuPO
from jaxrl_llm.train.stage import Stage

MESH = {"train.MeshConfig.data": 2, "train.MeshConfig.fsdp": 2}


# The 16 sequences of a step fill seven to nine rows: one micro-batch of 16 rows, so that gradient and update are one program; or one or two
# of 8 rows, so that both kinds of update are made.
@pytest.mark.slow
@pytest.mark.parametrize("devices, mesh, rows, count", [(1, {}, 16, 20), (4, MESH, 8, 10)])
def test_no_token_of_a_run_has_a_gap_and_every_ratio_is_one(tmp_path, monkeypatch, devices, mesh, rows, count):
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
    steps = {"STEPS": count, "MINIBATCHES": 1, "SAVE_EVERY": 100, "LEARNING_RATE": 1e-3, "ROWS": rows}
    steps["rl/train.Stage.evaluations"] = "()"
    done = tiny_run.launch(tmp_path / "run", devices=devices, **tiny_run.RL_ALONE, **steps, **mesh, BITWISE=True)
    assert done.returncode == 0, done.stderr
    found = [row for row in tiny_run.rows(tmp_path / "run") if "gap/max" in row]
    assert len(found) == count and {row["batch/microbatches"] for row in found} <= {1, 16 // rows}
    compared = sum(int(row["gap/compared"]) for row in found)
    assert compared > 100 * count and f"tokens compared {compared}, differing 0" in done.stdout
    for row in found:
        assert row["gap/max"] == row["gap/mean"] == row["gap/k3"] == row["kl/k3_to_old"] == 0, row
        assert row["ratio/mean"] == 1 and row["gap/differing"] == 0, row
    assert all(row["grad_norm/policy"] > 0 for row in found)
    assert len({row["logprob/mean"] for row in found}) == count


# Two mini-batches a step, so that the old log-probs of the second are no longer those of its own pass.
@pytest.mark.slow
def test_old_log_probs_of_the_sampler_teach_what_those_of_a_scoring_pass_do_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
    more = {"STEPS": 4, "MINIBATCHES": 2, "SAVE_EVERY": 4, "LEARNING_RATE": 1e-3, "rl/train.Stage.evaluations": "()"}
    found = {}
    for source in ("sampler", "learner"):
        old = {"rl/train.Stage.old_logprobs": repr(source)}
        done = tiny_run.launch(tmp_path / source, **tiny_run.RL_ALONE, **more, **old, BITWISE=True)
        assert done.returncode == 0, done.stderr
        state = ocp.PyTreeCheckpointer().restore(tmp_path / source / "checkpoints" / "4" / "state")
        rows = [row for row in tiny_run.rows(tmp_path / source) if row["step"]]
        found[source] = (
            rows,
            {jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(state)},
        )
    (rows, state), (others, other) = found.values()
    assert len(rows) == len(others) == 4 and all(row["grad_norm/policy"] > 0 for row in rows)
    assert rows == others and all(row["gap/compared"] > 0 for row in rows)
    assert state.keys() == other.keys() and len(state) > 10
    for name, x in state.items():
        assert np.array_equal(x, other[name]), name


def stage(**fields):
    return Stage(name="rl", algorithm=SFT(), data=Sorting(), optimizer=Optimizer(), steps=2, **fields)


def test_stages_without_the_samplers_log_probs_are_refused_by_name():
    kept, prefilled = SimpleNamespace(keep=True), SimpleNamespace(keep=False)
    build.check_bitwise(stage(), kept)
    build.check_bitwise(stage(environment=Calculator()), prefilled)
    with pytest.raises(ValueError, match="keep_turns = False"):
        build.check_bitwise(stage(environment=Calculator()), kept)
    with pytest.raises(ValueError, match="reads log-probs inside the model"):
        build.check_bitwise(stage(schedule=BuPO(layer=1)), kept)
