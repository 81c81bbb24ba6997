"""Hugging Face's format, in both directions: config.json and an Architecture, a checkpoint's tensors and the leaves of Params.

A linear map in Params has its input axes first and its heads as an axis, [*in, *out]; the checkpoint's is a matrix [out, in]
with flattened heads. Stacked leaves [L, ...] become one tensor a layer. Adapters {"a", "b"} in the place of a leaf get
PEFT's names without their prefix: two linear maps, [*in, rank] and [rank, *out].
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxrl_llm.models.architecture import Architecture, Llama3RopeScaling
from jaxrl_llm.models.llama3 import Llama3
from jaxrl_llm.models.mistral import Mistral
from jaxrl_llm.models.qwen2 import Qwen2
from jaxrl_llm.models.qwen3 import Qwen3

# Path of a leaf -> (name in the checkpoint, number of leading input axes of a linear map, or None where both layouts agree).
TENSORS: dict[str, tuple[str, int | None]] = {
    "embedding": ("model.embed_tokens.weight", None),
    "layers/attention_norm/scale": ("model.layers.{layer}.input_layernorm.weight", None),
    "layers/attention/query/kernel": ("model.layers.{layer}.self_attn.q_proj.weight", 1),
    "layers/attention/query/bias": ("model.layers.{layer}.self_attn.q_proj.bias", 0),
    "layers/attention/key/kernel": ("model.layers.{layer}.self_attn.k_proj.weight", 1),
    "layers/attention/key/bias": ("model.layers.{layer}.self_attn.k_proj.bias", 0),
    "layers/attention/value/kernel": ("model.layers.{layer}.self_attn.v_proj.weight", 1),
    "layers/attention/value/bias": ("model.layers.{layer}.self_attn.v_proj.bias", 0),
    "layers/attention/query_norm/scale": ("model.layers.{layer}.self_attn.q_norm.weight", None),
    "layers/attention/key_norm/scale": ("model.layers.{layer}.self_attn.k_norm.weight", None),
    "layers/attention/output": ("model.layers.{layer}.self_attn.o_proj.weight", 2),
    "layers/mlp_norm/scale": ("model.layers.{layer}.post_attention_layernorm.weight", None),
    "layers/mlp/gate": ("model.layers.{layer}.mlp.gate_proj.weight", 1),
    "layers/mlp/up": ("model.layers.{layer}.mlp.up_proj.weight", 1),
    "layers/mlp/down": ("model.layers.{layer}.mlp.down_proj.weight", 1),
    "norm/scale": ("model.norm.weight", None),
    "head": ("lm_head.weight", None),
    "value/kernel": ("score.weight", 1),
}

ADAPTERS = {"a": "lora_A", "b": "lora_B"}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A checkpoint tensor and the place of its values in Params.

    Attributes:
      name: its name in the checkpoint.
      path: keys that lead to the leaf.
      layer: index along the leaf's stacked axis, or None where the leaf is not stacked.
      shape: shape of the leaf, without the stacked axis.
      inputs: number of leading input axes of a linear map, or None where both layouts agree.
    """

    name: str
    path: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]
    inputs: int | None

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Its shape in the checkpoint."""
        if self.inputs is None:
            return self.shape
        out, inner = math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs])
        return (out, inner) if self.inputs else (out,)

    def to_hf(self, leaf: Any) -> Any:
        """One layer's values (NumPy or JAX, [*in, *out]) in the checkpoint's layout."""
        return leaf if self.inputs is None else leaf.reshape(self.hf_shape[::-1]).T

    def hf_slices(self, slices: tuple[slice, ...]) -> tuple[slice, ...]:
        """The part of the checkpoint tensor that holds `slices` (with start and stop) of one layer's values.

        Raises:
          ValueError: an axis other than the first of a flattened group is split, so that the part is no rectangle there.
        """
        if self.inputs is None:
            return slices
        out, inner = _flat(slices[self.inputs :], self.shape[self.inputs :]), slices[: self.inputs]
        return (out, _flat(inner, self.shape[: self.inputs])) if self.inputs else (out,)

    def from_hf(self, part: Any, shape: tuple[int, ...]) -> Any:
        """Converts a part that was read at `hf_slices` to the layout of Params; `shape` is the part's shape there."""
        return part if self.inputs is None else part.T.reshape(shape)


