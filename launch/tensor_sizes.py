"""Refuses a number of GPUs over which vLLM cannot split a model: tensor_sizes.py MODEL SIZE, with any Python.

vLLM gives each GPU as many attention heads, rows of an MLP and tokens of the vocabulary (padded to a multiple of 64) as every other,
and either shares the KV heads out or copies each to as many GPUs as every other.
"""

import json
import sys
from pathlib import Path
from typing import Any

PADDING = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE


def config_of(model: str) -> dict[str, Any]:
    """The config.json of a folder, or of a Hugging Face id where this Python has huggingface_hub; of its text model."""
    file = Path(model) / "config.json"
    if not file.is_file():
        from huggingface_hub import hf_hub_download  # vLLM's Python has it

        file = Path(hf_hub_download(model, "config.json"))
    config = json.loads(file.read_text())
    return {**config, **config.get("text_config", {})}


def sizes(config: dict[str, Any]) -> list[int]:
    """The numbers of GPUs that a model may be split over, in order."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    vocabulary = -(-config["vocab_size"] // PADDING) * PADDING
    return [
        size
        for size in range(1, heads + 1)
        if not any(whole % size for whole in (heads, config["intermediate_size"], vocabulary))
        and (kv_heads % size == 0 or size % kv_heads == 0)
    ]


def main(model: str, size: int) -> str:
    """Why the model cannot be split over `size` GPUs; "" where it can."""
    if size == 1:
        return ""
    try:
        config = config_of(model)
        allowed = sizes(config)
    except (OSError, ValueError, KeyError, ImportError) as error:
        return f"TENSOR_PARALLEL={size} cannot be checked against {model}'s config.json: {error!r}"
    if size in allowed:
        return ""
    heads = config["num_attention_heads"]
    return (
        f"TENSOR_PARALLEL={size} does not divide {model}, which has {heads} heads and {config.get('num_key_value_heads') or heads} KV heads, an MLP of "
        f"{config['intermediate_size']} and {config['vocab_size']} tokens: it may be {', '.join(map(str, allowed))}"
    )


if __name__ == "__main__":
    problem = main(sys.argv[1], int(sys.argv[2]))
    if problem:
        sys.exit(f"error: {problem}")
