"""A server computes by the learner's config.json, compared exactly: equal tensors under another rotary base or epsilon are refused."""

import json
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from published import write_version
from stand_in_worker import Worker, weights
from test_canary import LAYERS, MODEL, TEXT, model, ratio, versions
from test_cuda_ipc import HostMemory, manifest, on_devices
from test_vllm_plugin import staged
from transformers import AutoConfig

from jaxrl_llm.models import hf_config
from jaxrl_llm.publication import canary as canaries
from jaxrl_llm.publication import vllm_plugin
from jaxrl_llm.publication.cuda_ipc import share
from jaxrl_llm.publication.forward import differences, forward_of
from jaxrl_llm.samplers.servers.publisher import scored

__all__ = ["versions"]  # a fixture

# What a server's config.json may say in place of SERVED's, and how the refusal names it.
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "rotary base, as old files say it": ({"rope_theta": 15000.0}, "rope_theta is 15000.0 here and 10000.0 there"),
    "rotary base, as new files say it": ({"rope_parameters": {"rope_theta": 10001.0, "rope_type": "default"}}, "rope_theta is 10001.0 here and 10000.0 there"),
    "rotary scaling": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear' here and 'default' there"),
    "share of rotated elements": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5 here and 1.0 there"),
    "epsilon": ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05 here and 1e-06 there"),
    "heads of the same width": ({"num_attention_heads": 2, "num_key_value_heads": 1}, "head_dim is 8 here and 4 there"),
    "heads that share keys": ({"num_key_value_heads": 4}, "num_key_value_heads is 4 here and 2 there"),
    "activation": ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh' here and 'silu' there"),
    "tied head": ({"tie_word_embeddings": True}, "tie_word_embeddings is True here and False there"),
    "window": ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, "sliding_window is 8 here and None there"),
    "architecture": ({"model_type": "gemma"}, "model_type is 'gemma' here and 'qwen2' there"),
}  # fmt: skip
# The same model in other words.
ALIKE: dict[str, dict[str, Any]] = {
    "rotary settings in a dict": {"rope_theta": None, "rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
    "a size that follows": {"head_dim": 4},
    "a window that is not used": {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 0},
    "a window that no layer has": {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 21},
    "settings of another purpose": {"head_dtype": "float32", "max_position_embeddings": 7, "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("published")
    return [write_version(folder, version, weights(version)) for version in range(2)]


@pytest.mark.parametrize("name", OTHERS)
def test_a_server_of_another_config_refuses_to_stage_and_names_both_values(published, name):
    change, said = OTHERS[name]
    worker = Worker()
    worker.config |= change
    status = staged(worker, published[1], 1)
    assert status["state"] == "failed" and said in status["error"] and "\n" not in status["error"]
    answer = worker.commit("1")
    assert (answer["version"], worker.reloads) == (-1, 0) and said in answer["error"]


@pytest.mark.parametrize("name", ["rotary base, as old files say it", "epsilon"])
def test_it_takes_nothing_from_the_learners_memory_either(monkeypatch, name):
    memory = HostMemory()
    monkeypatch.setattr(vllm_plugin, "gpu_memory", lambda device: memory)
    change, said = OTHERS[name]
    worker = Worker()
    worker.config |= change
    text = share(on_devices(1, PartitionSpec()), manifest(1), memory, 0)
    answer = worker.commit_ipc("1", text)
    assert (answer["version"], worker.reloads) == (-1, 0) and said in answer["error"]


@pytest.mark.parametrize("name", ALIKE)
def test_the_same_model_in_other_words_is_taken(published, name):
    worker = Worker()
    worker.config |= ALIKE[name]
    assert staged(worker, published[1], 1)["state"] == "staged"
    assert worker.commit("1")["version"] == 1


# config.json of released models, in the words of their files.
RELEASED: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "tie_word_embeddings": True, "vocab_size": 128256, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "windows in half of the layers": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
        "max_window_layers": 2, "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1e4,
        "sliding_window": 16, "tie_word_embeddings": True, "use_sliding_window": True, "vocab_size": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_learner_and_server_read_a_released_config_alike(tmp_path, name):
    """The server's is read by transformers, from the model's own file and from the one that the learner writes."""
    learner = hf_config.write(hf_config.read(RELEASED[name]))
    for content in (RELEASED[name], learner):
        (tmp_path / "config.json").write_text(json.dumps(content))
        server = AutoConfig.from_pretrained(tmp_path).to_dict()
        assert differences(forward_of(learner), forward_of(server)) == ""
    server["rope_parameters"]["rope_theta"] += 1
    assert "rope_theta" in differences(forward_of(learner), forward_of(server))


def test_a_rotary_base_that_the_canary_does_not_see_in_bfloat16_is_seen_here(versions):
    """By 1.5 times the base the probabilities move less than rounding explains, and the settings differ all the same."""
    other = replace(MODEL, rope_theta=1.5 * MODEL.rope_theta)
    found, _ = ratio(versions[1], model(other), versions[1])
    row = jnp.asarray(np.pad(TEXT, (0, 32), constant_values=-1))
    _, _, likely, spread = (np.asarray(x)[: len(TEXT) - 1] for x in scored(versions[1], row, policy=model()))
    assert 0 < found < canaries.limit(likely, spread, LAYERS, ("bfloat16",))
    apart = differences(forward_of(hf_config.write(MODEL)), forward_of(hf_config.write(other)))
    assert apart == f"rope_theta is {1.5 * MODEL.rope_theta!r} here and {MODEL.rope_theta!r} there"
