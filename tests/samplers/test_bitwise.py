"""The bitwise mode: the log-prob that the embedded sampler records is the learner's, as bits."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bitwise_cases import (
    MAX_LENGTH,
    QWEN3,
    Case,
    compiled_as_users_compile,  # noqa: F401  # a fixture of each test here
    devices,
    learners,
    policy_of,
    recorded,
)
from sampler_cases import Letters

from jaxrl_llm.kernels.attention import ordered as ordered_attention
from jaxrl_llm.kernels.ordered import arithmetic
from jaxrl_llm.models.architecture import Experts, GatedDelta
from jaxrl_llm.models.lora import LoRA
from jaxrl_llm.models.qwen2 import Qwen2
from jaxrl_llm.models.qwen3_5 import Qwen3_5
from jaxrl_llm.models.qwen3_moe import Qwen3MoE
from jaxrl_llm.models.sources import PolicySource
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.samplers.vllm.sampler import VllmSampler

pytestmark = pytest.mark.slow  # its programs take long to compile

QWEN2 = Qwen2(
    vocabulary_size=131, width=40, layers=2, heads=3, kv_heads=1, head_width=12, mlp_width=56, tied=True, window=7,
    sliding=(True, False),
)  # fmt: skip


@pytest.fixture(scope="module")
def small():
    case = Case(policy_of(QWEN3), seed=0, slots=5, chunk=3)
    return case, case.drawn()


def test_log_probs_are_the_learners_in_every_packing(small):
    case, drawn = small
    assert len({len(s) for s, _, _ in drawn}) > 10 and len(recorded(drawn)) > 500
    assert np.array_equal(learners(case, drawn), recorded(drawn))
    assert np.array_equal(learners(case, drawn, row=131, most=9, seed=1), recorded(drawn))


def test_draws_have_the_same_bits_with_other_slots_and_refills(small):
    case, drawn = small
    for (sequence, _, logprobs), (other, _, others) in zip(drawn, replace(case, slots=64, chunk=8).drawn()):
        assert sequence.tolist() == other.tolist() and logprobs.tolist() == others.tolist()


def test_log_probs_of_bfloat16_are_the_learners_with_windows_biases_and_a_temperature():
    case = Case(policy_of(QWEN2, "bfloat16", remat="full", unroll=2), seed=3, slots=16, chunk=16, temperature=0.7)
    drawn = case.drawn()
    assert len(recorded(drawn)) > 500
    found, _ = learners(case, drawn, gradient=True)  # in an update's own forward pass
    assert np.array_equal(found, recorded(drawn))
    assert np.array_equal(learners(case, drawn, policy=replace(case.policy, remat="none", unroll=1), row=100), found)


def test_gradients_are_those_of_the_default_mode_and_the_same_at_every_call(small):
    case, drawn = small
    found, (gradients, others) = learners(case, drawn, gradient=True)
    assert np.array_equal(found, recorded(drawn))
    default, (expected, _) = learners(case, drawn, policy=replace(case.policy, bitwise=False), gradient=True)
    np.testing.assert_allclose(found, default, atol=1e-5)
    for one, other, want in zip(*map(jax.tree.leaves, (gradients, others, expected))):
        assert np.array_equal(one, other)
        np.testing.assert_allclose(one, want, atol=1e-5 * float(np.abs(want).max()))


def in_halves(product):
    """A tile's product whose sum over K is taken in two halves."""

    def mutant(tile, w, *, turned=False):
        middle, axis = tile.shape[1] // 2, 1 if turned else 0
        first, second = jnp.split(w, [middle], axis=axis)
        return product(tile[:, :middle], first, turned=turned) + product(tile[:, middle:], second, turned=turned)

    return mutant


