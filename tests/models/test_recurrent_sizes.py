"""Sizes and FLOPs of models with recurrent layers, their adapters, and what is refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.learner.optimizer import decays
from jaxrl_llm.metrics import flops
from jaxrl_llm.models import gated_delta
from jaxrl_llm.models.architecture import GatedDelta
from jaxrl_llm.models.lora import AdaptedPolicy, LoRA
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen3_5 import Qwen3_5
from jaxrl_llm.samplers.vllm.sampler import VllmSampler

SIZES = {"kv_heads": 2, "head_width": 256, "vocabulary_size": 248320}
SMALL = Qwen3_5(
    **SIZES, width=1024, layers=24, heads=8, mlp_width=3584, tied=True, delta=GatedDelta(key_heads=16, value_heads=16)
)
NINE = Qwen3_5(
    **{**SIZES, "kv_heads": 4}, width=4096, layers=32, heads=16, mlp_width=12288, tied=False,
    delta=GatedDelta(key_heads=16, value_heads=32),
)  # fmt: skip
TINY = Qwen3_5(
    vocabulary_size=61, width=32, layers=4, heads=4, kv_heads=2, head_width=16, mlp_width=48,
    delta=GatedDelta(key_heads=2, value_heads=4, key_width=8, value_width=6),
)  # fmt: skip


def one_device():
    return Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1])


@pytest.mark.parametrize(("model", "billions"), [(SMALL, 0.752), (NINE, 8.954)])
def test_parameters_are_those_of_the_released_models(model, billions):
    assert flops.parameters(model, resident=True) == pytest.approx(billions * 1e9, rel=1e-3)
    held = sum(x.size for x in jax.tree.leaves(Policy(model, one_device()).abstract()))
    delta, recurrent = model.delta, 3 * model.layers // 4
    own = 4 * (2 * delta.key_heads + delta.value_heads) * 128 + 2 * delta.value_heads + 128  # convolution, decays, norm
    norms = (2 * model.layers + 1) * model.width + 2 * 256 * (model.layers - recurrent)
    assert held == flops.parameters(model, resident=True) + recurrent * own + norms


def test_flops_count_the_rule_in_recurrent_layers_and_pairs_in_the_others():
    """Of Qwen3.5-9B: 0.164 MFLOP for a token and value head, 5.2 MFLOP for a token and layer; 8 layers of 32 attend."""
    assert flops.rule(NINE) / 32 == pytest.approx(0.164e6, rel=1e-2) and flops.CHUNK == gated_delta.CHUNK
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
