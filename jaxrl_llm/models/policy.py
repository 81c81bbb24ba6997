"""The policy: a language model as pure functions of its parameters, for an architecture, a mesh and a compute dtype."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from jaxrl_llm.distributed import padding, scatter
from jaxrl_llm.distributed.mesh import STORED, Axes, Partitioner, names
from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.decode_attention import cache as caches
from jaxrl_llm.kernels.ordered import arithmetic
from jaxrl_llm.models import layers as remats
from jaxrl_llm.models.architecture import Architecture, Capture, stack_of
from jaxrl_llm.models.attention import Places
from jaxrl_llm.models.delta_net import STATE_AXES
from jaxrl_llm.models.experts import Report, check_division
from jaxrl_llm.models.linear import Adapted, Quantized, Rounding, Spread, Stored
from jaxrl_llm.models.transformer import Apart, Cache, Running, States, Transformer

Params = dict[
    str, Any
]  # nested dictionaries with float32 or bfloat16 arrays at the leaves; leaves under `Architecture.stacks` are stacked [L, ...]

COMPUTE_DTYPES = ("float32", "bfloat16")
ROW_AXES = ("data", "fsdp", "expert", "context")  # mesh axes that may split the tokens of a batch
# Mesh axes that the bitwise mode does not support, and their effect on a token's sums.
DIVIDING = {
    "tensor": "makes products sums of the devices' parts",
    "context": "exchanges the tokens of a row for heads, which is no part of the ordered programs",
    "expert": "is for experts, which are chosen and summed in an order that goes by the batch",
}


@dataclass(frozen=True)
class Policy:
    """A causal language model on a mesh; holds no arrays, so it may be a static argument of a jitted function.

    Attributes:
      architecture: sizes and switches of the model.
      partitioner: the mesh and its axis table.
      compute_dtype: dtype of activations, "float32" or "bfloat16"; parameters are float32 except where `Optimizer.weights` says otherwise.
      remat: name of the values that the backward pass recomputes: "none", "dots", "gate", "projections", "attention", "full" or
        "offload"; see models/layers.py.
      unroll: number of layers in one step of the scan over layers.
      bitwise: whether a token's forward pass has one order of sums, so that its log-prob has the same bits in the learner and in the
        embedded sampler, whatever other tokens it is computed with (`check_bitwise` says for which models).
    """

    architecture: Architecture
    partitioner: Partitioner
    compute_dtype: str = "float32"
    remat: str = "none"
    unroll: int = field(default=1, kw_only=True)
    bitwise: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise ValueError(
                f"compute_dtype must be one of {COMPUTE_DTYPES} (got {self.compute_dtype!r}): "
                f"set sources.PolicySource.compute_dtype"
            )
        if self.remat not in remats.NAMES:
            raise ValueError(
                f"remat must be one of {remats.NAMES} (got {self.remat!r}): set sources.PolicySource.remat"
            )
        if self.unroll < 1:
            raise ValueError(f"unroll must be >= 1 layer (got {self.unroll}): set sources.PolicySource.unroll")
        check_division(self.architecture, self.partitioner)
        if self.bitwise:
            check_bitwise(self.architecture, self.partitioner, self.compute_dtype)

    @property
    def plain(self) -> "Policy":
        """The same model with all its parameters in one tree; here the policy itself."""
        return self

    @property
    def looped(self) -> "Policy":
        """The same model with a loop over its layers, whose programs compile in a fraction of the time. A bitwise policy stays as it is: its
        sampler and learner were compared with layers unrolled alike."""
        return self if self.bitwise or self.unroll == 1 else replace(self, unroll=1)

    def joined(self, params: Params, base: Params | None) -> Params:
        """Joins trained and frozen parameters to the tree that `hidden` and `head` take; here all are trained."""
        return params

    def merged(self, params: Params, base: Params | None) -> Params:
        """Merges trained and frozen parameters to those of `plain`; here all are trained."""
        return params

    def axes(self) -> dict[str, Any]:
        """Returns the logical axes of each parameter: a tree like Params with a tuple at each leaf."""

        def leaf_axes(path: tuple[Any, ...], variable: nnx.Variable) -> Axes:
            axes = variable.get_metadata("axes")
            return ("layers", *axes) if stack_of(path[0]) is not None else axes

        return nnx.to_pure_dict(nnx.map_state(leaf_axes, self._blueprint[1]))

    def sizes(self) -> dict[str, Any]:
        """Returns shape and dtype of each parameter as the model computes with it, regardless of the mesh: a tree like Params of ShapeDtypeStructs."""
        return nnx.to_pure_dict(self._blueprint[1])

    def abstract(self) -> dict[str, Any]:
        """Returns shape, dtype and sharding of each parameter as it is stored: a tree like Params of ShapeDtypeStructs."""
        return jax.tree.map(partial(stored, self.partitioner), self.sizes(), self.axes())

    def init(self, key: PRNGKeyArray) -> Params:
        """Creates random parameters in place on the mesh, with the same values on every mesh."""
        abstract = self.abstract()

        def create(key: jax.Array) -> Params:
            made = nnx.to_pure_dict(nnx.state(self._build(nnx.Rngs(params=key)), nnx.Param))
            return jax.tree.map(lambda x, like: padding.filled(x, like.shape), made, abstract)

        return jax.jit(create, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract))(key)

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        *,
        capture: Capture | None = None,
        max_segments: int | None = None,
    ) -> Float[Array, "B T D"]:
        """Returns hidden states of packed rows, after the final norm.

        Args:
          params: the parameters.
          tokens: token ids.
          positions: position of each token within its own sequence.
          segments: number, from 1, of a token's sequence in its row; 0 is padding.
          capture: a state inside the model to be returned instead; later layers are not run.
          max_segments: largest number of segments in one row where it is known; a hint that some attention kernels use.

        Raises:
          ValueError: the model does not have the layer of `capture`.
        """
        return self.routed(params, tokens, positions, segments, capture=capture, max_segments=max_segments)[0]

    def routed(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        *,
        routes: Integer[Array, "B T E_layers k"] | None = None,
        replay: bool = True,
        capture: Capture | None = None,
        max_segments: int | None = None,
    ) -> tuple[Float[Array, "B T D"], Report | None]:
        """Returns the result of `hidden`, and the report of the layers with experts, [E_layers, ...]; None for a model without any.

        `routes` are recorded experts, which take the place of those that the router would choose now, or are only compared with them
        where `replay` is False; ids at or beyond the number of experts stand for none.
        """
        if capture is not None:
            capture.check(self.architecture.layers)
        model, places = self._model(self._spread(params, tokens.shape)), Places(positions, segments)
        with self.ordering():
            return model.hidden(
                tokens, places, capture=capture, max_segments=max_segments, routes=routes, replay=replay
            )

    def measured(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        measure: Callable[[States], Any],
    ) -> Any:
        """Returns `measure({site: [B, T, D]})` of each layer's states (architecture.Site), stacked over layers; see `hidden`."""
        return self._model(self._cut(params)).measured(tokens, Places(positions, segments), measure, None)

    def head(self, params: Params) -> Float[Array, "V D"]:
        """Returns the matrix that maps hidden states to logits; the embedding where the two are tied."""
        name = "embedding" if self.architecture.tied else "head"
        return self._cut({name: params[name]})[name]

    def cache_shapes(
        self, slots: int, length: int, dtype: str | None = None, pages: int = 0
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and shardings of a cache: {"k", "v"} of the layers that attend, in `dtype` or the compute dtype, with the axes
        `kernels.decode_attention.cache.axes()`; of layers with a state, "state" [L, slots, Hv, dk, dv] in float32 and
        "conv" [L, slots, taps - 1, channels]. With `pages`, keys and values are those of so many pages of `length` entries."""
        size, delta = self.architecture, self.architecture.delta
        holding = sum(size.recurrent)
        entries = caches.shape(size.layers - holding, pages or slots, length, size.kv_heads, size.head_width)
        parts: dict[str, tuple[tuple[int, ...], str]] = dict.fromkeys(
            ("k", "v"), (entries, dtype or self.compute_dtype)
        )
        if delta is not None:
            parts["state"] = ((holding, slots, *delta.state_shape), "float32")
            parts["conv"] = ((holding, slots, delta.taps - 1, delta.channels), self.compute_dtype)
        return {
            name: jax.ShapeDtypeStruct(shape, kind, sharding=self.partitioner.sharding(_cache_axes(name), shape))
            for name, (shape, kind) in parts.items()
        }

    def cache(self, slots: int, length: int, dtype: str | None = None, pages: int = 0) -> Cache:
        """Creates an empty cache of these `cache_shapes`."""
        shapes = self.cache_shapes(slots, length, dtype, pages)

        def zeros() -> Cache:
            return {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}

        return jax.jit(zeros, out_shardings={name: x.sharding for name, x in shapes.items()})()

    def constrained(self, cache: Cache, *, gathered: bool = False) -> Cache:
        """Fixes the sharding of each part of the cache inside jit; `gathered` has all slots on every shard of the batch."""
        axes = {name: [None if gathered and a == "batch" else a for a in _cache_axes(name)] for name in cache}
        return {name: self.partitioner.constrain(entries, tuple(axes[name])) for name, entries in cache.items()}

    def extend(
        self,
        params: Params,
        cache: Cache,
        tokens: Int[Array, "S T"],
        positions: Int[Array, "S T"],
        *,
        fresh: bool = False,
        counts: Int[Array, " S"] | None = None,
    ) -> tuple[Float[Array, "S T D"], Cache]:
        """Returns hidden states of new tokens of each slot, and the cache with their keys and values written.

        A token is stored in the cache at its position; it attends to the entries up to its own. Entries beyond a
        right-padded prompt may hold garbage: no token attends to them before they are overwritten. A token whose
        position is not below the cache's length is not written. `fresh` promises that the cache is empty and that positions count
        up from 0, so that fused attention may be used. In a model whose layers hold a state, only the first `counts` tokens of each slot
        (None: all) enter the state, since a state, unlike a cache's entry, is not overwritten.
        """
        return self.routed_extend(params, cache, tokens, positions, fresh=fresh, counts=counts)[:2]

    def routed_extend(
        self,
        params: Params,
        cache: Cache,
        tokens: Int[Array, "S T"],
        positions: Int[Array, "S T"],
        *,
        fresh: bool = False,
        counts: Int[Array, " S"] | None = None,
        apart: Apart | None = None,
    ) -> tuple[Float[Array, "S T D"], Cache, Report | None]:
        """Returns the result of `extend`, and the report of the layers with experts, as `routed`; see `apart`."""
        model = self._model(self._spread(params, tokens.shape))
        with self.ordering():
            hidden, cache, report = model.extend(cache, tokens, positions, fresh=fresh, counts=counts, apart=apart)
        return hidden, self.constrained(cache), report

    def apart(self, params: Params, rows: tuple[int, int]) -> Apart:
        """Returns the parameters of each layer by itself, for tokens of shape [S, T] `rows`.

        With them, a loop over tokens copies no weight out of its stack at every step.
        """
        return self._model(self._spread(params, rows)).apart()

    def ordering(self) -> AbstractContextManager[None]:
        """Returns a context that traces with one order of sums where the policy is bitwise, and divides rows as its mesh does."""
        return dispatch.ordering(self.bitwise, self.partitioner)

    def _build(self, rngs: nnx.Rngs) -> Transformer:
        run = Running(dtype=self.compute_dtype, remat=self.remat, unroll=self.unroll)
        return Transformer(self.architecture, self.partitioner, run, rngs=rngs)

    @cached_property
    def _blueprint(self) -> tuple[nnx.GraphDef[Transformer], nnx.State[Any, Any]]:
        return nnx.split(nnx.eval_shape(lambda: self._build(nnx.Rngs(0))), nnx.Param)

    def _cut(self, params: Params) -> Params:
        """Slices the parameters from the sizes in which the mesh stores them to their own."""
        if self.partitioner.axis_sizes[STORED] == 1:
            return params
        own = {path: x.shape for path, x in jax.tree_util.tree_leaves_with_path(self.plain.sizes())}
        stored = {path: x.sharding for path, x in jax.tree_util.tree_leaves_with_path(self.plain.abstract())}

        def leaf(path: tuple[Any, ...], x: Any) -> Any:
            if isinstance(x, Adapted):
                a, b = adapter_shapes(own[path], x.a, x.b)
                return replace(x, weights=leaf(path, x.weights), a=padding.cut(x.a, a), b=padding.cut(x.b, b))
            if isinstance(x, Quantized):
                outputs = own[path][x.values.ndim - x.scale.ndim + 1 :]
                return Quantized(leaf(path, x.values), padding.cut(x.scale, (x.scale.shape[0], *outputs)))
            if isinstance(x, Rounding):
                return Rounding(leaf(path, x.weights), leaf(path, x.slopes))
            if x.shape == own.get(path, x.shape):
                return x
            # Sharded as it is stored, so that the last device's shard may be smaller than the others.
            return jax.lax.with_sharding_constraint(padding.cut(x, own[path]), stored[path])

        return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=_several)

    def _spread(self, params: Params, rows: tuple[int, ...]) -> Params:
        """Slices the parameters to their own sizes, and marks each matrix of the layers with its placement, for activations of [B, T] `rows`.

        Gradients are summed to the shards where all devices split the activations. GPUs are left to XLA, whose sums of gradients are
        reduce-scatters that overlap with products.
        """
        params, split = self._cut(params), self.partitioner.spec(("batch", "length"), rows)
        used = math.prod(self.partitioner.axis_sizes[axis] for part in split for axis in names(part))
        wanted = math.prod(self.partitioner.axis_sizes[axis] for axis in ROW_AXES)
        here = used == wanted and used > 1 and scatter.by_hand(self.partitioner.mesh)
        if not here and self.partitioner.axis_sizes["tensor"] == 1:
            return params
        over = tuple(split) if here else None

        def marked(leaf: Any, like: jax.ShapeDtypeStruct, axes: Axes) -> Any:
            # Not for weights under adapters or a sampler's; norms' scales and biases; experts, which sum their own gradients.
            if isinstance(leaf, Adapted | Quantized) or "embed" not in axes or "experts" in axes:
                return leaf
            return Spread(leaf, Stored(self.partitioner.mesh, over, PartitionSpec(*like.sharding.spec[1:])))

        shapes, axes = self.plain.abstract(), self.plain.axes()
        layers = {
            stack: jax.tree.map(marked, params[stack], shapes[stack], axes[stack], is_leaf=_several)
            for stack in self.architecture.stacks
        }
        return {**params, **layers}

    def _model(self, params: Params) -> Transformer:
        graph, abstract = self._blueprint
        state = jax.tree.map(lambda leaf: leaf, abstract)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)


def _several(x: Any) -> bool:
    """Returns whether several arrays take the place of one parameter."""
    return isinstance(x, Adapted | Quantized | Rounding)


def stored(partitioner: Partitioner, own: jax.ShapeDtypeStruct, axes: Axes) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and sharding of a parameter, given in its own size, as the mesh stores it."""
    shape = partitioner.padded(axes, own.shape)
    return jax.ShapeDtypeStruct(shape, own.dtype, sharding=partitioner.stored(axes, shape))


def adapter_shapes(weight: tuple[int, ...], a: Any, b: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the own shapes of an adapter's two parts, [L, *in, rank] and [L, rank, *out], beside a weight [L, *in, *out]."""
    inputs = a.ndim - 1  # the axis of layers included
    return (*weight[:inputs], a.shape[-1]), (*b.shape[:2], *weight[inputs:])


def check_bitwise(architecture: Architecture, partitioner: Partitioner, dtype: str) -> None:
    """Raises ValueError where the bitwise mode does not have the model, its dtype or the devices."""
    mesh, platform = partitioner.mesh, partitioner.mesh.devices.flat[0].platform
    reason = arithmetic.refusal(platform)
    if architecture.experts is not None:
        reason = "experts are chosen and summed in an order that goes by the batch"
    elif architecture.delta is not None:
        reason = "layers that hold a state sum over tokens in chunks that go by the row"
    elif axis := next((name for name in DIVIDING if mesh.shape.get(name, 1) > 1), None):
        reason = (
            f"the mesh axis {axis} {DIVIDING[axis]}, and only data and fsdp divide rows alone: set train.MeshConfig.{axis} = 1, "
            f"and data or fsdp as many times larger (got {axis} = {mesh.shape[axis]})"
        )
    elif platform == "gpu" and dtype != "bfloat16":
        reason = f"a GPU's products in one order are of bfloat16: set compute_dtype = 'bfloat16' (got {dtype!r})"
    if reason is not None:
        raise ValueError(f"the bitwise mode is not for this policy, as {reason}; set BITWISE = False")


def _cache_axes(name: str) -> Axes:
    """Returns the logical axes of a part of a cache."""
    if name == "table":
        return ("batch", None)
    return STATE_AXES[name] if name in STATE_AXES else caches.axes()
