"""Sizes and FLOPs of models with recurrent layers, their adapters, and what is refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.kernels.delta_rule.definition import CHUNK
from jaxrl_llm.learner.optimizer import decays
from jaxrl_llm.metrics import flops
from jaxrl_llm.models.architecture import Experts, GatedDelta
from jaxrl_llm.models.lora import AdaptedPolicy, LoRA
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen3_5 import Qwen3_5, Qwen3_5MoE
from jaxrl_llm.models.qwen3_next import Qwen3Next
from jaxrl_llm.models.sizes import SHAPES
from jaxrl_llm.samplers.vllm.sampler import VllmSampler
from jaxrl_llm.tools.planning import chips, cost_model

SIZES = {"kv_heads": 2, "head_width": 256, "vocabulary_size": 248320}
SMALL = Qwen3_5(
    **SIZES, width=1024, layers=24, heads=8, mlp_width=3584, tied=True, delta=GatedDelta(key_heads=16, value_heads=16)
)
NINE = Qwen3_5(
    **{**SIZES, "kv_heads": 4}, width=4096, layers=32, heads=16, mlp_width=12288, tied=False,
    delta=GatedDelta(key_heads=16, value_heads=32),
)  # fmt: skip
A3B = Qwen3_5MoE(
    **SIZES, width=2048, layers=40, heads=16, mlp_width=512, delta=NINE.delta,
    experts=Experts(count=256, chosen=8, width=512, shared=512, normalised=True),
)  # fmt: skip
NEXT = Qwen3Next(
    **{**SIZES, "vocabulary_size": 151936}, width=2048, layers=48, heads=16, mlp_width=5632, delta=NINE.delta,
    experts=Experts(count=512, chosen=10, width=512, shared=512, normalised=True),
)  # fmt: skip
TINY = Qwen3_5(
    vocabulary_size=61, width=32, layers=4, heads=4, kv_heads=2, head_width=16, mlp_width=48,
    delta=GatedDelta(key_heads=2, value_heads=4, key_width=8, value_width=6),
)  # fmt: skip


def one_device():
    return Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1])


@pytest.mark.parametrize(
    ("model", "billions"), [(SMALL, 0.752), (SHAPES["qwen3.5-2b"], 1.882), (NINE, 8.954), (A3B, 34.66), (NEXT, 79.67)]
)
def test_parameters_are_those_of_the_released_models(model, billions):
    assert flops.parameters(model, resident=True) == pytest.approx(billions * 1e9, rel=1e-3)
    held = sum(x.size for x in jax.tree.leaves(Policy(model, one_device()).abstract()))
    delta, recurrent = model.delta, 3 * model.layers // 4
    own = 4 * (2 * delta.key_heads + delta.value_heads) * 128 + 2 * delta.value_heads + 128  # convolution, decays, norm
    norms = (2 * model.layers + 1) * model.width + 2 * 256 * (model.layers - recurrent)
    assert held == flops.parameters(model, resident=True) + recurrent * own + norms


def test_a_token_goes_to_its_experts_and_to_the_shared_one():
    """By hand, of 35B-A3B: in each of 40 layers 8 + 1 of 257 experts of 3 x 2048 x 512 weights, the router and the gate of the shared one."""
    idle = 40 * (256 - 8) * 3 * 2048 * 512
    assert flops.parameters(A3B, resident=True) - flops.parameters(A3B, resident=False) == idle
    attention = 2048 * (3 * 16 + 2 * 2) * 256
    assert flops.layer_weights(A3B, sparse=True) == attention + 2048 * (256 + 1) + 9 * 3 * 2048 * 512
    assert flops.mlp_width(A3B) == 9 * 512


def test_flops_count_the_rule_in_recurrent_layers_and_pairs_in_the_others():
    """Of Qwen3.5-9B: 0.164 MFLOP for a token and value head, 5.2 MFLOP for a token and layer; 8 layers of 32 attend."""
    assert flops.rule(NINE) / 32 == pytest.approx(0.164e6, rel=1e-2) and flops.CHUNK == CHUNK
    weights = flops.product_weights(NINE) + NINE.vocabulary_size * NINE.width
    by_hand = 4096 * (2 * weights + 24 * 32 * (6 * 128**2 + 4 * 64 * 256)) + 2 * 8 * 4096**2 * 16 * 256
    assert flops.forward(NINE, [4096]) == pytest.approx(by_hand, rel=1e-9)
    assert flops.forward(NINE, [8], layers=3, head=False) == 8 * (
        2 * 3 * flops.layer_weights(NINE, recurrent=True) + 3 * flops.rule(NINE)
    )


def test_a_slot_of_the_small_model_holds_18_9_mb_of_state():
    shapes = Policy(SMALL, one_device(), "bfloat16").cache_shapes(1, 4096)
    assert shapes["state"].shape == (18, 1, 16, 128, 128) and 4 * shapes["state"].size == pytest.approx(
        18.9e6, rel=1e-2
    )
    assert shapes["k"].shape == (6, 1, 4096, 2, 256) and shapes["conv"].shape == (18, 1, 3, 6144)


def test_a_step_of_decoding_reads_and_writes_the_states():
    """Of the small model 2 x 18 x 16 x 128 x 128 float32 a slot, beside the keys and values of 6 layers."""
    chip, setting = chips.CHIPS["h200"], cost_model.Setting(sizes=SMALL, remat="full")
    one, more = (cost_model.sample_seconds(chip, setting, n, 100, 200, n) for n in (1, 65))
    moved = 64 * (2 * 4 * 18 * 16 * 128 * 128 + (100 + 200 / 2) * 2 * 2 * 6 * 2 * 256)
    assert more - one == pytest.approx(200 * moved / (chip.bandwidth * cost_model.RATES["decode"]), rel=1e-9)
    assert flops.state_bytes(replace(SMALL, layers=4)) * 6 == flops.state_bytes(SMALL) == 18 * 4 * 16 * 128 * 128


def test_weight_decay_acts_on_projections_alone():
    tree = decays(Policy(TINY, one_device()).abstract())["layers_0"]["delta"]
    still = {name for name, leaf in tree.items() if not any(jax.tree.leaves(leaf))}
    assert still == {"taps", "log_decay", "rate_bias", "norm"}


def test_adapters_go_to_mlps_and_to_the_attention_that_there_is():
    plain = Policy(TINY, one_device())
    base, policy = plain.init(jax.random.key(0)), AdaptedPolicy(TINY, plain.partitioner, lora=LoRA(rank=2))
    adapters = policy.init(jax.random.key(1))
    assert [set(adapters[f"layers_{i}"]) for i in range(4)] == [{"mlp"}] * 3 + [{"mlp", "attention"}]
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), "float32"), adapters)
    row = tuple(jnp.asarray(x, jnp.int32) for x in (np.arange(9)[None], np.arange(9)[None], np.ones((1, 9))))
    apart = policy.hidden(policy.joined(adapters, base), *row)
    np.testing.assert_allclose(apart, plain.hidden(policy.merged(adapters, base), *row), rtol=1e-4, atol=1e-4)
    assert np.abs(np.asarray(apart) - np.asarray(plain.hidden(base, *row))).max() > 1e-2


def test_what_cannot_be_is_refused(tmp_path):
    for change, message in (
        ({"value_heads": 3}, "key_heads must divide"),
        ({"layers": (False,)}, "layer with a state"),
        ({"taps": 1}, "taps"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(TINY.delta, **change)
    with pytest.raises(ValueError, match="even number of dimensions"):
        replace(TINY, rotary_share=0.2)
    with pytest.raises(ValueError, match="not published to vLLM"):
        VllmSampler(spawn=False, urls=("http://localhost:1",)).start(
            Policy(TINY, one_device()), None, max_length=8, run_dir=tmp_path
        )
