"""Hugging Face folders: a bitwise round trip, slices on a mesh, and errors that name what is wrong."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import transformers
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models import hf_config, hf_format, hf_weights
from jaxrl_llm.models.architecture import Llama3RopeScaling
from jaxrl_llm.models.llama3 import Llama3
from jaxrl_llm.models.mistral import Mistral
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen2 import Qwen2
from jaxrl_llm.models.qwen3 import Qwen3

HEADS = {"heads": 4, "kv_heads": 2, "head_width": 8}
SIZES = {"vocabulary_size": 64, "width": 32, "layers": 2, "mlp_width": 48, **HEADS}
ARCHITECTURES = [
    Qwen2(**SIZES),
    Qwen2(**SIZES, tied=True, window=4, sliding=(False, True)),
    Qwen3(**SIZES, tied=True),
    Llama3(**SIZES, rope_scaling=Llama3RopeScaling(factor=8.0)),
    Mistral(**SIZES),
    Mistral(**SIZES, window=4),
    Mistral(**SIZES, window=4, sliding=(False, True)),
]


def policy_of(architecture, config=None, devices=1):
    return Policy(architecture, Partitioner.create(config or MeshConfig(fsdp=1), jax.devices()[:devices]))


def random_params(policy):
    """Parameters that are random everywhere, norms and biases included."""
    leaves, tree = jax.tree.flatten(policy.init(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [leaf + jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys)]
    return jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), jax.tree.unflatten(tree, noisy), policy.abstract()
    )


def assert_bitwise_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small Qwen3 folder of two files: (policy, params, folder)."""
    policy = policy_of(Qwen3(**SIZES))
    params = random_params(policy)
    folder = tmp_path_factory.mktemp("hf") / "model"
    hf_weights.save(policy, params, folder, shard_bytes=40_000)
    return policy, params, folder


def edited(saved, folder, edit):
    """A one-file copy of the saved folder whose tensors went through `edit`."""
    tensors = {}
    for file in saved[2].glob("*.safetensors"):
        tensors |= load_file(file)
    edit(tensors)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((saved[2] / "config.json").read_text())
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: f"{type(a).__name__}_{a.window}_{len(a.sliding)}")
def test_every_leaf_has_one_checkpoint_tensor_a_layer_and_each_name_is_used_once(architecture):
    policy = policy_of(architecture)
    found = hf_format.tensors(policy.abstract())
    assert len({t.name for t in found}) == len(found) == len({(t.path, t.layer) for t in found})
    elements = sum(leaf.size for leaf in jax.tree.leaves(policy.abstract()))
    assert sum(int(np.prod(t.hf_shape)) for t in found) == elements
    assert ("lm_head.weight" in {t.name for t in found}) == (not architecture.tied)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: f"{type(a).__name__}_{a.window}_{len(a.sliding)}")
def test_an_architecture_survives_config_json(architecture):
    assert hf_config.read(json.loads(json.dumps(hf_config.write(architecture)))) == architecture


def test_saved_parameters_load_bit_for_bit(saved):
    policy, params, folder = saved
    assert_bitwise_equal(hf_weights.load(policy, folder), params)


