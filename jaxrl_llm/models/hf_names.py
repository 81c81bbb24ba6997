"""The one-to-one map between the leaves of Params and the tensors of a Hugging Face checkpoint: names and layouts.

A linear map of ours has its input axes first and its heads apart, [*in, *out]; theirs is a matrix [out, in] with the
heads flattened. Stacked leaves [L, ...] are one tensor a layer. Adapters {"a", "b"} in the place of a leaf are named as
PEFT names them, less its prefix: two linear maps, [*in, rank] and [rank, *out].
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

# Path of a leaf -> (name there, number of leading input axes of a linear map, or None where both layouts agree).
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
    """A checkpoint tensor and where its values live in Params.

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
          ValueError: where an axis other than the first of a flattened group is split: the part is no rectangle there.
        """
        if self.inputs is None:
            return slices
        out, inner = _flat(slices[self.inputs :], self.shape[self.inputs :]), slices[: self.inputs]
        return (out, _flat(inner, self.shape[: self.inputs])) if self.inputs else (out,)

    def from_hf(self, part: Any, shape: tuple[int, ...]) -> Any:
        """A part read at `hf_slices`, in our layout; `shape` is the part's shape here."""
        return part if self.inputs is None else part.T.reshape(shape)


def tensors(tree: Mapping[str, Any]) -> list[Tensor]:
    """Every checkpoint tensor of Params, or of a tree of shapes like it, in a fixed order: layer by layer.

    Raises:
      ValueError: a leaf that has no counterpart in the checkpoint format.
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
    """All parameters under their checkpoint names and in its layout; pure, for use under jit."""
    leaves = {t.name: (t, leaf_of(params, t.path)) for t in tensors(params)}
    return {name: t.to_hf(leaf if t.layer is None else leaf[t.layer]) for name, (t, leaf) in leaves.items()}


def _flat(slices: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
    if not shape:  # one output
        return slice(0, 1)
    inner = math.prod(shape[1:])
    if any(s.start != 0 or s.stop != n for s, n in zip(slices[1:], shape[1:])):
        raise ValueError(
            f"only the first of the axes {shape} may be split over devices: leave head_width whole in RULES"
        )
    return slice(slices[0].start * inner, slices[0].stop * inner)
