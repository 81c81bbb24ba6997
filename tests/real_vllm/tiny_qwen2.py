"""A tiny random Qwen2 in float32: files to serve it from, and weights of any version."""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, FFN = 16384, 128, 3, 4, 2, 256
CONTEXT = 512


def config(tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": FFN,
        "vocab_size": VOCABULARY,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "eos_token_id": 2,
        "bos_token_id": 0,
    }


def write_model(folder: Path, tied: bool) -> Path:
    """What a sampler needs: the configuration and a tokenizer, no weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(tied)))
    vocabulary = {f"<{i}>": i for i in range(VOCABULARY)}
    Tokenizer(WordLevel(vocabulary, unk_token="<1>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def weights(version: int, tied: bool = False) -> dict[str, np.ndarray]:
    """Hugging Face's names and layout; versions have nothing in common."""
    kv = WIDTH // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for name, rows in (("q", WIDTH), ("k", kv), ("v", kv)):
            shapes |= {
                f"{layer}self_attn.{name}_proj.weight": (rows, WIDTH),
                f"{layer}self_attn.{name}_proj.bias": (rows,),
            }
        shapes |= {
            f"{layer}self_attn.o_proj.weight": (WIDTH, WIDTH),
            f"{layer}mlp.gate_proj.weight": (FFN, WIDTH),
            f"{layer}mlp.up_proj.weight": (FFN, WIDTH),
            f"{layer}mlp.down_proj.weight": (WIDTH, FFN),
            f"{layer}input_layernorm.weight": (WIDTH,),
            f"{layer}post_attention_layernorm.weight": (WIDTH,),
        }
    shapes["model.norm.weight"] = (WIDTH,)
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
    return {name: _random(version, name, shape) for name, shape in shapes.items()}


def _random(version: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = np.random.default_rng([version, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.1) * noise
    return noise * np.float32(0.1 if name.endswith("bias") else 1.5 / np.sqrt(shape[-1]))
