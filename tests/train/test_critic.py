"""PPO's critic learns its returns, alone in the warm-up; it lies on the mesh as the policy does, and resumes bit for bit."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_run
from learner_cases import GROUPS, PACKING, fresh_state, leaves, make_batch, make_learner, make_stats, split

from jaxrl_llm.algorithms.batch import Advantages
from jaxrl_llm.algorithms.ppo import PPO
from jaxrl_llm.data.sorting import Sorting
from jaxrl_llm.distributed.mesh import MeshConfig
from jaxrl_llm.learner.batch import bare, to_device
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.learner.state import TrainState
from jaxrl_llm.models.qwen3 import Qwen3
from jaxrl_llm.models.sources import PolicySource, ValueSource
from jaxrl_llm.models.value import ValueModel
from jaxrl_llm.rewards.exact import Exact
from jaxrl_llm.train.stage import Stage

pytestmark = pytest.mark.slow

CASE = PPO(gamma=0.9, lam=0.7, value_clip=0.05, value_coef=0.5)


def make(algorithm: PPO = CASE, **changes: Any) -> Learner:
    """PPO's learner; the policy's rate is a hundredth of the critic's."""
    mesh = {n: changes.pop(n) for n in ("mesh", "devices") if n in changes}
    learner = make_learner(algorithm, **mesh)
    models = {"policy": learner.policy, "critic": ValueModel.like(learner.policy, bias=True)}
    rates = {"policy": 1e-4, "critic": 1e-2}
    optimizers = {n: Optimizer(learning_rate=x, max_grad_norm=0.0) for n, x in rates.items()}
    return replace(learner, models=models, optimizers=optimizers, **changes)


def begin(learner: Learner) -> TrainState:
    """The critic starts on a copy of the policy's layers, with a random head."""
    policy = fresh_state(make_learner(CASE, devices=learner.partitioner.mesh.size, mesh=_config(learner))).policy
    critic = ValueSource(bias=True).params(learner.models["critic"], policy, jax.random.key(1))
    kernel = np.random.default_rng(5).normal(0, 0.2, 32).astype(np.float32)
    head = jax.device_put({"kernel": kernel, "bias": np.float32(0.3)}, learner.partitioner.replicated)
    return learner.init({"policy": policy, "critic": {**critic, "value": head}})


def _config(learner: Learner) -> MeshConfig:
    return MeshConfig(**learner.partitioner.axis_sizes)


def step_of(learner: Learner, state: TrainState, members: Any = None) -> tuple[list[Any], Advantages]:
    """The micro-batches of a step with the critic's values before the update, and its advantages."""
    batch = make_batch() if members is None else split(members)
    scored = [learner.score(state.params, to_device(bare(r), learner.partitioner)) for r in batch.rows]
    values = batch.unpack([np.asarray(s["critic"]["value"]) for s in scored])
    stats = {"old_logprobs": batch.tokenwise(list(make_stats()["old_logprobs"])), "values": values}
    sequences = batch.sequences(stats, {}, GROUPS)
    assigned = jax.device_get(learner.advantages(sequences))
    (mini,) = batch.micro_batches(sequences, assigned, 1.0, learner.partitioner)
    return mini, assigned


def test_values_are_the_final_hidden_states_times_the_head() -> None:
    learner = make()
    state = begin(learner)
    (rows,) = make_batch().rows
    batch = to_device(bare(rows), learner.partitioner)
    got = np.asarray(learner.score(state.params, batch)["critic"]["value"])
    hidden = jax.jit(learner.policy.hidden)(state.policy, batch.tokens, batch.positions, batch.segments)
    head = leaves(state.params["critic"]["value"])
    want = np.asarray(hidden, np.float64) @ head["['kernel']"].astype(np.float64) + 0.3
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_critics_loss_and_its_heads_gradient_are_those_of_the_clipped_square() -> None:
    learner = make()
    state = begin(learner)
    (batch,), assigned = step_of(learner, state)
    # Values that moved since they were scored: some by more than the limit.
    shift = np.random.default_rng(6).normal(0, 0.05, batch.old_values.shape).astype(np.float32)
    batch = batch.replace(old_values=batch.old_values + shift)
    hidden = np.asarray(
        jax.jit(learner.policy.hidden)(state.policy, batch.tokens, batch.positions, batch.segments), np.float64
    )
    value = np.asarray(learner.score(state.params, batch)["critic"]["value"], np.float64)
    old, returns, mask = (np.asarray(x, np.float64) for x in (batch.old_values, batch.returns, batch.mask))
    near = np.clip(value, old - 0.05, old + 0.05)
    ruled = (near - returns) ** 2 > (value - returns) ** 2
    assert 0.1 < ruled[mask > 0].mean() < 0.9
    loss = 0.5 * 0.5 * np.maximum((value - returns) ** 2, (near - returns) ** 2)
    slope = 0.5 * np.where(ruled, 0.0, value - returns) * mask / assigned.loss_mask.sum()
    state, metrics = learner.update(state, [batch])
    np.testing.assert_allclose(metrics["loss/value"], (loss * mask).sum() / assigned.loss_mask.sum(), rtol=1e-5)
    first = leaves(state.moments["critic"])
    got = next(
        x for path, x in first.items() if "mu" in path and "kernel" in path and "value']['k" in path and x.ndim == 1
    )
    np.testing.assert_allclose(got / 0.1, np.einsum("bt,btd->d", slope, hidden), rtol=1e-4, atol=1e-7)


