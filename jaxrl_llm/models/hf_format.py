"""Maps the tensors of a Hugging Face checkpoint to the leaves of Params, and back; config.json is in hf_config.py.

A linear map in Params has its input axes first and its heads as an axis, [*in, *out]; the checkpoint's is a matrix [out, in]
with flattened heads. Stacked leaves [L, ...] become one tensor a layer. Adapters {"a", "b"} in the place of a leaf get
PEFT's names without their prefix: two linear maps, [*in, rank] and [rank, *out].

The leaves of experts [L, E, ...] become one tensor an expert, and those of gate and up, which are one leaf, two. A checkpoint may also hold
them fused, one tensor [E, out, in] a layer, as transformers' modules do.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxrl_llm.models.architecture import LAYERS, stack_of

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
    "layers/mlp/choice_bias": ("model.layers.{layer}.mlp.gate.e_score_correction_bias", None),
    "layers/mlp/share": ("model.layers.{layer}.mlp.shared_expert_gate.weight", 1),
    "layers/mlp/shared/gate": ("model.layers.{layer}.mlp.shared_expert.gate_proj.weight", 1),
    "layers/mlp/shared/up": ("model.layers.{layer}.mlp.shared_expert.up_proj.weight", 1),
    "layers/mlp/shared/down": ("model.layers.{layer}.mlp.shared_expert.down_proj.weight", 1),
    "layers/delta/inputs": ("model.layers.{layer}.linear_attn.in_proj_qkvz.weight", 1),
    "layers/delta/rates": ("model.layers.{layer}.linear_attn.in_proj_ba.weight", 1),
    "layers/delta/input": ("model.layers.{layer}.linear_attn.in_proj_qkv.weight", 1),
    "layers/delta/gate": ("model.layers.{layer}.linear_attn.in_proj_z.weight", 1),
    "layers/delta/strength": ("model.layers.{layer}.linear_attn.in_proj_b.weight", 1),
    "layers/delta/rate": ("model.layers.{layer}.linear_attn.in_proj_a.weight", 1),
    "layers/delta/taps": ("model.layers.{layer}.linear_attn.conv1d.weight", None),
    "layers/delta/log_decay": ("model.layers.{layer}.linear_attn.A_log", None),
    "layers/delta/rate_bias": ("model.layers.{layer}.linear_attn.dt_bias", None),
    "layers/delta/norm/scale": ("model.layers.{layer}.linear_attn.norm.weight", None),
    "layers/delta/output": ("model.layers.{layer}.linear_attn.out_proj.weight", 2),
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

# In the folder of a vision-language model: the prefix of its text model's names in place of "model.", and the prefixes of its other
# parts, its vision model and the layers that predict further tokens.
NESTED, OTHER_PARTS = "model.language_model.", ("model.visual.", "mtp.")

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
        """The index of its values in the leaf: a number on each axis where it has one place, and None on each axis of its own."""
        if self.expert is None:
            return (*(() if self.layer is None else (self.layer,)), *(None,) * len(self.shape))
        return (self.layer, self.expert, None, *(() if self.part is None else (self.part,)), None)

    def of(self, leaf: Any) -> Any:
        """Returns its values in the leaf, in the layout of Params."""
        return leaf[tuple(slice(None) if i is None else i for i in self.index)]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Its shape in the checkpoint."""
        if self.inputs is None:
            return self.shape
        out, inner = math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs])
        return (out, inner) if self.inputs else (out,)

    def to_hf(self, leaf: Any) -> Any:
        """Returns its values (NumPy or JAX, [*in, *out]) in the checkpoint's layout."""
        return leaf if self.inputs is None else leaf.reshape(self.hf_shape[::-1]).T

    def hf_slices(self, slices: tuple[slice, ...]) -> tuple[slice, ...]:
        """Returns the part of the checkpoint tensor that holds `slices` (with start and stop) of its values.

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
    """Returns the tensor of a leaf, or of one layer of it."""
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
    """Returns the tensors of one layer of a leaf of experts, [L, E, in, out] or [L, E, in, parts, out]."""
    names, fused = EXPERT_TENSORS[plain]
    return [
        Tensor(
            name=name.format(layer=number, expert=expert), path=keys, layer=layer, number=number, expert=expert,
            part=part if len(names) > 1 else None, fused=fused.format(layer=number), shape=(shape[2], shape[-1]), inputs=1,
        )
        for expert in range(shape[1])
        for part, name in enumerate(names)
    ]  # fmt: skip


def unnested(names: Iterable[str]) -> dict[str, str]:
    """Returns {name as in a text model's folder: name here} of the text model in a folder that may be a vision-language model's."""
    own = [name for name in names if not name.startswith(OTHER_PARTS)]
    return {f"model.{name.removeprefix(NESTED)}" if name.startswith(NESTED) else name: name for name in own}


def leaf_of(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """Returns the leaf at `path`."""
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
