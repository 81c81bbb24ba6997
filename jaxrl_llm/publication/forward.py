"""Settings of a config.json that shape the forward pass, in which a server must equal the learner exactly (nothing is imported).

Equal tensors give different results under another rotary base, another epsilon, other heads of the same total width, or a window.
Checksums of tensors detect none of it, and the canary only what is larger than rounding: a rotary base of 10,000 in place of 15,000
hides there. Settings that a config.json may express in several ways (a size that follows from others, rotary settings beside each other
or in a dict) are normalised to one.
"""

from collections.abc import Mapping
from typing import Any

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_PLAIN = ("hidden_act", "rms_norm_eps")
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# Model types with the same forward pass, apart from windows, which are compared separately.
_ALIKE = {"mistral": "llama", "ministral": "llama"}


def forward_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a config.json that shape the forward pass, by name; None for a missing one.

    Args:
      config: the parsed file, or transformers' `PretrainedConfig.to_dict()`.
    """
    heads, kind = config.get("num_attention_heads"), str(config.get("model_type"))
    found = {"model_type": _ALIKE.get(kind, kind)} | {name: config.get(name) for name in (*_SIZES, *_PLAIN)}
    found["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    found["head_dim"] = config.get("head_dim") or (config.get("hidden_size", 0) // heads if heads else None)
    found["tie_word_embeddings"] = bool(config.get("tie_word_embeddings", False))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found["rope_theta"] = rope.get("rope_theta", config.get("rope_theta"))
    found["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    found["partial_rotary_factor"] = 1.0 if partial is None else partial
    if found["rope_type"] != "default":
        found |= {name: rope.get(name) for name in _SCALING}
    return found | _windows(config) | _experts(config)


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how tokens are routed to experts, and the layers without experts; {} for a model without experts."""
    count = config.get("num_experts") or config.get("num_local_experts")
    if not count:
        return {}
    found = {name: config.get(name) for name in ("num_experts_per_tok", "moe_intermediate_size")}
    step, plain = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    layers = range(config.get("num_hidden_layers") or 0)
    dense = [layer for layer in layers if layer in plain or (layer + 1) % step]
    return found | {"num_experts": count, "norm_topk_prob": bool(config.get("norm_topk_prob")), "dense_layers": dense}


def _windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the window of local attention, and the layers that have it."""
    window, layers = config.get("sliding_window"), config.get("num_hidden_layers") or 0
    if not config.get("use_sliding_window", True):
        window = None
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 0) if "use_sliding_window" in config else 0
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    local = [layer for layer, kind in enumerate(kinds) if window is not None and kind == "sliding_attention"]
    return {"sliding_window": window if local else None, "sliding_layers": local}


def differences(published: Mapping[str, Any], held: Mapping[str, Any]) -> str:
    """Returns the settings in which a server differs from the published ones, with both values of each; empty where they are equal."""
    return ", ".join(
        f"{name} is {held.get(name)!r} here and {published.get(name)!r} there"
        for name in sorted(published.keys() | held.keys())
        if published.get(name) != held.get(name)
    )
