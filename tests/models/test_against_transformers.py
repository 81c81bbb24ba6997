"""Every family computes what transformers computes, from transformers' own checkpoint files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from builders import slow_but

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models import hf_weights
from jaxrl_llm.models.policy import Policy

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {
    **SIZES, "num_hidden_layers": 4, "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3,
}  # fmt: skip
MIXED = ["full_attention", "sliding_attention"]
CONFIGS = {
    "qwen2_tied": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2_untied": transformers.Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2_sliding": transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=3, max_window_layers=1),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "llama_plain": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama_scaled": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "mistral_full": transformers.MistralConfig(**SIZES, sliding_window=None),
    "mistral_sliding": transformers.MistralConfig(**SIZES, sliding_window=3, head_dim=16),
    "qwen3_moe": transformers.Qwen3MoeConfig(**EXPERTS, norm_topk_prob=True, tie_word_embeddings=False),
    "qwen3_moe_plain": transformers.Qwen3MoeConfig(**EXPERTS, norm_topk_prob=False, tie_word_embeddings=True),
    "qwen3_moe_every_second": transformers.Qwen3MoeConfig(**EXPERTS, norm_topk_prob=True, decoder_sparse_step=2),
    "qwen3_moe_irregular": transformers.Qwen3MoeConfig(**EXPERTS, mlp_only_layers=[1]),
    "ministral": transformers.MinistralConfig(**SIZES, sliding_window=3, head_dim=16, layer_types=MIXED),
}
QUICK = ("qwen2_untied", "qwen3", "llama_scaled", "mistral_sliding", "qwen3_moe", "ministral")
LENGTHS = (9, 6)


def random_model(config):
    """A model whose every tensor is random, norms and biases included: a fresh one would hide a forgotten scale."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def one_device():
    return Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1])


def logits_of(policy, params):
    def logits(tokens, positions, segments):
        return policy.hidden(params, tokens, positions, segments) @ policy.head(params).T

    return jax.jit(logits)


@pytest.fixture(scope="module", params=slow_but(QUICK, CONFIGS))
def pair(request, tmp_path_factory):
    """The same model on both sides: (transformers' model, our logits function)."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = random_model(CONFIGS[request.param])
    theirs.save_pretrained(folder)
    policy = Policy(hf_weights.architecture(folder), one_device())
    return theirs, logits_of(policy, hf_weights.load(policy, folder))


def sequences():
    rng = np.random.default_rng(0)
    return [rng.integers(1, 61, length) for length in LENGTHS]


def their_logits(model, tokens, mask):
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    with torch.no_grad():
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        return model(**{name: torch.tensor(x) for name, x in inputs.items()}).logits.numpy()


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_equal_transformers_under_padding(pair, side):
    theirs, ours = pair
    width = max(LENGTHS) + 1
    tokens, mask = np.zeros((2, width), np.int64), np.zeros((2, width), np.int64)
    for row, sequence in enumerate(sequences()):
        place = slice(0, len(sequence)) if side == "right" else slice(width - len(sequence), width)
        tokens[row, place], mask[row, place] = sequence, 1
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    got = ours(*(jnp.asarray(x, jnp.int32) for x in (tokens, positions, mask)))
    want = their_logits(theirs, tokens, mask)
    assert np.abs(want[mask == 1]).max() > 1
    assert np.abs(np.asarray(got) - want)[mask == 1].max() <= 1e-4


def test_logits_of_packed_sequences_equal_transformers_on_each_alone(pair):
    theirs, ours = pair
    first, second = sequences()
    tokens = np.concatenate([first, second, [0]])[None]
    positions = np.concatenate([np.arange(LENGTHS[0]), np.arange(LENGTHS[1]), [0]])[None]
    segments = np.repeat([1, 2, 0], [*LENGTHS, 1])[None]
    got = np.asarray(ours(*(jnp.asarray(x, jnp.int32) for x in (tokens, positions, segments))))[0]
    for sequence, part in ((first, got[: LENGTHS[0]]), (second, got[LENGTHS[0] : sum(LENGTHS)])):
        want = their_logits(theirs, sequence[None], np.ones((1, len(sequence)), np.int64))[0]
        assert np.abs(part - want).max() <= 1e-4


@pytest.mark.parametrize("name", slow_but(QUICK, CONFIGS))
def test_an_exported_folder_gives_the_same_logits_in_transformers(name, tmp_path):
    theirs = random_model(CONFIGS[name])
    theirs.save_pretrained(tmp_path / "in")
    policy = Policy(hf_weights.architecture(tmp_path / "in"), one_device())
    hf_weights.save(policy, hf_weights.load(policy, tmp_path / "in"), tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert again.dtype == torch.float32
    assert type(again) is type(theirs)
    tokens = sequences()[0][None]
    mask = np.ones_like(tokens)
    assert np.abs(their_logits(theirs, tokens, mask) - their_logits(again, tokens, mask)).max() == 0
    assert hf_weights.architecture(tmp_path / "out") == policy.architecture
