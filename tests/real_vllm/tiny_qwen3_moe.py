"""A tiny random Qwen3-MoE: its configuration, weights of any version, the same as a learner publishes them, and log-probs by transformers."""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tiny_qwen2 import Sizes, write_model

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD, DENSE = 512, 64, 3, 4, 2, 32, 96
EXPERTS, CHOSEN, INNER = 8, 2, 64  # of gate and up together, each rank of vLLM's CPU kernel takes a multiple of 64
PLAIN = 1  # the layer with a dense MLP
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": VOCABULARY, "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
    "intermediate_size": DENSE, "moe_intermediate_size": INNER, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
    "norm_topk_prob": True, "mlp_only_layers": [PLAIN], "decoder_sparse_step": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False, "use_sliding_window": False,
    "torch_dtype": "float32", "eos_token_id": 2, "bos_token_id": 0,
}  # fmt: skip


def write_served(folder: Path) -> Path:
    """The configuration and a tokenizer, no weights."""
    write_model(folder, tied=False, sizes=Sizes(vocabulary=VOCABULARY))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    """Hugging Face's names and layout, a tensor for each matrix of an expert."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        layer, mlp = f"model.layers.{i}.", f"model.layers.{i}.mlp."
        for name, rows in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            found[f"{layer}self_attn.{name}_proj.weight"] = (rows, WIDTH)
        found |= {f"{layer}self_attn.{name}_norm.weight": (HEAD,) for name in "qk"}
        found |= {f"{layer}self_attn.o_proj.weight": (WIDTH, HEADS * HEAD)}
        found |= {f"{layer}{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
        stems = [mlp] if i == PLAIN else [f"{mlp}experts.{e}." for e in range(EXPERTS)]
        inner = DENSE if i == PLAIN else INNER
        for stem in stems:
            found |= {f"{stem}{name}_proj.weight": (inner, WIDTH) for name in ("gate", "up")}
            found[f"{stem}down_proj.weight"] = (WIDTH, inner)
        if i != PLAIN:
            found[f"{mlp}gate.weight"] = (EXPERTS, WIDTH)
    return found | {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}


def checkpoint(version: int) -> dict[str, np.ndarray]:
    """A version's weights in float32 as a checkpoint has them; versions have nothing in common."""
    return {name: _random(version, name, shape) for name, shape in _shapes().items()}


def _random(version: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = np.random.default_rng([version, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.1) * noise
    return noise * np.float32(1.5 / np.sqrt(shape[-1]))


def as_published(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The experts of a layer as two tensors, [E, 2, M, D] and [E, D, M], and the rest as it is."""
    found = {name: x for name, x in tensors.items() if ".experts." not in name}
    for i in range(LAYERS):
        stem = f"model.layers.{i}.mlp.experts"
        of = lambda e, part, stem=stem: tensors[f"{stem}.{e}.{part}_proj.weight"]  # noqa: E731
        if i != PLAIN:
            both = [np.stack([of(e, "gate"), of(e, "up")]) for e in range(EXPERTS)]
            found[f"{stem}.gate_up_proj"] = np.stack(both)
            found[f"{stem}.down_proj"] = np.stack([of(e, "down") for e in range(EXPERTS)])
    return found


@torch.no_grad()
def logprobs(version: int, tokens: Sequence[int], folder: Path) -> np.ndarray:
    """Log-prob of each token but the first by transformers, from a checkpoint that is written to `folder`."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(checkpoint(version), folder / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([list(tokens)])
    logs = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
    return logs.gather(1, ids[0, 1:, None])[:, 0].numpy()
