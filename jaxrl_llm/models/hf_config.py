"""Converts Hugging Face's config.json to an Architecture, and back."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.architecture import Architecture, Experts, GatedDelta, Llama3RopeScaling
from jaxrl_llm.models.llama3 import Llama3
from jaxrl_llm.models.mistral import Mistral
from jaxrl_llm.models.qwen2 import Qwen2
from jaxrl_llm.models.qwen3 import Qwen3
from jaxrl_llm.models.qwen3_5 import Hybrid, Qwen3_5, Qwen3_5MoE
from jaxrl_llm.models.qwen3_moe import Qwen3MoE
from jaxrl_llm.models.qwen3_next import Qwen3Next

# (the class in `architectures`, `model_type`) -> family. A family is written as the first row that fits it.
FAMILIES: dict[tuple[str, str], type[Architecture]] = {
    ("Qwen2ForCausalLM", "qwen2"): Qwen2,
    ("Qwen3ForCausalLM", "qwen3"): Qwen3,
    ("Qwen3MoeForCausalLM", "qwen3_moe"): Qwen3MoE,
    ("Qwen3_5ForCausalLM", "qwen3_5_text"): Qwen3_5,
    ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"): Qwen3_5MoE,
    ("Qwen3NextForCausalLM", "qwen3_next"): Qwen3Next,
    ("LlamaForCausalLM", "llama"): Llama3,
    ("MistralForCausalLM", "mistral"): Mistral,
    ("MinistralForCausalLM", "ministral"): Mistral,
}
# The class of a vision-language model -> that of its text model, whose settings are under `text_config`.
NESTED: dict[str, str] = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
# Prefixes of the class and of `model_type` where experts are chosen with a bias: other programs, which have no place for it in these
# families, refuse such a folder instead of silently choosing other experts.
BIASED_CLASS, BIASED_TYPE = "ChoiceBias", "choice_bias_"
# The suffix of an architecture's class: for a language model and for a value model.
LANGUAGE, VALUE = "ForCausalLM", "ForSequenceClassification"
# The width of a head where the file does not give it; in other families that of the stream over the number of heads.
HEAD_WIDTHS: dict[type[Architecture], int] = {Qwen3: 128, Qwen3_5: 256, Qwen3_5MoE: 256, Qwen3Next: 256}
# Settings that change the mathematics, and the one value of each that the layers implement.
ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of the text model in those of a vision-language model; others are returned as they are."""
    names = [NESTED.get(str(name)) for name in config.get("architectures") or ()]
    if not names or names[0] is None:
        return config
    shared = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**shared, **config.get("text_config", {}), "architectures": names}


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json describes a sequence classifier, which corresponds to a value model."""
    return any(str(name).endswith(VALUE) for name in config.get("architectures") or ())


def read(config: Mapping[str, Any], source: str = "config.json", *, value: bool = False) -> Architecture:
    """Returns the architecture that a config.json describes.

    Args:
      config: the parsed file.
      source: its path, for error messages.
      value: whether a sequence classifier is accepted as well as a language model.

    Raises:
      ValueError: an architecture or setting is unsupported, or a size is missing; the message names it.
    """
    if value:
        config = {**config, "architectures": [n.replace(VALUE, LANGUAGE) for n in config.get("architectures") or ()]}
    config = text_of(config)
    if config.get("choice_bias", False):
        names = [str(name).removeprefix(BIASED_CLASS) for name in config.get("architectures") or ()]
        config = {**config, "architectures": names}
    family = _family(config, source)
    hybrid = issubclass(family, Hybrid)
    if family is Qwen3_5MoE:  # none of whose layers is dense
        config = {"intermediate_size": config.get("shared_expert_intermediate_size"), **config}
    for key, value in ONLY.items():
        if config.get(key, value) != value and not (hybrid and key == "partial_rotary_factor"):
            raise ValueError(f"{source}: {key}={config[key]!r} is not supported, only {value!r} is")
    missing = [key for key in ("hidden_size", "num_hidden_layers", "num_attention_heads") if key not in config]
    missing += [key for key in ("vocab_size", "intermediate_size") if key not in config]
    if missing:
        raise ValueError(f"{source} lacks {', '.join(missing)}: is it the config.json of a language model?")
    heads, width, layers = config["num_attention_heads"], config["hidden_size"], config["num_hidden_layers"]
    theta, scaling = _rope(config, source)
    sizes: dict[str, Any] = {
        "vocabulary_size": config["vocab_size"],
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_width": config.get("head_dim") or HEAD_WIDTHS.get(family, width // heads),
        "mlp_width": config["intermediate_size"],
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "max_positions": config.get("max_position_embeddings", Architecture.max_positions),
        "init_std": config.get("initializer_range", Architecture.init_std),
    }
    if family is Qwen3MoE:
        if config.get("use_sliding_window", False):
            raise ValueError(f"{source}: use_sliding_window=True is not supported with experts, only False is")
        sizes["experts"] = _experts(config, source)
    elif hybrid:
        if sizes.pop("rope_scaling") is not None:
            raise ValueError(f"{source}: rotary scaling is not supported with linear attention")
        sizes |= _hybrid(config, source)
        if family is not Qwen3_5:
            sizes["experts"] = _experts(config, source, shared=True)
    elif family is not Llama3:
        sizes |= _windows(config, family, source)
    return family(**sizes)


def write(architecture: Architecture, *, value: bool = False) -> dict[str, Any]:
    """Returns the config.json of a language or value model, in the keys that every transformers release since 4.56 reads."""
    windows, mixed = architecture.windows, len(set(architecture.windows)) > 1
    window = architecture.window if any(windows) else None
    rows = [row for row, family in FAMILIES.items() if isinstance(architecture, family)]
    name, model_type = rows[-1] if mixed else rows[0]
    if architecture.experts is not None and architecture.experts.choice_bias:
        name, model_type = BIASED_CLASS + name, BIASED_TYPE + model_type
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if value else {}
    config: dict[str, Any] = {
        **labels,
        "architectures": [name.replace(LANGUAGE, VALUE) if value else name],
        "model_type": model_type,
        "vocab_size": architecture.vocabulary_size,
        "hidden_size": architecture.width,
        "num_hidden_layers": architecture.layers,
        "num_attention_heads": architecture.heads,
        "num_key_value_heads": architecture.kv_heads,
        "head_dim": architecture.head_width,
        "intermediate_size": architecture.mlp_width,
        "hidden_act": "silu",
        "rope_theta": architecture.rope_theta,
        "rope_scaling": _written_scaling(architecture.rope_scaling),
        "rms_norm_eps": architecture.norm_epsilon,
        "tie_word_embeddings": architecture.tied and not value,
        "max_position_embeddings": architecture.max_positions,
        "initializer_range": architecture.init_std,
    }
    if isinstance(architecture, Llama3):
        return config
    if architecture.delta is not None:
        config |= _written_hybrid(architecture, architecture.delta)
    if architecture.experts is not None:
        config |= _written_experts(architecture, architecture.experts)
    if architecture.delta is not None or architecture.experts is not None:
        return config
    config["sliding_window"] = window
    if isinstance(architecture, Qwen2 | Qwen3):
        config |= {"use_sliding_window": window is not None, "max_window_layers": architecture.layers}
    if model_type != "mistral":
        config["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in windows]
    return config


def _family(config: Mapping[str, Any], source: str) -> type[Architecture]:
    names, model_type = list(config.get("architectures") or ()), config.get("model_type")
    for (name, kind), family in FAMILIES.items():
        if names == [name] or (not names and model_type == kind):
            return family
    got = ", ".join(names) or model_type or "none"
    raise ValueError(f"{source}: architecture {got} is not supported: use one of {', '.join(n for n, _ in FAMILIES)}")


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, Llama3RopeScaling | None]:
    # transformers 5 writes both into `rope_parameters`; older files have `rope_theta` beside `rope_scaling`.
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(settings.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default" and not any(isinstance(value, Mapping) for value in settings.values()):
        return theta, None
    if kind != "llama3":
        raise ValueError(f"{source}: rotary scaling {dict(settings)} is not supported: only 'default' and 'llama3' are")
    return theta, Llama3RopeScaling(
        factor=float(settings["factor"]),
        low_frequency_factor=float(settings["low_freq_factor"]),
        high_frequency_factor=float(settings["high_freq_factor"]),
        original_max_positions=settings["original_max_position_embeddings"],
    )


def _written_scaling(scaling: Llama3RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }


def _experts(config: Mapping[str, Any], source: str, *, shared: bool = False) -> Experts:
    """Returns the experts that a config describes, under the names of hub files or of transformers 5, which writes `num_local_experts`.

    Families with a `shared` expert divide the weights by their sum unless the file says otherwise; the others do not.
    """
    names = {"count": "num_experts", "chosen": "num_experts_per_tok", "width": "moe_intermediate_size"}
    names |= {"shared": "shared_expert_intermediate_size"} if shared else {}
    values: dict[str, Any] = {field: config.get(name) for field, name in names.items()}
    values["count"] = config.get("num_local_experts") if values["count"] is None else values["count"]
    if missing := [names[field] for field, value in values.items() if value is None]:
        raise ValueError(f"{source} lacks {', '.join(missing)}: is it the config.json of a model with experts?")
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    layers = config["num_hidden_layers"]
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    switches = {"normalised": config.get("norm_topk_prob", shared), "choice_bias": config.get("choice_bias", False)}
    return Experts(**values, **{name: bool(value) for name, value in switches.items()}, layers=_period(sparse))


def _written_experts(architecture: Architecture, experts: Experts) -> dict[str, Any]:
    own = (
        {"use_sliding_window": False} if experts.shared is None else {"shared_expert_intermediate_size": experts.shared}
    )
    return {
        **own,
        **({"choice_bias": True} if experts.choice_bias else {}),
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.width,
        "norm_topk_prob": experts.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, sparse in enumerate(architecture.sparse) if not sparse],
    }


def _hybrid(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Returns the sizes of layers with a recurrent state in a config, and the rotated share of the attention among them."""
    names = {
        "key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads",
        "key_width": "linear_key_head_dim", "value_width": "linear_value_head_dim", "taps": "linear_conv_kernel_dim",
    }  # fmt: skip
    if missing := [name for name in names.values() if config.get(name) is None]:
        raise ValueError(
            f"{source} lacks {', '.join(missing)}: is it the config.json of a model with linear attention?"
        )
    if not config.get("attn_output_gate", True):
        raise ValueError(f"{source}: attn_output_gate=False is not supported, only True is")
    layers, every = config["num_hidden_layers"], config.get("full_attention_interval", 4)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    unknown = sorted(set(kinds) - {"linear_attention", "full_attention"})
    if unknown or len(kinds) != layers:
        raise ValueError(
            f"{source}: layer_types must be linear_attention or full_attention for each of {layers} layers "
            f"(got {len(kinds)}{', with ' + ', '.join(unknown) if unknown else ''})"
        )
    settings = config.get("rope_parameters") or {}
    share = settings.get("partial_rotary_factor", config.get("partial_rotary_factor", Qwen3_5.rotary_share))
    recurrent = _period(tuple(kind == "linear_attention" for kind in kinds))
    if not any(recurrent):
        raise ValueError(
            f"{source}: layer_types has full_attention alone; a model of this family has linear_attention too"
        )
    return {
        "delta": GatedDelta(**{field: config[name] for field, name in names.items()}, layers=recurrent),
        "rotary_share": float(share),
    }