def test_in_the_warm_up_only_the_critic_learns() -> None:
    learner = make(warmup=2)
    state = begin(learner)
    batches, _ = step_of(learner, state)
    start, errors = leaves({"p": state.policy, "m": state.moments["policy"]}), []
    for _ in range(2):
        state, metrics = learner.update(state, batches)
        errors.append(float(metrics["value/squared_error"]))
    held = leaves({"p": state.policy, "m": state.moments["policy"]})
    for path, x in start.items():
        np.testing.assert_array_equal(held[path], x, err_msg=path)
    assert errors[1] < errors[0]
    state, _ = learner.update(state, batches)
    moved = leaves({"p": state.policy, "m": state.moments["policy"]})
    assert np.abs(moved["['p']['embedding']"] - start["['p']['embedding']"]).max() > 1e-5
    counts = {path: int(x) for path, x in leaves(state.moments).items() if path.endswith(".count")}
    assert {n for path, n in counts.items() if "policy" in path} == {1}
    assert {n for path, n in counts.items() if "critic" in path} == {3}


def test_a_mesh_and_micro_batches_change_nothing() -> None:
    results = []
    meshes: list[dict[str, Any]] = [{}, {"mesh": MeshConfig(fsdp=2, tensor=2), "devices": 4}]
    for changes, members in zip(meshes, (None, np.split(np.arange(16), 2)), strict=True):
        learner = make(**changes)
        state = begin(learner)
        batches, _ = step_of(learner, state, members)
        state, metrics = learner.update(state, batches)
        assert jax.tree.map(lambda x: x.sharding, state) == learner.shardings
        results.append((metrics, leaves(state.moments["critic"])))
    (alone, first), (spread, other) = results
    for name, x in alone.items():
        np.testing.assert_allclose(spread[name], x, rtol=2e-5, atol=1e-6, err_msg=name)
    for path, x in first.items():
        np.testing.assert_allclose(other[path], x, rtol=1e-3, atol=2e-5 * max(np.abs(x).max(), 1e-3), err_msg=path)


def test_a_critic_may_have_a_backbone_of_its_own() -> None:
    policy = make_learner(CASE).policy
    small = Qwen3(vocabulary_size=32, width=16, layers=1, heads=2, kv_heads=1, head_width=8, mlp_width=16)
    source = ValueSource(backbone=PolicySource(architecture=small))
    model = source.model(policy)
    params = source.params(model, {}, jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.sharding), params) == jax.tree.map(
        lambda x: (x.shape, x.sharding), model.abstract()
    )
    assert "head" not in params and params["value"]["kernel"].shape == (16,)


def test_an_algorithm_without_the_critic_it_needs_is_refused() -> None:
    common: dict[str, Any] = {"name": "rl", "algorithm": CASE, "data": Sorting(), "optimizer": Optimizer(), "steps": 4}
    common |= {"reward": Exact(), "packing": PACKING, "max_prompt_tokens": 4}
    with pytest.raises(
        ValueError, match=r"PPO learns with a critic and Stage.critic of stage 'rl' is not set: .*ppo.gin"
    ):
        Stage(**common)
    with pytest.raises(ValueError, match=r"Stage.critic_optimizer"):
        Stage(**common, critic=ValueSource())
    with pytest.raises(ValueError, match=r"CRITIC_WARMUP_STEPS"):
        Stage(**common, critic=ValueSource(), critic_optimizer=Optimizer(), critic_warmup_steps=4)


@pytest.mark.xdist_group("whole_run")
def test_a_run_with_a_critic_resumes_bit_for_bit(tmp_path: Path) -> None:
    """The last step is taken again from the checkpoint before it, in the critic's warm-up."""
    gin_file = tmp_path / "ppo.gin"
    gin_file.write_text(f"include '{tiny_run.GIN_FILE}'\ninclude 'gin/algorithms/ppo.gin'\n")
    sizes = {"STEPS": 3, "SAVE_EVERY": 1, "EVALUATE_EVERY": 10, "CRITIC_WARMUP_STEPS": 2, **tiny_run.RL_ALONE}
    whole, again = tmp_path / "whole", tmp_path / "again"
    done = tiny_run.launch(whole, str(gin_file), **sizes)
    assert done.returncode == 0, done.stderr
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "3")
    done = tiny_run.launch(again, str(gin_file), **sizes)
    assert done.returncode == 0 and "resuming from step 2" in done.stdout, done.stderr
    rows = tiny_run.rows(whole)
    assert tiny_run.rows(again) == rows
    assert rows[-1]["grad_norm/critic"] > 0 and rows[-1]["value/squared_error"] < rows[1]["value/squared_error"]