def test_a_large_checkpoint_is_spread_over_files_that_the_index_names(saved):
    index = json.loads((saved[2] / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in saved[2].glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    assert all((saved[2] / name).stat().st_size < 45_000 for name in files)
    assert index["metadata"]["total_size"] == 4 * sum(x.size for x in jax.tree.leaves(saved[1]))


@pytest.mark.parametrize(
    ("config", "devices"),
    [(MeshConfig(data=2, fsdp=1), 2), (MeshConfig(fsdp=4, tensor=2), 8), (MeshConfig(fsdp=1, tensor=4), 4)],
)
def test_parameters_load_and_save_bit_for_bit_on_a_mesh(saved, config, devices, tmp_path):
    policy = policy_of(saved[0].architecture, config, devices)
    params = hf_weights.load(policy, saved[2])
    assert_bitwise_equal(params, saved[1])
    for leaf, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(policy.abstract())):
        assert leaf.sharding == wanted.sharding
    hf_weights.save(policy, params, tmp_path / "out")
    assert_bitwise_equal(hf_weights.load(saved[0], tmp_path / "out"), saved[1])


def test_a_device_reads_its_own_shard_and_no_more(saved, monkeypatch):
    policy = policy_of(saved[0].architecture, MeshConfig(fsdp=4, tensor=2), 8)
    parts = []
    whole = hf_format.Tensor.from_hf

    def recorded(tensor, part, shape):
        parts.append((tensor.name, part.size))
        return whole(tensor, part, shape)

    monkeypatch.setattr(hf_format.Tensor, "from_hf", recorded)
    hf_weights.load(policy, saved[2])
    gate = [size for name, size in parts if name == "model.layers.0.mlp.gate_proj.weight"]
    assert gate == [32 * 48 // 8] * 8
    key = [size for name, size in parts if name == "model.layers.1.self_attn.k_proj.weight"]
    assert key == [32 * 16 // 8] * 8


def test_exported_tensors_equal_the_saved_ones_under_jit(saved):
    _, params, folder = saved
    exported = jax.jit(hf_format.export)(params)
    files = {}
    for file in folder.glob("*.safetensors"):
        files |= load_file(file)
    assert exported.keys() == files.keys()
    for name, tensor in files.items():
        np.testing.assert_array_equal(np.asarray(exported[name]), tensor)


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "BF16"), ("float16", "F16")])
def test_half_precision_goes_out_and_in_as_rounded_values(saved, dtype, kind, tmp_path):
    policy, params, _ = saved
    hf_weights.save(policy, params, tmp_path / "out", dtype=dtype)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as file:
        assert file.get_slice("model.norm.weight").get_dtype() == kind
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["torch_dtype"], config["transformers_version"]) == (dtype, transformers.__version__)
    numpy_dtype = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(numpy_dtype).astype(np.float32), params)
    assert_bitwise_equal(hf_weights.load(policy, tmp_path / "out"), rounded)


