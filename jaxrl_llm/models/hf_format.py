"""Hugging Face's format, in both directions: config.json and an Architecture, a checkpoint's tensors and the leaves of Params.

A linear map in Params has its input axes first and its heads as an axis, [*in, *out]; the checkpoint's is a matrix [out, in]
with flattened heads. Stacked leaves [L, ...] become one tensor a layer. Adapters {"a", "b"} in the place of a leaf get
PEFT's names without their prefix: two linear maps, [*in, rank] and [rank, *out].

The leaves of experts [L, E, ...] become one tensor an expert, and those of gate and up, which are one leaf, two. A checkpoint may also hold
them fused, one tensor [E, out, in] a layer, as transformers' modules do.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxrl_llm.models.architecture import LAYERS, Architecture, Experts, Llama3RopeScaling, stack_of
from jaxrl_llm.models.llama3 import Llama3
from jaxrl_llm.models.mistral import Mistral
from jaxrl_llm.models.qwen2 import Qwen2
from jaxrl_llm.models.qwen3 import Qwen3
from jaxrl_llm.models.qwen3_moe import Qwen3MoE

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
    "layers/mlp/router": ("model.layers.{layer}.mlp.gate.weight", 1),
    "norm/scale": ("model.norm.weight", None),
    "head": ("lm_head.weight", None),
    "value/kernel": ("score.weight", 1),
}

# Path of a leaf of experts -> (names of an expert's tensors, in the order of the leaf's axis of such parts where there are several; the
# name of the tensor that holds them fused). All are linear maps with one input axis.
EXPERT_TENSORS: dict[str, tuple[tuple[str, ...], str]] = {
    "layers/mlp/gate_up": (
        ("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight", "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"),
        "model.layers.{layer}.mlp.experts.gate_up_proj",
    ),
    "layers/mlp/down": (("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",), "model.layers.{layer}.mlp.experts.down_proj"),
}  # fmt: skip

ADAPTERS = {"a": "lora_A", "b": "lora_B"}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A checkpoint tensor and the place of its values in Params.

    Attributes:
      name: its name in the checkpoint.
      path: keys that lead to the leaf.
      layer: index along the leaf's stacked axis, or None where the leaf is not stacked.
      number: the number of the layer in the model; `layer` again where all layers are one stack.
      expert: number of the expert, or None.
      part: index along the leaf's axis of parts, or None where it has no such axis.
      fused: the name of the checkpoint's tensor of all experts that may stand in its place, or None.
      shape: shape of the values.
      inputs: number of leading input axes of a linear map, or None where both layouts agree.
    """

    name: str
    path: tuple[str, ...]
    layer: int | None
    number: int | None = None
    expert: int | None = None
    part: int | None = None
    fused: str | None = None
    shape: tuple[int, ...]
    inputs: int | None

    @property
    def index(self) -> tuple[int | None, ...]:
        """Where its values are in the leaf: an index for each axis that it has one place of, and None for an axis of its own."""
        if self.expert is None:
            return (*(() if self.layer is None else (self.layer,)), *(None,) * len(self.shape))
        return (self.layer, self.expert, None, *(() if self.part is None else (self.part,)), None)

    def of(self, leaf: Any) -> Any:
        """Its values in the leaf, in the layout of Params."""
        return leaf[tuple(slice(None) if i is None else i for i in self.index)]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Its shape in the checkpoint."""
        if self.inputs is None:
            return self.shape
        out, inner = math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs])
        return (out, inner) if self.inputs else (out,)

    def to_hf(self, leaf: Any) -> Any:
        """Its values (NumPy or JAX, [*in, *out]) in the checkpoint's layout."""
        return leaf if self.inputs is None else leaf.reshape(self.hf_shape[::-1]).T

    def hf_slices(self, slices: tuple[slice, ...]) -> tuple[slice, ...]:
        """The part of the checkpoint tensor that holds `slices` (with start and stop) of its values.

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
    stacks = sum(stack_of(part) is not None for part in tree)
    found: list[Tensor] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = tuple(key.key for key in path)
        stack = stack_of(keys[0])
        plain = "/".join(keys if stack is None else (LAYERS, *keys[1:]))
        numbers = [(None, None)] if stack is None else [(i, i * stacks + stack) for i in range(leaf.shape[0])]
        of_experts = (
            plain in EXPERT_TENSORS and len(leaf.shape) > 3
        )  # [L, E, ...]; the matrix of a dense layer is [L, in, out]
        make = _of_experts if of_experts else _of_leaf
        found += [tensor for layer, number in numbers for tensor in make(plain, keys, leaf.shape, layer, number)]
    return sorted(found, key=lambda t: (t.number is not None, t.number or 0))


def _of_leaf(
    plain: str, keys: tuple[str, ...], shape: tuple[int, ...], layer: int | None, number: int | None
) -> list[Tensor]:
    """The tensor of a leaf, or of one layer of it."""
    parent = plain.rpartition("/")[0]
    adapter = ADAPTERS.get(keys[-1]) if parent in TENSORS else None
    known = parent if adapter else plain
    if known not in TENSORS:
        raise ValueError(f"parameter {known} has no counterpart in a Hugging Face checkpoint")
    name, inputs = TENSORS[known]
    if adapter:
        name, inputs = name.replace(".weight", f".{adapter}.weight"), inputs if keys[-1] == "a" else 1
    own = tuple(shape if layer is None else shape[1:])
    return [Tensor(name=name.format(layer=number), path=keys, layer=layer, number=number, shape=own, inputs=inputs)]


def _of_experts(
    plain: str, keys: tuple[str, ...], shape: tuple[int, ...], layer: int | None, number: int | None
) -> list[Tensor]:
    """The tensors of one layer of a leaf of experts, [L, E, in, out] or [L, E, in, parts, out]."""
    names, fused = EXPERT_TENSORS[plain]
    return [
        Tensor(
            name=name.format(layer=number, expert=expert), path=keys, layer=layer, number=number, expert=expert,
            part=part if len(names) > 1 else None, fused=fused.format(layer=number), shape=(shape[2], shape[-1]), inputs=1,
        )
        for expert in range(shape[1])
        for part, name in enumerate(names)
    ]  # fmt: skip


def leaf_of(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """The leaf at `path`."""
    for key in path:
        tree = tree[key]
    return tree


def export(params: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns all parameters under their checkpoint names and in its layout; pure, for use under jit."""
    return {t.name: t.to_hf(t.of(leaf_of(params, t.path))) for t in tensors(params)}


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
    ("Qwen3MoeForCausalLM", "qwen3_moe"): Qwen3MoE,
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
    if family is Qwen3MoE:
        if config.get("use_sliding_window", False):
            raise ValueError(f"{source}: use_sliding_window=True is not supported with experts, only False is")
        sizes["experts"] = _experts(config, source)
    elif family is not Llama3:
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
    if architecture.experts is not None:
        return config | _written_experts(architecture, architecture.experts)
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


def _experts(config: Mapping[str, Any], source: str) -> Experts:
    """The experts that a config describes, under the names of hub files or of transformers 5, which writes `num_local_experts`."""
    names = {"count": "num_experts", "chosen": "num_experts_per_tok", "width": "moe_intermediate_size"}
    values: dict[str, Any] = {field: config.get(name) for field, name in names.items()}
    values["count"] = config.get("num_local_experts") if values["count"] is None else values["count"]
    if missing := [names[field] for field, value in values.items() if value is None]:
        raise ValueError(f"{source} lacks {', '.join(missing)}: is it the config.json of a model with experts?")
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    layers = config["num_hidden_layers"]
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    return Experts(**values, normalised=bool(config.get("norm_topk_prob", False)), layers=_period(sparse))


def _written_experts(architecture: Architecture, experts: Experts) -> dict[str, Any]:
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.width,
        "norm_topk_prob": experts.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, sparse in enumerate(architecture.sparse) if not sparse],
        "use_sliding_window": False,
    }


def _period(pattern: tuple[bool, ...]) -> tuple[bool, ...]:
    """The shortest pattern that repeats to the given one."""
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
