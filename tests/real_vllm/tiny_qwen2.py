"""Random Qwen2 models of any size, a tiny one above all: files to serve them from, and weights of any version."""

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

CONTEXT = 512


class Sizes(NamedTuple):
    """Numbers of a Qwen2."""

    vocabulary: int = 16384
    width: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 256
    context: int = CONTEXT


TINY = Sizes()
VOCABULARY = TINY.vocabulary


def config(tied: bool, sizes: Sizes = TINY, dtype: str = "float32") -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "intermediate_size": sizes.ffn,
        "vocab_size": sizes.vocabulary,
        "hidden_act": "silu",
        "max_position_embeddings": sizes.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "eos_token_id": 2,
        "bos_token_id": 0,
    }


def write_model(folder: Path, tied: bool, sizes: Sizes = TINY, dtype: str = "float32") -> Path:
    """What a sampler needs: the configuration and a tokenizer, no weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(tied, sizes, dtype)))
    vocabulary = {f"<{i}>": i for i in range(sizes.vocabulary)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<1>"))
    tokenizer.add_special_tokens(["<7>"])  # alone found in a text, and all that a chat is
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<7>{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def shapes(tied: bool, sizes: Sizes = TINY) -> dict[str, tuple[int, ...]]:
    """Hugging Face's names and layout."""
    width, kv = sizes.width, sizes.width // sizes.heads * sizes.kv_heads
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes.vocabulary, width)}
    for i in range(sizes.layers):
        layer = f"model.layers.{i}."
        for name, rows in (("q", width), ("k", kv), ("v", kv)):
            found |= {
                f"{layer}self_attn.{name}_proj.weight": (rows, width),
                f"{layer}self_attn.{name}_proj.bias": (rows,),
            }
        found |= {
            f"{layer}self_attn.o_proj.weight": (width, width),
            f"{layer}mlp.gate_proj.weight": (sizes.ffn, width),
            f"{layer}mlp.up_proj.weight": (sizes.ffn, width),
            f"{layer}mlp.down_proj.weight": (width, sizes.ffn),
            f"{layer}input_layernorm.weight": (width,),
            f"{layer}post_attention_layernorm.weight": (width,),
        }
    found["model.norm.weight"] = (width,)
    return found if tied else found | {"lm_head.weight": (sizes.vocabulary, width)}


def weights(version: int, tied: bool = False) -> dict[str, np.ndarray]:
    """The tiny model's weights in float32; versions have nothing in common."""
    return {name: _random(version, name, shape) for name, shape in shapes(tied).items()}


def _random(version: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = np.random.default_rng([version, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.1) * noise
    return noise * np.float32(0.1 if name.endswith("bias") else 1.5 / np.sqrt(shape[-1]))
