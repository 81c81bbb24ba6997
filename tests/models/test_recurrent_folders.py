"""Folders of models with recurrent layers: what is written is read by transformers to the same bits, and vision-language models' text is read."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
import torch
import transformers
from builders import slow_but
from safetensors.numpy import load_file, save_file
from test_against_transformers import one_device
from test_qwen3_5 import CONFIGS, loaded, rows, their_logits
from test_qwen3_moe import as_theirs

from jaxrl_llm.models import hf_config, hf_weights
from jaxrl_llm.models.policy import Policy

TEXT = [name for name in CONFIGS if "next" not in name]  # of vision-language models


@pytest.mark.parametrize("name", slow_but(("untied", "experts", "next"), CONFIGS))
def test_an_exported_folder_holds_the_same_bits_and_loads_in_transformers(name, tmp_path):
    theirs, policy, params = loaded(name, tmp_path / "in")
    hf_weights.save(policy, params, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert type(again) is type(theirs)
    own = dict(theirs.named_parameters())
    assert own.keys() == dict(again.named_parameters()).keys()
    assert all(torch.equal(x, own[n]) for n, x in again.named_parameters())
    assert {n: x.tolist() for n, x in again.named_buffers()} == {n: x.tolist() for n, x in theirs.named_buffers()}
    with (
        torch.no_grad()
    ):  # of 64 bits, since torch's products on a CPU may add in another order where weights lie elsewhere
        one, other = (m.double() for m in (theirs, again))
        for m in (one, other):
            m.set_experts_implementation("eager")  # its grouped products are of 32 bits at most
        torch.testing.assert_close(their_logits(other, rows()), their_logits(one, rows()), rtol=0, atol=1e-12)
    assert hf_weights.architecture(tmp_path / "out") == policy.architecture
    assert hf_config.read(json.loads(json.dumps(hf_config.write(policy.architecture)))) == policy.architecture


def nested(folder, out):
    """The folder as a vision-language model's: names and settings of the text nested, and tensors of other parts."""
    tensors = load_file(folder / "model.safetensors")
    found = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: x
        for name, x in tensors.items()
    }
    found["model.visual.patch_embed.proj.weight"] = found["mtp.fc.weight"] = np.zeros((2, 2), np.float32)
    out.mkdir()
    save_file(found, out / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    tied = config["tie_word_embeddings"]
    kind = config["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    outer = {"architectures": [kind], "model_type": config["model_type"].removesuffix("_text"), "text_config": config}
    (out / "config.json").write_text(json.dumps(outer | {"tie_word_embeddings": tied, "vision_config": {"depth": 1}}))
    return out


@pytest.mark.parametrize("name", TEXT)
def test_the_text_model_of_a_vision_language_folder_is_read(name, tmp_path):
    _, policy, params = loaded(name, tmp_path / "in")
    folder = nested(tmp_path / "in", tmp_path / "nested")
    assert hf_weights.architecture(folder) == policy.architecture
    for x, y in zip(jax.tree.leaves(hf_weights.load(policy, folder)), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", ["untied", "experts"])
def test_transformers_writes_a_vision_language_folder_of_that_form(name, tmp_path):
    """The form above is that of a real folder: transformers' own small vision-language model."""
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
    }  # fmt: skip
    text, kind = CONFIGS[name].to_dict(), "Qwen3_5" if name == "untied" else "Qwen3_5Moe"
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision)
    theirs = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    theirs.save_pretrained(tmp_path / "m")
    policy = Policy(hf_weights.architecture(tmp_path / "m"), one_device())
    names = load_file(tmp_path / "m" / "model.safetensors").keys()
    assert any(n.startswith("model.visual.") for n in names) and "model.language_model.norm.weight" in names
    params = hf_weights.load(policy, tmp_path / "m")
    want = dict(theirs.model.language_model.named_parameters())
    for name, x in as_theirs(params).items():
        if name != "lm_head.weight":
            np.testing.assert_array_equal(x, want[name.removeprefix("model.")].detach().numpy())


def test_other_tensors_and_settings_are_refused(tmp_path):
    _, policy, _ = loaded("untied", tmp_path / "in")
    folder = nested(tmp_path / "in", tmp_path / "nested")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.audio.weight": np.zeros((1, 1), np.float32)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.audio\.weight is unexpected"):
        hf_weights.load(policy, folder)
    config = hf_config.write(policy.architecture)
    for change, message in (
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"layer_types": ["mamba"] * 4}, "mamba"),
        ({"layer_types": ["full_attention"] * 4}, "full_attention alone"),
        ({"linear_num_key_heads": None}, "lacks linear_num_key_heads"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "lacks num_experts, .*, shared_expert_intermediate_size"),
    ):
        with pytest.raises(ValueError, match=message):
            hf_config.read(config | change)


def test_the_experts_of_a_family_are_of_its_form(tmp_path):
    _, policy, _ = loaded("experts", tmp_path / "in")
    model = policy.architecture
    for change, message in (
        ({"shared": None}, "shared must be a width in a Qwen3_5MoE"),
        ({"normalised": False}, "normalised must be True"),
        ({"layers": (True, False)}, r"layers \(True,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(model, experts=replace(model.experts, **change))