MUTATIONS = {
    "the sums over K": (arithmetic, "tile_product", in_halves(arithmetic.tile_product)),
    "the blocks of keys": (ordered_attention, "KEYS", 8),
    "the sums of rows": (
        arithmetic,
        "totals",
        lambda x: arithmetic.matmul(x[:, ::-1], jnp.ones((x.shape[1], 8)))[:, 0],
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_another_order_on_one_side_is_seen(small, monkeypatch, mutation):
    case, drawn = small
    monkeypatch.setattr(*MUTATIONS[mutation])
    found = learners(case, drawn)
    np.testing.assert_allclose(found, recorded(drawn), atol=1e-5)
    assert not np.array_equal(found, recorded(drawn))


# -- meshes ------------------------------------------------------------------------------------------------------------


def on(case, **sizes):
    return replace(case, policy=replace(case.policy, partitioner=devices(**sizes)))


def test_samplers_of_a_mesh_draw_and_record_what_one_devices_does(small):
    case, drawn = small
    for (sequence, _, logprobs), (other, _, others) in zip(drawn, on(case, data=2, fsdp=2).drawn(), strict=True):
        assert sequence.tolist() == other.tolist() and logprobs.tolist() == others.tolist()


@pytest.mark.parametrize("mesh", [{"data": 2}, {"fsdp": 3}, {"fsdp": 4}])
def test_learners_of_a_mesh_find_what_one_devices_sampler_recorded(small, mesh):
    case, drawn = small
    assert np.array_equal(learners(on(case, **mesh), drawn, row=100, most=6, seed=2), recorded(drawn))


def test_gradients_of_a_mesh_are_those_of_one_device_and_the_same_at_every_call(small):
    case, drawn = small
    found, (gradients, others) = learners(on(case, data=2, fsdp=2), drawn, gradient=True)
    assert np.array_equal(found, recorded(drawn))
    _, (expected, _) = learners(case, drawn, gradient=True)
    for one, other, want in zip(*map(jax.tree.leaves, (gradients, others, expected))):
        assert np.array_equal(one, other)
        np.testing.assert_allclose(one, want, atol=1e-5 * float(np.abs(want).max()))


def test_products_that_a_mesh_left_to_the_compiler_would_divide_are_seen(small, monkeypatch):
    case, drawn = small
    monkeypatch.setattr(arithmetic, "by_rows", lambda compute, given, found: compute)
    found = learners(on(case, fsdp=2), drawn)
    np.testing.assert_allclose(found, recorded(drawn), atol=1e-5)
    assert not np.array_equal(found, recorded(drawn))


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_models_without_an_order_are_refused_by_name():
    sizes = {
        n: getattr(QWEN3, n)
        for n in ("vocabulary_size", "width", "layers", "heads", "kv_heads", "head_width", "mlp_width")
    }
    with pytest.raises(ValueError, match="experts are chosen and summed"):
        policy_of(Qwen3MoE(**sizes, experts=Experts(count=4, chosen=2, width=8)))
    with pytest.raises(ValueError, match="layers that hold a state"):
        policy_of(Qwen3_5(**sizes | {"layers": 4, "head_width": 16}, delta=GatedDelta(key_heads=2, value_heads=2)))
    with pytest.raises(ValueError, match="not for adapters"):
        PolicySource(architecture=QWEN3, lora=LoRA(rank=2), bitwise=True).policy(devices())
    assert PolicySource(architecture=QWEN3, bitwise=True).policy(devices()).bitwise
    assert not PolicySource(architecture=QWEN3, bitwise=True).policy(devices(), value=True).bitwise


def test_samplers_without_the_learners_arithmetic_are_refused_by_name(tmp_path):
    policy = policy_of(QWEN3)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        EmbeddedSampler(cache="float8_e4m3fn").start(policy, Letters(), max_length=MAX_LENGTH)
    with pytest.raises(ValueError, match="vLLM servers have kernels of their own"):
        VllmSampler(urls=("http://localhost:1",), spawn=False).start(
            policy, Letters(), max_length=MAX_LENGTH, run_dir=tmp_path
        )
