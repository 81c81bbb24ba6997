"""Refuses a number of GPUs over which vLLM cannot split a model, or chooses one, with any Python.

    tensor_sizes.py MODEL SIZE             exit code 1 and the sizes that are allowed, where SIZE is none
    tensor_sizes.py MODEL auto GPUS GB     prints the fewest GPUs of a host's GPUS, of GB gigabytes each, that hold the model

vLLM gives each GPU as many attention heads, rows of an MLP and tokens of the vocabulary (padded to a multiple of 64) as every other,
and either shares the KV heads out or copies each to as many GPUs as every other. What is chosen divides the host's GPUs, so that none is idle, and leaves half of their
memory to keys and values.
"""

import json
import sys
from pathlib import Path
from typing import Any

PADDING = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE
SHARE = 0.5  # of a GPU's memory that weights may take
BYTES = 2  # of a weight in 16 bits


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


def weights(config: dict[str, Any]) -> int:
    """The number of a model's weights, without norms and biases."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or width // heads
    attention = 2 * width * head * (heads + (config.get("num_key_value_heads") or heads))
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    inner = (
        experts * (config.get("moe_intermediate_size") or config["intermediate_size"]) or config["intermediate_size"]
    )
    tables = config["vocab_size"] * width * (1 if config.get("tie_word_embeddings") else 2)
    return tables + config["num_hidden_layers"] * (attention + 3 * width * inner)


def chosen(model: str, gpus: int, gigabytes: float) -> int:
    """The fewest GPUs that hold a model, of so many of a host; ValueError says why there are none."""
    try:
        config = config_of(model)
        allowed = [size for size in sizes(config) if gpus % size == 0]
        need = weights(config) * BYTES / 1e9
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"TENSOR_PARALLEL cannot be chosen by {model}'s config.json: {error!r}") from error
    fitting = [size for size in allowed if need / size <= SHARE * gigabytes]
    if not fitting:
        raise ValueError(
            f"{model} has {need:.0f} GB of weights, and half of the memory of {allowed[-1]} GPUs of {gigabytes:g} GB is {SHARE * gigabytes * allowed[-1]:.0f} GB: "
            f"its heads can be split over {', '.join(map(str, allowed))} of the {gpus} GPUs of a host; set TENSOR_PARALLEL yourself, or GPU_GB to what "
            "a GPU has"
        )
    return fitting[0]


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
    if sys.argv[2] == "auto":
        try:
            print(chosen(sys.argv[1], int(sys.argv[3]), float(sys.argv[4])))
        except ValueError as problem:
            sys.exit(f"error: {problem}")
    elif problem := main(sys.argv[1], int(sys.argv[2])):
        sys.exit(f"error: {problem}")
