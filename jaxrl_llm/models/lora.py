"""LoRA adapters: a frozen weight W [*in, *out] plus a trained product of low rank, https://arxiv.org/abs/2106.09685.

    y = x W + (alpha / rank) (x A) B,  A [*in, rank] ~ U(-1/sqrt(in), 1/sqrt(in)),  B [rank, *out] = 0

A is initialised as in PEFT. The adapters are a tree like Params with {"a", "b"} in place of each adapted weight and nothing
in place of the others; under "layers" they are stacked [L, ...]. Training computes the two products separately, so that the
gradient of W is never computed; `merged` adds them to W for sampling and export.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from jaxrl_llm import components
from jaxrl_llm.distributed import padding
from jaxrl_llm.models import hf_format
from jaxrl_llm.models.architecture import LAYERS, PRECISE
from jaxrl_llm.models.linear import Adapted
from jaxrl_llm.models.policy import COMPUTE_DTYPES, Params, Policy, adapter_shapes

# The linear maps of a layer that an adapter can be added to: name of Hugging Face's module -> path of the leaf.
LINEAR = {
    name.split(".")[-2]: tuple(path.split("/"))
    for path, (name, inputs) in hf_format.TENSORS.items()
    if inputs and path.startswith("layers/") and not any(part in path for part in ("/router", "/delta/", "/share"))
}
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Trains adapters of low rank and leaves the model's own weights unchanged.

    Attributes:
      rank: number of columns of A and of rows of B.
      alpha: weight of the adapters; their product is scaled by alpha / rank.
      targets: linear maps that get an adapter, of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.
      base_dtype: dtype of the frozen weights, "float32" or "bfloat16".
      pretrained: a folder of adapters in PEFT's format to start from; None starts from adapters that change nothing.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = tuple(LINEAR)
    base_dtype: str = "float32"
    pretrained: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))  # gin files give a list; a tuple is hashable
        components.at_least(self, 1, "rank")
        components.above(self, 0, "alpha")
        unknown = [t for t in self.targets if t not in LINEAR]
        if unknown or not self.targets or len(set(self.targets)) != len(self.targets):
            raise ValueError(
                f"lora.LoRA.targets must name linear maps of a layer, each once, of {', '.join(LINEAR)} (got {list(self.targets)})"
            )
        components.one_of(self, COMPUTE_DTYPES, "base_dtype")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class AdaptedPolicy(Policy):
    """A policy that trains only adapters; its frozen base is a separate tree.

    Attributes:
      lora: rank, weight and targets of the adapters.
    """

    lora: LoRA = field(default_factory=LoRA)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.architecture.experts is not None and (named := [t for t in self.lora.targets if t in MLP]):
            others = tuple(t for t in self.lora.targets if t not in MLP) or tuple(t for t in LINEAR if t not in MLP)
            raise ValueError(
                f"lora.LoRA.targets name {', '.join(named)}, which in a model with experts are theirs, and adapters are made for the "
                f"projections of attention alone: set lora.LoRA.targets = {others}"
            )

    @cached_property
    def plain(self) -> Policy:
        """The same model without adapters, for sampling and export."""
        return Policy(self.architecture, self.partitioner, self.compute_dtype, self.remat, unroll=self.unroll)

    def axes(self) -> dict[str, Any]:
        """Returns the logical axes of each adapter: A is sharded like the weight's inputs, B like its outputs."""
        whole = self.plain.axes()
        axes: dict[str, Any] = {}
        for path in self._paths:
            leaf, inputs = hf_format.leaf_of(whole, path), self._inputs(path)
            _place(axes, path, {"a": (*leaf[: 1 + inputs], None), "b": (leaf[0], None, *leaf[1 + inputs :])})
        return axes

    def sizes(self) -> dict[str, Any]:
        """Returns shape and dtype (float32) of each adapter, regardless of the mesh."""
        whole = self.plain.sizes()
        tree: dict[str, Any] = {}
        for path in self._paths:
            shape, inputs = hf_format.leaf_of(whole, path).shape, self._inputs(path)
            a, b = (*shape[: 1 + inputs], self.lora.rank), (shape[0], self.lora.rank, *shape[1 + inputs :])
            _place(tree, path, {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in (("a", a), ("b", b))})
        return tree

    def init(self, key: PRNGKeyArray) -> Params:
        """Creates adapters that change nothing."""
        abstract, sizes = self.abstract(), self.sizes()

        def create(key: jax.Array) -> Params:
            tree: Params = {}
            for number, path in enumerate(self._paths):
                pair = hf_format.leaf_of(sizes, path)
                bound = 1 / math.sqrt(math.prod(pair["a"].shape[1:-1]))
                a = jax.random.uniform(jax.random.fold_in(key, number), pair["a"].shape, minval=-bound, maxval=bound)
                _place(tree, path, {"a": a, "b": jnp.zeros(pair["b"].shape)})
            return jax.tree.map(lambda x, like: padding.filled(x, like.shape), tree, abstract)

        return jax.jit(create, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))(key)

    def frozen(self, base: Params) -> Params:
        """Casts the base to `base_dtype`, keeping norms' scales and routers in float32; `base` is donated."""

        def cast(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
            return x if path[-1].key in PRECISE else x.astype(self.lora.base_dtype)

        shardings = jax.tree.map(lambda x: x.sharding, base)
        change = jax.jit(
            lambda tree: jax.tree_util.tree_map_with_path(cast, tree), donate_argnums=0, out_shardings=shardings
        )
        return change(base)

    def joined(self, params: Params, base: Params | None) -> Params:
        """Returns the base with adapters beside their weights, the tree that `hidden` and `head` take."""
        return self._changed(params, base, lambda path, w, a, b: Adapted(w, a, b, self.lora.scale))

    def merged(self, params: Params, base: Params | None) -> Params:
        """Returns the parameters of `plain`: the adapters are added to their weights in the base's dtypes, other leaves are the base's."""
        sizes = self.plain.sizes()

        def added(path: tuple[str, ...], w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            return _sum(w, a, b, self.lora.scale, w.sharding, hf_format.leaf_of(sizes, path).shape)

        return self._changed(params, base, added)

    def _changed(self, params: Params, base: Params | None, change: Callable[..., Any]) -> Params:
        """Returns the base with `change(path, weight, a, b)` in place of each adapted weight."""
        if base is None:
            raise ValueError("adapters mean nothing without the frozen base that they were made for: give `base`")
        tree = jax.tree.map(lambda x: x, base)  # new dictionaries around the same arrays
        for path in self._paths:
            _place(tree, path, change(path, hf_format.leaf_of(base, path), **hf_format.leaf_of(params, path)))
        return tree

    @cached_property
    def _paths(self) -> list[tuple[str, ...]]:
        found = [path for name, path in LINEAR.items() if name in self.lora.targets]
        size = self.architecture
        attends = {stack: not held for stack, held in zip(size.stacks, size.recurrent)}
        places = [(stack, *path[1:]) for path in found for stack in size.stacks]
        return [place for place in places if attends[place[0]] or place[1] != "attention"]

    def _inputs(self, path: tuple[str, ...]) -> int:
        inputs = hf_format.TENSORS["/".join((LAYERS, *path[1:]))][1]
        assert inputs  # a linear map, by LINEAR
        return inputs


@partial(jax.jit, static_argnames=("scale", "sharding", "own"))
def _sum(
    w: jax.Array, a: jax.Array, b: jax.Array, scale: float, sharding: jax.sharding.Sharding, own: tuple[int, ...]
) -> jax.Array:
    """Returns w + scale x a b of every layer, computed in float32; `own` is the weight's own shape, without padding."""
    a, b = (padding.cut(x, shape) for x, shape in zip((a, b), adapter_shapes(own, a, b)))
    product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1, precision="highest"))(a, b)
    product = padding.filled(product, w.shape)
    return jax.lax.with_sharding_constraint((w.astype(jnp.float32) + scale * product).astype(w.dtype), sharding)


def _place(tree: dict[str, Any], path: tuple[str, ...], leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf
