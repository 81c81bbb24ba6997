"""The memory that --dry_run predicts is that of the programs that a run compiles, for its state, its batches and its sampler."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny_run
from learner_cases import GRPO_CASE, PACKING, batches_of, fresh_state, make_batch, make_learner

from jaxrl_llm import launch
from jaxrl_llm.algorithms.dpo import DPO
from jaxrl_llm.algorithms.gdpo import GDPO
from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.algorithms.grpo_w_classmate import GRPOWithClassmate
from jaxrl_llm.data.sorting import Sorting
from jaxrl_llm.distributed.mesh import MeshConfig
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.learner import example, offload
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.models.lora import AdaptedPolicy, LoRA
from jaxrl_llm.models.value import ValueModel
from jaxrl_llm.rewards.wrap import Wrap
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.tools import memory
from jaxrl_llm.train.stage import Stage

FIELDS = {"name": "s", "data": Sorting(size=8), "optimizer": Optimizer(), "steps": 1, "packing": PACKING}


def stage(**changes):
    fields = {
        "algorithm": GRPO_CASE, "reward": Wrap(function=len), "prompts_per_step": 4, "group_size": 4, "max_prompt_tokens": 8,
        "settings": SamplingParams(max_tokens=16),
    }  # fmt: skip
    return Stage(**FIELDS, **fields | changes)


def test_the_state_counts_the_bytes_that_its_arrays_have():
    learner = make_learner(GRPO_CASE)
    arrays = sum(x.nbytes for x in jax.tree.leaves(fresh_state(learner)))
    assert memory.size(learner.abstract) == arrays
    split = make_learner(GRPO_CASE, mesh=MeshConfig(fsdp=4), devices=4)
    assert memory.size(split.abstract) < arrays / 3  # matrices are split by four, norms are whole


def test_shapes_alone_predict_the_programs_of_a_real_batch():
    learner = make_learner(GRPO_CASE)
    (real,) = batches_of(learner, make_batch())
    guessed = example.batch_of(stage(), learner)
    shapes = lambda batch: jax.tree.map(lambda x: (x.shape, x.dtype), batch)  # noqa: E731
    assert shapes(guessed) == shapes(real)
    found = memory.of_learner(learner, guessed, 1)["whole"]
    # Donated, the state comes back in its own place; the rest of the outputs are scalars. A gradient as large as the
    # parameters is alive before the update.
    params = sum(x.nbytes for x in jax.tree.leaves(fresh_state(learner).params))
    assert found.outputs < 1000 and found.temporary >= params
    assert found.arguments == pytest.approx(memory.size(learner.abstract) + batch_bytes(real), rel=0.01)


def batch_bytes(batch):
    return sum(np.asarray(x).nbytes for x in jax.tree.leaves(batch))


def test_moments_count_while_a_gradient_is_made_though_its_program_does_not_take_them():
    learner = make_learner(GRPO_CASE)
    batch = example.batch_of(stage(), learner)
    moments = sum(x.nbytes for x in jax.tree.leaves(fresh_state(learner).moments))
    account = memory.of_learner(learner, batch, 0)["score"]
    assert account.resident == pytest.approx(moments, abs=16)
    assert account.peak == account.resident + account.arguments + account.outputs + account.temporary


def test_a_batch_of_pairs_has_the_streams_that_its_algorithm_reads():
    learner = make_learner(DPO())
    batch = example.batch_of(stage(algorithm=DPO(), reward=None), learner)
    assert batch.ref_logprobs.shape == (PACKING.rows, PACKING.row_tokens)


@pytest.mark.parametrize(
    "algorithm",
    [
        GDPO(span="thought", span_parts=("classmate",), nonnegative=("classmate",)),
        GDPO(parts=("main", "style"), weights=(1.0, 0.5)),
        GRPOWithClassmate(span="thought", main_parts=("main",)),
        GRPO(kl_coef=0.1, kl_by_source=(("maths", 0.5),)),
    ],
)
def test_a_batch_has_the_parts_spans_and_sources_that_its_algorithm_names(algorithm):
    learner = make_learner(algorithm)
    batch = example.batch_of(stage(algorithm=algorithm), learner)
    assert batch.advantages.shape == (PACKING.rows, PACKING.row_tokens)
    assert (batch.ref_logprobs is None) == (algorithm.kl_coef == 0)


def test_sampling_counts_the_cache_and_a_copy_of_the_weights_in_another_dtype():
    learner = make_learner(GRPO_CASE)
    policy, sampler = learner.policy, EmbeddedSampler(slots=8, decode_chunk=4)
    shared, float32 = memory.of_sampling(policy, sampler, stage(), 24)
    copied, bfloat16 = memory.of_sampling(replace(policy, compute_dtype="bfloat16"), sampler, stage(), 24)
    numbers = sum(x.size for x in jax.tree.leaves(policy.abstract()))
    assert shared == 0 and 2 * numbers < copied < 2.3 * numbers  # the norms' scales stay float32
    cache = 2 * 2 * 8 * 24 * 2 * 8  # keys and values x layers x slots x tokens x key heads x width
    assert float32.arguments == pytest.approx(4 * (numbers + cache), rel=0.02)
    assert bfloat16.arguments == pytest.approx(copied + 2 * cache, rel=0.03)


def test_micro_batches_and_moments_on_the_host_have_the_programs_that_an_update_runs():
    learner = make_learner(GRPO_CASE)
    batch = example.batch_of(stage(), learner)
    several = learner.lowered(batch, 2)
    assert set(several) == {"accumulate", "apply"}
    # The sum so far, the parameters and the batch go in; the sum is given up and comes out.
    numbers = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # noqa: E731
    gradient = numbers(several["accumulate"].out_info[0])
    assert gradient == numbers(learner.abstract.params)
    away = replace(learner, optimizers={"policy": replace(learner.optimizers["policy"], offload=True)})
    assert set(away.lowered(batch, 1)) == {"only"}


def test_the_plan_counts_the_state_that_lies_on_a_device():
    policy = make_learner(GRPO_CASE).policy
    whole = sum(math.prod(x.shape) * 4 for x in jax.tree.leaves(policy.abstract()))
    usual = {"weights": whole, "gradients": whole, "moments": 2 * whole, "reference": whole}
    assert memory.state(stage(), policy) == pytest.approx(usual, rel=1e-3)  # and a count of updates
    pairs = replace(stage(algorithm=DPO(), group_size=2), optimizer=Optimizer(moments_dtype="bfloat16"))
    half = usual | {"moments": 1.5 * whole}
    assert memory.state(pairs, policy) == pytest.approx(half, rel=1e-3)
    away = replace(pairs, optimizer=Optimizer(offload=True), offload_reference=True)
    assert memory.state(away, policy) == {"weights": whole, "gradients": whole}


def test_moments_on_the_host_are_not_counted_where_a_target_does_not_tell_its_memories_apart(monkeypatch):
    monkeypatch.setattr(offload, "on_host", lambda sharding: sharding)
    policy = make_learner(GRPO_CASE).policy
    found = memory.state(replace(stage(), optimizer=Optimizer(offload=True)), policy)
    assert found.keys() == {"weights", "gradients", "reference"}


def test_while_one_model_is_updated_the_gradients_of_those_after_it_wait(monkeypatch):
    monkeypatch.setattr(offload, "PARTS", 1)  # one group a model
    learner = make_learner(GRPO_CASE)
    critic, optimizer = ValueModel.like(learner.policy), Optimizer(offload=True)
    both = replace(
        learner, models={**learner.models, "critic": critic}, optimizers={"policy": optimizer, "critic": optimizer}
    )
    number = lambda tree: sum(math.prod(x.shape) for x in jax.tree.leaves(tree))  # noqa: E731
    policy, head = number(learner.policy.abstract()), 32
    most = 4 * policy + 8 * policy + 4 * (policy + head)  # gradient and moments of the one, gradient of the other
    assert most <= memory.visiting(both) < most + 200, "and counts of updates"
    here = replace(both, optimizers={"policy": optimizer, "critic": Optimizer()})
    assert memory.visiting(here) == memory.visiting(both), "a gradient stays where its optimizer is on the device"
    assert memory.visiting(learner) == 0


def test_the_plan_counts_weights_in_bfloat16_and_what_lies_beside_them():
    policy = replace(make_learner(GRPO_CASE).policy, compute_dtype="bfloat16")
    leaves = jax.tree_util.tree_leaves_with_path(policy.abstract())
    scales = sum(math.prod(x.shape) for path, x in leaves if path[-1].key == "scale")
    all_of_them = sum(math.prod(x.shape) for _, x in leaves)
    halved = 2 * all_of_them + 2 * scales  # norms' scales stay float32
    beside = {"stochastic": 4, "compensated": 2 * all_of_them}  # the number of updates, or a rest of 16 bits for each
    for kind, more in beside.items():
        several = replace(stage(), optimizer=Optimizer(weights=kind))
        found = memory.state(several, policy)
        counts = found["moments"] - 8 * all_of_them - more
        assert found["weights"] == halved and 0 <= counts < 100
        assert example.summed(several) and found["gradients"] == 4 * all_of_them
        one = replace(several, prompts_per_step=2)
        assert not example.summed(one) and memory.state(one, policy)["gradients"] == halved
        assert memory.copy(policy, EmbeddedSampler(slots=8), one) == 0, "the learner's weights are served as they are"
        assert memory.copy(policy, EmbeddedSampler(slots=8, share_weights=False), one) == halved
    assert memory.copy(policy, EmbeddedSampler(slots=8), stage()) == halved


@pytest.mark.parametrize("kind", ["stochastic", "compensated"])
def test_the_account_of_an_update_of_weights_in_bfloat16_is_that_of_its_arrays(kind):
    plain = make_learner(GRPO_CASE)
    policy = replace(plain.policy, compute_dtype="bfloat16")
    optimizer = replace(plain.optimizers["policy"], weights=kind)
    learner = replace(plain, models={"policy": policy}, optimizers={"policy": optimizer})
    batch = example.batch_of(stage(), learner)
    arrays = sum(x.nbytes for x in jax.tree.leaves(fresh_state(learner)))
    assert memory.size(learner.abstract) == arrays
    found = memory.of_learner(learner, batch, 1)["whole"]
    assert found.arguments == pytest.approx(arrays + batch_bytes(batches_of(learner, make_batch())[0]), rel=0.01)
    assert found.outputs < 1000, "the state comes back in its own place"
    total = learner.lowered(batch, 2)["accumulate"].out_info[0]
    assert {x.dtype for x in jax.tree.leaves(total)} == {np.dtype("float32")}


def test_a_backend_without_an_account_of_its_programs_leaves_the_plan_and_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda _: None)
    with pytest.raises(memory.NoAccount, match="'cpu' gives no account"):
        memory.account(jax.jit(abs).lower(1.0))
    flags = [f"--gin={binding}" for binding in tiny_run.bindings(tmp_path / "run")]
    assert launch.main([f"--gin_file={tiny_run.GIN_FILE}", *flags, "--dry_run"]) == 0
    *before, last = capsys.readouterr().out.splitlines()
    assert before[0].startswith("run folder") and any(line.startswith("  memory ") for line in before)
    assert last.startswith("peak         unknown: the backend 'cpu' gives no account") and "`memory` above" in last


def test_adapters_beside_their_base_are_counted_and_a_base_in_the_compute_dtype_is_not_copied():
    plain = replace(make_learner(GRPO_CASE).policy, compute_dtype="bfloat16")
    sampler, count = EmbeddedSampler(slots=8, adapters=True), lambda tree: sum(x.size for x in jax.tree.leaves(tree))
    whole = memory.size(memory.cast(plain, "bfloat16"))
    for dtype, base in (("bfloat16", 0), ("float32", whole)):
        lora = LoRA(rank=3, base_dtype=dtype)
        policy = AdaptedPolicy(plain.architecture, plain.partitioner, plain.compute_dtype, plain.remat, lora)
        assert memory.copy(policy, sampler, stage()) == base + 2 * count(policy.abstract())
        shapes = memory.served_shapes(policy, sampler)
        assert count(shapes) == count(plain.abstract()) + count(policy.abstract())
        assert count(memory.served_shapes(policy, EmbeddedSampler())) == count(plain.abstract())
