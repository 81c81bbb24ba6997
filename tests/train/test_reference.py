"""The reference: half the bytes where that changes no log-prob, written once for all checkpoints of a stage, and known again."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from learner_cases import SFT_CASE, host_params, make_batch, make_learner

from jaxrl_llm.learner.batch import bare, to_device
from jaxrl_llm.models.lora import AdaptedPolicy
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.train.checkpoint import Checkpointing, Checkpoints
from jaxrl_llm.train.frozen_models import FrozenModels, reference_shapes

pytestmark = pytest.mark.slow


def policy_of(compute_dtype: str) -> tuple[Any, Policy, Any]:
    """A learner in a compute dtype, its policy and float32 parameters that bfloat16 does not hold."""
    learner = make_learner(SFT_CASE)
    policy = replace(learner.policy, compute_dtype=compute_dtype)
    learner = replace(learner, models={"policy": policy})
    params = jax.tree.map(lambda x, like: jax.device_put(np.array(x), like.sharding), host_params(), policy.abstract())
    return learner, policy, params


@pytest.mark.parametrize("offloads", [False, True])
def test_a_reference_of_a_bfloat16_run_takes_half_the_bytes_and_says_the_same_bit_for_bit(offloads: bool) -> None:
    learner, policy, params = policy_of("bfloat16")
    frozen = FrozenModels(policy=policy, refers=True, offloads=offloads, dtype="bfloat16")
    before = sum(x.nbytes for x in jax.live_arrays())
    frozen.begin(params)
    held = sum(x.nbytes for x in jax.live_arrays()) - before
    scales = sum(x.size for path, x in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "scale")
    whole = sum(x.size for x in jax.tree.leaves(params))
    assert held == 2 * (whole - scales) + 4 * scales  # bytes
    (rows,) = make_batch().rows
    places = to_device(bare(rows), learner.partitioner)
    assert not np.array_equal(jnp.bfloat16(params["embedding"]).astype(jnp.float32), params["embedding"])
    found, want = (np.asarray(learner.score_frozen(x, places)) for x in (frozen.reference, params))
    assert want.any() and np.array_equal(found, want)


def test_a_float32_run_keeps_a_float32_reference_of_its_own() -> None:
    _, policy, params = policy_of("float32")
    frozen = FrozenModels(policy=policy, refers=True)
    frozen.begin(params)
    pairs = list(zip(jax.tree.leaves(frozen.reference), jax.tree.leaves(params), strict=True))
    assert all(x is not y and x.dtype == jnp.float32 and np.array_equal(x, y) for x, y in pairs)


def test_adapters_are_a_float32_reference() -> None:
    _, policy, _ = policy_of("bfloat16")
    adapted = AdaptedPolicy(policy.architecture, policy.partitioner, policy.compute_dtype)
    assert {x.dtype for x in jax.tree.leaves(reference_shapes(adapted, "bfloat16"))} == {jnp.dtype("float32")}


def test_a_run_writes_its_reference_once_and_resumes_with_it_bit_for_bit(tmp_path: Path) -> None:
    run_dir, sizes = tmp_path / "run", {"STEPS": 2, "SFT_STEPS": 1, "SAVE_EVERY": 1, "EVALUATE_EVERY": 10}
    done = tiny_run.launch(run_dir, **sizes)
    assert done.returncode == 0, done.stderr
    rows = tiny_run.rows(run_dir)
    assert rows[-1]["loss/kl"] > 0
    assert [f.name for f in (run_dir / "reference").iterdir()] == ["1"]  # the stage begins after step 1
    assert not list((run_dir / "checkpoints").glob("*/reference"))
    shutil.rmtree(run_dir / "checkpoints" / "3")
    done = tiny_run.launch(run_dir, **sizes)
    assert "resuming from step 2" in done.stdout and tiny_run.rows(run_dir) == rows, done.stderr
    shutil.rmtree(run_dir / "checkpoints" / "3")
    shutil.rmtree(run_dir / "reference")
    assert "reference/1, which the checkpoint needs, is not there" in tiny_run.refused(run_dir, **sizes)


def test_a_reference_is_read_in_the_dtype_that_it_has_and_known_by_its_sums(tmp_path: Path) -> None:
    _, policy, params = policy_of("float32")
    shapes = lambda dtype: reference_shapes(policy, dtype)  # noqa: E731
    half = FrozenModels(policy=policy, refers=True, dtype="bfloat16")
    half.begin(params)
    first = Checkpoints(tmp_path, Checkpointing())
    said = first.keep(3, half.reference)["reference"]
    assert said["dtype"] == "bfloat16" and first.keep(3, params)["reference"] == said, "it is written once"
    first.close()
    later = Checkpoints(tmp_path, Checkpointing())
    found = later.kept(3, said, shapes)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(half.reference), strict=True)
    assert all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)
    later.close()
    anew = Checkpoints(tmp_path, Checkpointing())  # a stage that begins anew replaces what an earlier start left
    other = anew.keep(3, params)["reference"]
    assert other != said and anew.keep(3, params)["reference"] == other
    with pytest.raises(ValueError, match="is another one than the checkpoint's"):
        anew.kept(3, said | {"dtype": "float32"}, shapes)
    anew.close()