def tensors(tree: Mapping[str, Any]) -> list[Tensor]:
    """Lists every checkpoint tensor of Params, or of a tree of shapes like it, in a fixed order: layer by layer.

    Raises:
      ValueError: a leaf has no counterpart in the checkpoint format.
    """
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = tuple(key.key for key in path)
        adapter = ADAPTERS.get(keys[-1]) if "/".join(keys[:-1]) in TENSORS else None
        known = "/".join(keys[:-1] if adapter else keys)
        if known not in TENSORS:
            raise ValueError(f"parameter {known} has no counterpart in a Hugging Face checkpoint")
        name, inputs = TENSORS[known]
        if adapter:
            name, inputs = name.replace(".weight", f".{adapter}.weight"), inputs if keys[-1] == "a" else 1
        stacked = keys[0] == "layers"
        shape = tuple(leaf.shape[1:] if stacked else leaf.shape)
        for layer in range(leaf.shape[0]) if stacked else (None,):
            full = name.format(layer=layer)
            found.append(Tensor(name=full, path=keys, layer=layer, shape=shape, inputs=inputs))
    return sorted(found, key=lambda t: (t.layer is not None, t.layer or 0))


def leaf_of(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """The leaf at `path`."""
    for key in path:
        tree = tree[key]
    return tree


def export(params: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns all parameters under their checkpoint names and in its layout; pure, for use under jit."""
    leaves = {t.name: (t, leaf_of(params, t.path)) for t in tensors(params)}
    return {name: t.to_hf(leaf if t.layer is None else leaf[t.layer]) for name, (t, leaf) in leaves.items()}


def _flat(slices: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
    if not shape:  # the map has one output
        return slice(0, 1)
    inner = math.prod(shape[1:])
    if any(s.start != 0 or s.stop != n for s, n in zip(slices[1:], shape[1:])):
        raise ValueError(
            f"only the first of the axes {shape} may be split over devices: leave head_width whole in RULES"
        )
    return slice(slices[0].start * inner, slices[0].stop * inner)


# (the class in `architectures`, `model_type`) -> family. A family is written as the first row that fits it.
FAMILIES: dict[tuple[str, str], type[Architecture]] = {
    ("Qwen2ForCausalLM", "qwen2"): Qwen2,
    ("Qwen3ForCausalLM", "qwen3"): Qwen3,
    ("LlamaForCausalLM", "llama"): Llama3,
    ("MistralForCausalLM", "mistral"): Mistral,
    ("MinistralForCausalLM", "ministral"): Mistral,
}
# The suffix of an architecture's class: for a language model and for a value model.
LANGUAGE, VALUE = "ForCausalLM", "ForSequenceClassification"
# Settings that change the mathematics, and the one value of each that the layers implement.
ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a sequence classifier, which corresponds to a value model."""
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
    family = _family(config, source)
    for key, value in ONLY.items():
        if config.get(key, value) != value:
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
        "head_width": config.get("head_dim") or (128 if family is Qwen3 else width // heads),
        "mlp_width": config["intermediate_size"],
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "max_positions": config.get("max_position_embeddings", Architecture.max_positions),
        "init_std": config.get("initializer_range", Architecture.init_std),
    }
    if family is not Llama3:
        sizes |= _windows(config, family, source)
    return family(**sizes)


def write(architecture: Architecture, *, value: bool = False) -> dict[str, Any]:
    """Returns the config.json of a language or value model, in the keys that every transformers release since 4.56 reads."""
    windows, mixed = architecture.windows, len(set(architecture.windows)) > 1
    window = architecture.window if any(windows) else None
    rows = [row for row, family in FAMILIES.items() if isinstance(architecture, family)]
    name, model_type = rows[-1] if mixed else rows[0]
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
    period = next(p for p in range(1, layers + 1) if all(s == sliding[i % p] for i, s in enumerate(sliding)))
    return {"window": window, "sliding": sliding[:period]}