def _written_hybrid(architecture: Architecture, delta: GatedDelta) -> dict[str, Any]:
    share = architecture.rotary_share
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": architecture.rope_theta,
            "partial_rotary_factor": share,
        },
        "partial_rotary_factor": share,
        "attn_output_gate": True,
        "layer_types": ["linear_attention" if held else "full_attention" for held in architecture.recurrent],
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_width,
        "linear_value_head_dim": delta.value_width,
        "linear_conv_kernel_dim": delta.taps,
    }


def _period(pattern: tuple[bool, ...]) -> tuple[bool, ...]:
    """Returns the shortest pattern that repeats to the given one."""
    lengths = range(1, len(pattern) + 1)
    return pattern[: next(p for p in lengths if all(x == pattern[i % p] for i, x in enumerate(pattern)))]


def _windows(config: Mapping[str, Any], family: type[Architecture], source: str) -> dict[str, Any]:
    layers, window, kinds = config["num_hidden_layers"], config.get("sliding_window"), config.get("layer_types")
    qwen = family in (Qwen2, Qwen3)
    if window is None or (qwen and not config.get("use_sliding_window", False)):
        return {"window": None}
    if kinds is None:
        first = config.get("max_window_layers", 28) if qwen else 0
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown or len(kinds) != layers:
        raise ValueError(
            f"{source}: layer_types must be sliding_attention or full_attention for each of {layers} layers "
            f"(got {len(kinds)}{', with ' + ', '.join(unknown) if unknown else ''})"
        )
    sliding = tuple(kind == "sliding_attention" for kind in kinds)
    if not any(sliding):
        return {"window": None}
    return {"window": window, "sliding": _period(sliding)}