def test_a_tied_checkpoint_may_repeat_its_head(tmp_path):
    policy = policy_of(Qwen3(**SIZES, tied=True))
    params = random_params(policy)
    hf_weights.save(policy, params, tmp_path / "first")
    first = (policy, params, tmp_path / "first")
    folder = edited(first, tmp_path / "again", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert_bitwise_equal(hf_weights.load(policy, folder), params)


def test_missing_misshaped_and_unexpected_tensors_are_named(saved, tmp_path):
    def edit(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = np.zeros(7, np.float32)
        tensors["model.layers.0.extra.weight"] = np.zeros(2, np.float32)
        tensors["lm_head.weight"] = np.zeros((64, 32), np.int8)

    folder = edited(saved, tmp_path, edit)
    with pytest.raises(ValueError, match=r"do not fit their config.json") as error:
        hf_weights.load(saved[0], folder)
    message = str(error.value)
    assert "model.layers.1.mlp.up_proj.weight is missing" in message
    assert "model.norm.weight has shape (7,), config.json asks for (32,)" in message
    assert "model.layers.0.extra.weight is unexpected" in message
    assert "lm_head.weight has dtype I8, only F32, BF16, F16 are read" in message


def test_a_folder_without_config_or_weights_is_named(saved, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        hf_weights.architecture(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no safetensors weights"):
        hf_weights.load(saved[0], tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        hf_weights.architecture(tmp_path)


def test_a_torn_or_absent_weight_file_is_named(saved, tmp_path):
    folder = edited(saved, tmp_path, lambda tensors: None)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"model.safetensors is no complete safetensors file"):
        hf_weights.load(saved[0], folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"names gone.safetensors, which is not in the folder"):
        hf_weights.load(saved[0], folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architecture GPT2LMHeadModel is not supported: use one of Qwen2For"),
        ({"architectures": [], "model_type": "bert"}, r"architecture bert is not supported"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' is not supported, only 'silu' is"),
        ({"attention_bias": True}, r"attention_bias=True is not supported"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config=.* is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rotary scaling .*yarn.* is not supported"),
        ({"layer_types": ["full_attention"], "use_sliding_window": True, "sliding_window": 4}, r"each of 2 layers"),
    ],
)
def test_a_config_that_the_layers_do_not_implement_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        hf_config.read(hf_config.write(Qwen3(**SIZES)) | change, "config.json")


def test_a_config_without_sizes_names_them():
    with pytest.raises(ValueError, match=r"config.json lacks hidden_size, num_hidden_layers, .*vocab_size"):
        hf_config.read({"model_type": "qwen3"})


def test_a_window_of_qwen_counts_only_where_it_is_switched_on():
    config = hf_config.write(Qwen2(**SIZES)) | {"sliding_window": 4096, "max_window_layers": 1}
    del config["layer_types"]
    assert set(hf_config.read(config).windows) == {None}
    assert hf_config.read(config | {"use_sliding_window": True}).windows == (None, 4096)


def test_a_failed_save_leaves_nothing_behind(saved, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_weights, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        hf_weights.save(saved[0], saved[1], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_content_is_not_overwritten(saved, tmp_path):
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(FileExistsError, match=r"exists and is not empty"):
        hf_weights.save(saved[0], saved[1], tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_an_unknown_dtype_is_refused(saved, tmp_path):
    with pytest.raises(ValueError, match=r"dtype must be one of .*got 'int8'"):
        hf_weights.save(saved[0], saved[1], tmp_path / "out", dtype="int8")


class SavedTokenizer:
    """What `save` asks of a transformers tokenizer."""

    bos_token_id, eos_token_id, pad_token_id = None, 5, 6

    def save_pretrained(self, folder):
        (Path(folder) / "tokenizer.json").write_text("{}")


def test_a_tokenizer_is_saved_with_its_special_ids(saved, tmp_path):
    hf_weights.save(saved[0], saved[1], tmp_path / "out", SavedTokenizer())
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "eos_token_id": 5,
        "pad_token_id": 6,
    }
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 5
    several = SavedTokenizer()
    several.stop_ids = (5, 7)
    hf_weights.save(saved[0], saved[1], tmp_path / "several", several)
    assert json.loads((tmp_path / "several" / "generation_config.json").read_text())["eos_token_id"] == [5, 7]


WRAPPERS = {
    "a wrapper's": lambda name: f"module.{name}",
    "a compiler's": lambda name: f"_orig_mod.{name}",
    "a model around it": lambda name: name.replace("model.", "language_model.model.", 1).replace(
        "lm_head", "language_model.lm_head"
    ),
    "the newer one of these": lambda name: name.replace("model.", "model.language_model.", 1),
    "none": lambda name: name.removeprefix("model."),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_tensors_under_other_prefixes_are_read_and_this_is_said(saved, tmp_path, kind, caplog):
    policy, params, _ = saved

    def rename(tensors):
        found = {WRAPPERS[kind](name): x for name, x in tensors.items()}
        assert len(found) == len(tensors) and found.keys() != tensors.keys()
        tensors.clear()
        tensors.update(found)

    folder = edited(saved, tmp_path / "renamed", rename)
    assert_bitwise_equal(hf_weights.load(policy, folder), params)
    assert "other names alike" in caplog.text


def test_two_embeddings_leave_the_names_as_they_are(saved, tmp_path):
    def add(tensors):
        tensors["encoder.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()

    with pytest.raises(ValueError, match=r"encoder\.embed_tokens\.weight is unexpected"):
        hf_weights.load(saved[0], edited(saved, tmp_path / "two", add))
