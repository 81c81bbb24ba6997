"""Hugging Face folders of models with experts in both forms, their sizes and FLOPs, adapters, and what is refused."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.metrics import flops
from jaxrl_llm.models import hf_config, hf_weights
from jaxrl_llm.models.architecture import Experts
from jaxrl_llm.models.lora import AdaptedPolicy, LoRA
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen3_moe import Qwen3MoE

SIZES = {"vocabulary_size": 64, "width": 32, "heads": 4, "kv_heads": 2, "head_width": 8, "mlp_width": 48}
COUNT, WIDTH = 6, 16
EXPERTS = Experts(count=COUNT, chosen=2, width=WIDTH, normalised=True, layers=(False, True))
MODEL = Qwen3MoE(**SIZES, layers=4, experts=EXPERTS)
A3B = Qwen3MoE(
    vocabulary_size=151936, width=2048, layers=48, heads=32, kv_heads=4, head_width=128, mlp_width=6144,
    experts=Experts(count=128, chosen=8, width=768, normalised=True),
)  # fmt: skip


def policy_of(architecture=MODEL, devices=1, **mesh):
    return Policy(architecture, Partitioner.create(MeshConfig(**{"fsdp": 1, **mesh}), jax.devices()[:devices]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    policy = policy_of()
    params = policy.init(jax.random.key(0))
    folder = tmp_path_factory.mktemp("moe") / "model"
    hf_weights.save(policy, params, folder)
    return policy, params, folder


def fused(folder, out):
    """The folder with the experts of each layer in two tensors, as transformers' modules hold them."""
    tensors = load_file(folder / "model.safetensors")
    for layer in (1, 3):
        start = f"model.layers.{layer}.mlp.experts"
        take = lambda e, part, start=start: tensors.pop(f"{start}.{e}.{part}_proj.weight")  # noqa: E731
        tensors[f"{start}.gate_up_proj"] = np.stack(
            [np.concatenate([take(e, "gate"), take(e, "up")]) for e in range(COUNT)]
        )
        tensors[f"{start}.down_proj"] = np.stack([take(e, "down") for e in range(COUNT)])
    out.mkdir()
    save_file(tensors, out / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["num_local_experts"] = config.pop("num_experts")
    (out / "config.json").write_text(json.dumps(config))
    return out


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        np.testing.assert_array_equal(x, y)


def test_each_expert_is_a_tensor_of_its_own_and_both_forms_load_bit_for_bit(saved, tmp_path):
    policy, params, folder = saved
    names = load_file(folder / "model.safetensors").keys()
    assert {f"model.layers.3.mlp.experts.5.{n}_proj.weight" for n in ("gate", "up", "down")} <= names
    assert "model.layers.0.mlp.gate_proj.weight" in names and "model.layers.1.mlp.gate.weight" in names
    assert len(names) == 4 * 8 + 3 + 2 * 3 + 2 * (1 + 3 * COUNT)
    assert_same(hf_weights.load(policy, folder), params)
    other = fused(folder, tmp_path / "fused")
    assert hf_weights.architecture(other) == MODEL
    assert_same(hf_weights.load(policy, other), params)


@pytest.mark.parametrize("mesh", [{"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"expert": 2, "fsdp": 2}])
def test_both_forms_load_and_save_bit_for_bit_on_a_mesh(saved, mesh, tmp_path):
    _, params, folder = saved
    policy = policy_of(devices=4, **mesh)
    for form in (folder, fused(folder, tmp_path / "fused")):
        assert_same(hf_weights.load(policy, form), params)
    hf_weights.save(policy, hf_weights.load(policy, folder), tmp_path / "out")
    one, other = (load_file(x / "model.safetensors") for x in (folder, tmp_path / "out"))
    assert one.keys() == other.keys() and all(np.array_equal(x, other[name]) for name, x in one.items())


def test_a_folder_of_other_experts_is_refused(saved, tmp_path):
    policy, _, folder = saved
    other = Policy(replace(MODEL, experts=replace(EXPERTS, count=5)), policy.partitioner)
    with pytest.raises(ValueError, match=r"experts\.5\.down_proj\.weight is unexpected"):
        hf_weights.load(other, folder)
    with pytest.raises(ValueError, match=r"gate_up_proj has shape \(6, 32, 32\), config.json asks for \(5, 32, 32\)"):
        hf_weights.load(other, fused(folder, tmp_path / "fused"))


PATTERNS = [(True,), (False, True), (True, True, False, True), (False, False, True)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_architecture_survives_config_json(pattern):
    model = Qwen3MoE(**SIZES, layers=12, experts=replace(EXPERTS, layers=pattern))
    assert hf_config.read(json.loads(json.dumps(hf_config.write(model)))) == model
    assert model.period == len(pattern) and model.sparse == tuple(pattern[i % len(pattern)] for i in range(12))


def test_config_keys_of_hub_files_are_read_as_transformers_reads_them():
    config = hf_config.write(MODEL) | {"mlp_only_layers": [3], "decoder_sparse_step": 2}
    del config["norm_topk_prob"]
    found = hf_config.read(config)
    assert found.sparse == (False, True, False, False) and not found.experts.normalised
    assert found.stacks == ("layers_0", "layers_1", "layers_2", "layers_3")
    for change, message in (
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"num_experts": None}, "num_experts"),
    ):
        with pytest.raises(ValueError, match=message):
            hf_config.read(config | change)


def test_experts_refuse_what_cannot_be():
    for change, message in (
        ({"chosen": 7}, "chosen"),
        ({"count": 0}, "count"),
        ({"layers": (False,)}, "layer with experts"),
        ({"shared": 0}, "shared"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(EXPERTS, **change)
    with pytest.raises(ValueError, match="no shared expert"):
        replace(MODEL, experts=replace(EXPERTS, shared=8))


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_sizes_and_flops_of_30b_a3b():
    """By hand: 48 layers of attention 18.87 M, router 0.26 M, and 128 (8 of them active) experts of 4.72 M weights each."""
    attention = 2048 * 128 * (2 * 32 + 2 * 4)
    expert, tables = 3 * 2048 * 768, 2 * 151936 * 2048
    assert flops.parameters(A3B, resident=True) == 48 * (attention + 2048 * 128 + 128 * expert) + tables
    assert flops.parameters(A3B, resident=True) == pytest.approx(30.532e9, rel=1e-4)
    assert flops.parameters(A3B, resident=False) == pytest.approx(3.353e9, rel=1e-3)
    causal = 2 * 48 * 4096**2 * 32 * 128
    assert flops.forward(A3B, [4096]) - causal == pytest.approx(6.083e9 * 4096, rel=1e-3)
    assert causal / 4096 == pytest.approx(1.611e9, rel=1e-3)
    assert flops.update(A3B, [4096]) / 4096 == pytest.approx(23.08e9, rel=1e-3)
    held = sum(x.size for x in jax.tree.leaves(policy_of(A3B).abstract()))
    assert held - flops.parameters(A3B, resident=True) == 48 * (2 * 2048 + 2 * 128) + 2048  # norms


def test_layers_without_experts_count_their_own_mlp():
    attention = 32 * 8 * (2 * 4 + 2 * 2)
    assert flops.product_weights(MODEL, 2) == 2 * attention + 3 * 32 * 48 + 32 * (COUNT + 3 * 2 * WIDTH)
    assert flops.product_weights(MODEL, resident=True) == 2 * (
        2 * attention + 3 * 32 * 48 + 32 * (COUNT + 3 * COUNT * WIDTH)
    )
    assert flops.mlp_width(MODEL) == (48 + 2 * WIDTH) / 2


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_adapters_are_made_for_projections_of_attention_alone(saved, tmp_path):
    plain, params, _ = saved
    with pytest.raises(
        ValueError, match=r"gate_proj, up_proj, down_proj, .* set lora.LoRA.targets = \('q_proj', 'k_proj'"
    ):
        AdaptedPolicy(MODEL, plain.partitioner, lora=LoRA())
    lora = LoRA(rank=2, targets=("q_proj", "o_proj"), base_dtype="bfloat16")
    policy = AdaptedPolicy(MODEL, plain.partitioner, lora=lora)
    base = policy.frozen(jax.tree.map(lambda x: x.copy(), params))
    kinds = {jax.tree_util.keystr(p): str(x.dtype) for p, x in jax.tree_util.tree_leaves_with_path(base)}
    assert kinds["['layers_1']['mlp']['router']"] == "float32" and kinds["['layers_1']['mlp']['down']"] == "bfloat16"
    adapters = policy.init(jax.random.key(1))
    assert {p[0].key for p, _ in jax.tree_util.tree_leaves_with_path(adapters)} == {"layers_0", "layers_1"}
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), "float32"), adapters)
    row = tuple(jnp.asarray(x, jnp.int32) for x in (np.arange(9)[None], np.arange(9)[None], np.ones((1, 9))))
    apart = policy.hidden(policy.joined(adapters, params), *row)
    merged = plain.hidden(policy.merged(adapters, params), *row)
    np.testing.assert_allclose(apart, merged, rtol=1e-4, atol=1e-4)
    assert np.abs(np.asarray(apart) - np.asarray(plain.hidden(params, *row))).max() > 1e-2
    hf_weights.save_adapters(policy, adapters, tmp_path / "out", base_name=None)
    names = load_file(tmp_path / "out" / "adapter_model.safetensors").keys()
    assert {f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight" for i in range(4)} <= names
    again = AdaptedPolicy(
        MODEL, plain.partitioner, lora=replace(lora, pretrained=str(tmp_path / "out"), alpha=lora.alpha)
    )
    assert_same(hf_weights.load_adapters(again, tmp_path / "out"), adapters)
