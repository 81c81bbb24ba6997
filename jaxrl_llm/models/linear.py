"""Linear maps of the models with explicit gradients, plain and with a LoRA adapter; gated ones are in `gated`.

The gradient of the weights is computed in the weights' own layout and in float32: the order that automatic
differentiation chooses costs a transposed product (three times slower on CPU) and rounds to the activations' dtype.
The gradient of a bias is a float32 sum over all tokens for the same reason: a sum that each device rounds depends on how
the mesh splits the tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_llm.distributed import padding, scatter
from jaxrl_llm.distributed.mesh import STORED as GATHERED
from jaxrl_llm.distributed.mesh import names
from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.ordered import arithmetic


@partial(jax.tree_util.register_dataclass, data_fields=["weights", "a", "b", "rows"], meta_fields=["scale", "sets"])
@dataclass(frozen=True)
class Adapted:
    """Weights with a separate adapter of low rank, `weights + scale x a b`; see models/lora.py.

    Attributes:
      weights: [*in, *out].
      a: [*in, rank], for several sets side by side [*in, sets x rank].
      b: [rank, *out], or [sets x rank, *out].
      scale: weight of the adapter.
      sets: number of sets; see samplers/embedded/shelf.py.
      rows: int32 [B] the set of each row of activations; None for one set.
    """

    weights: Any
    a: Any
    b: Any
    scale: float
    sets: int = 1
    rows: Any = None

    def own(self, low: Float[Array, "B T R"]) -> Float[Array, "B T R"]:
        """Returns the products with `a` of each row's own set, and 0 in the place of others."""
        if self.sets == 1:
            return low
        owner = jnp.arange(low.shape[-1]) // (low.shape[-1] // self.sets)
        return jnp.where((owner == self.rows[:, None])[:, None], low, 0)

    def __getitem__(self, index: Any) -> "Adapted":
        """Returns itself, since layers read a parameter as `parameter[...]`."""
        return self


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=[])
@dataclass(frozen=True)
class Quantized:
    """Weights of few bits with a scale for each output channel; they have no gradient. See samplers/embedded/narrow.py.

    Attributes:
      values: [*in, *out].
      scale: float32 [*out] factors of products with `values`.
    """

    values: Any
    scale: Any

    def __getitem__(self, index: Any) -> "Quantized":
        """Returns itself, since layers read a parameter as `parameter[...]`."""
        return self


@dataclass(frozen=True)
class Stored:
    """The placement of a weight on a mesh.

    Attributes:
      mesh: the device mesh.
      rows: the mesh axes that split the batch and the length of activations, over which the weight's gradient is summed here; None
        leaves that sum to XLA.
      spec: the mesh axes that split each dimension of the stored weight.
    """

    mesh: Mesh
    rows: tuple[Any, Any] | None
    spec: PartitionSpec

    def parts(self, dimensions: Sequence[int]) -> bool:
        """Returns whether a product over these dimensions of the weight gives each device a part of a sum, as an axis besides fsdp splits them."""
        return any(axis != GATHERED for d in dimensions for axis in names(self.spec[d]))

    def whole(self, x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns activations and a weight of which each device uses all, as where heads are not a multiple of the tensor axis.

        The compiler would divide such a product over the tensor axis by itself, and round its parts before it adds them.
        """
        if self.mesh.shape["tensor"] == 1 or self.parts(range(weights.ndim)):
            return x, weights
        free = (PartitionSpec.UNCONSTRAINED,) * 2
        rows = PartitionSpec(*(self.rows or free), *[None] * (x.ndim - 2))
        fixed = lambda a, spec: jax.lax.with_sharding_constraint(a, NamedSharding(self.mesh, spec))  # noqa: E731
        return fixed(x, rows), fixed(weights, PartitionSpec())


@partial(jax.tree_util.register_dataclass, data_fields=["weights"], meta_fields=["stored"])
@dataclass(frozen=True)
class Spread:
    """A weight that a mesh divides: the gradients that devices compute from their rows are summed to the weight's shards, and partial
    products are summed in float32, as on one device.

    Left to XLA, sums over many TPUs become all-reduces of the whole gradient, which block, and parts are rounded to the
    activations' dtype before they are summed.

    Attributes:
      weights: [*in, *out].
      stored: its placement.
    """

    weights: Any
    stored: Stored

    def __getitem__(self, index: Any) -> "Spread":
        """Returns itself, since layers read a parameter as `parameter[...]`."""
        return self


@partial(jax.tree_util.register_dataclass, data_fields=["weights", "slopes"], meta_fields=[])
@dataclass(frozen=True)
class Rounding:
    """Weights that a layer rounds as it runs, so that no rounded copy of all layers exists; their gradient is that of `slopes`.

    Attributes:
      weights: [*in, *out] as they are stored; they have no gradient.
      slopes: [*in, *out] of the dtype that is rounded to; no value of it is read.
    """

    weights: Any
    slopes: Any

    def read(self) -> jax.Array:
        """Returns the rounded weights."""
        return _read_rounded(self.weights, self.slopes)


@jax.custom_vjp
def _read_rounded(weights: jax.Array, slopes: jax.Array) -> jax.Array:
    return rounded(weights, slopes.dtype)


_read_rounded.defvjp(lambda weights, slopes: (_read_rounded(weights, slopes), None), lambda _, g: (None, g))


def read(params: Any) -> Any:
    """Returns the parameters with each `Rounding` among them read."""
    whole = lambda x: isinstance(x, Rounding)  # noqa: E731
    return jax.tree.map(lambda x: x.read() if whole(x) else x, params, is_leaf=whole)


def summed(product: Any, stored: Stored | None, x: jax.Array, g: jax.Array) -> jax.Array:
    """Returns `product(x, g)`, the gradient of a weight in float32, summed over the devices that split the rows of `x` and `g`."""
    if stored is None or stored.rows is None:
        return product(x, g)
    mesh, split = stored.mesh, [axis for part in stored.rows for axis in names(part)]
    kept = [tuple(axis for axis in names(part) if axis in split) for part in stored.spec]
    rows, out = PartitionSpec(*stored.rows), PartitionSpec(*(part or None for part in kept))
    shares = [math.prod(mesh.shape[axis] for axis in part) for part in kept]

    def local(x: jax.Array, g: jax.Array) -> jax.Array:
        total, scattered = product(x, g), []
        total = padding.filled(total, [-(-n // ways) * ways for n, ways in zip(total.shape, shares)])
        for dimension, axes in enumerate(kept):
            for axis in axes:
                total = scatter.scattered(total, mesh, axis, dimension)
                scattered.append(axis)
        others = tuple(axis for axis in split if axis not in scattered)
        return jax.lax.psum(total, others) if others else total

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(rows, rows), out_specs=out, axis_names=set(split), check_vma=False
    )  # fmt: skip
    return padding.cut(run(x, g), jax.eval_shape(product, x, g).shape)


def linear(
    x: Float[Array, "B T ..."], weights: Float[Array, "..."] | Adapted | Quantized | Spread, inputs: int = 1
) -> Float[Array, "B T ..."]:
    """Contracts the last `inputs` axes of `x` with the first `inputs` axes of the weights, in the dtype of `x`."""
    if isinstance(weights, Quantized):
        total = jnp.tensordot(x, weights.values.astype(x.dtype), inputs, preferred_element_type=jnp.float32)
        return (total * weights.scale).astype(x.dtype)
    if isinstance(weights, Adapted):
        low = _product(weights.own(_product(x, weights.a, inputs, None)), weights.b, 1, None)
        return _product(x, weights.weights, inputs, None) + weights.scale * low
    kernel, stored = unwrapped(weights)
    if inputs > 1 or stored is None or stored.rows is None or any(stored.spec[1:]) or dispatch.ordered():
        return _product(x, kernel, inputs, stored)
    # Heads and their width are one dimension here: TPU's compiler takes nearly twice the cycles for the gradients' products over both, since
    # a head of 128 is half as wide as a matrix unit.
    flat = kernel.reshape(kernel.shape[0], -1)
    y = _product(x, flat, 1, replace(stored, spec=PartitionSpec(*stored.spec[:1], None)))
    return y.reshape(*y.shape[:-1], *kernel.shape[1:])


def linears(x: Float[Array, "B T D"], weights: Sequence[Any]) -> list[Float[Array, "B T ..."]]:
    """Returns the `linear` of each of the weights; ordered programs compute those of one token a row, a sampler's, in one kernel."""
    if dispatch.ordered() and x.shape[1] == 1 and not any(isinstance(w, Adapted | Quantized | Spread) for w in weights):
        return _products(x, list(weights))
    return [linear(x, w) for w in weights]


@jax.custom_vjp
def _products(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
    return arithmetic.linears(x, weights)


def _products_backward(
    saved: tuple[jax.Array, list[jax.Array]], gs: list[jax.Array]
) -> tuple[jax.Array, list[jax.Array]]:
    x, weights = saved
    found = [_backward(1, None, (x, w), g) for w, g in zip(weights, gs)]
    return reduce(jnp.add, (dx for dx, _ in found)), [dw for _, dw in found]


_products.defvjp(lambda x, weights: (_products(x, weights), (x, weights)), _products_backward)


def unwrapped(weights: Any) -> tuple[Any, Stored | None]:
    """Returns the array of a weight that has no adapter and no scale, and how a mesh holds it."""
    return (weights.weights, weights.stored) if isinstance(weights, Spread) else (weights, None)


def pinned(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns `x`, which ordered programs round before anything is added to it."""
    return arithmetic.pin(x) if dispatch.ordered() else x


def rounded(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """Returns `x` in `dtype`; ordered programs use a rounding that the compiler keeps."""
    return arithmetic.rounded(x, dtype) if dispatch.ordered() else x.astype(dtype)


def added(x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns x + y in the dtype of `x`."""
    return arithmetic.added(x, y) if dispatch.ordered() else x + y


@jax.custom_vjp
def biased(y: Float[Array, "B T *outputs"], bias: Float[Array, "*outputs"]) -> Float[Array, "B T *outputs"]:
    """Adds the bias to every token, in the dtype of `y`; the gradient of the bias is a float32 sum over the tokens."""
    return added(y, rounded(bias, y.dtype))


def _biased_backward(bias: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    return g, jnp.sum(g, axis=(0, 1), dtype=jnp.float32).astype(bias.dtype)


# The bias is kept for its dtype alone.
biased.defvjp(lambda y, bias: (biased(y, bias), bias), _biased_backward)


def looked_up(table: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns the rows of the table; its gradient is summed in float32 whatever its dtype is, and rounded once.

    In the bitwise mode on a GPU the sums have one order: those of a scatter there have any.
    """
    if dispatch.ordered() and dispatch.device().platform == "gpu":
        return _ordered_rows_of(table, tokens)
    return table[tokens] if table.dtype == jnp.float32 else _rows_of(table, tokens)


@jax.custom_vjp
def _rows_of(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return table[tokens]


def _rows_backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, None]:
    table, tokens = saved
    total = jnp.zeros(table.shape, jnp.float32).at[tokens].add(g.astype(jnp.float32))
    return total.astype(table.dtype), None


# The table is kept for its shape and its dtype alone.
_rows_of.defvjp(lambda table, tokens: (_rows_of(table, tokens), (table, tokens)), _rows_backward)


@jax.custom_vjp
def _ordered_rows_of(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return table[tokens]


def _ordered_rows_backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, None]:
    table, tokens = saved
    total = arithmetic.sums_by_key(tokens.reshape(-1), g.reshape(-1, g.shape[-1]), table.shape[0])
    return total.astype(table.dtype), None


_ordered_rows_of.defvjp(
    lambda table, tokens: (_ordered_rows_of(table, tokens), (table, tokens)), _ordered_rows_backward
)


@jax.custom_vjp
def _written(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(x)


# The gradient has no barrier, so that a sum of it is computed with the product that it comes from.
_written.defvjp(lambda x: (_written(x), None), lambda _, g: (g,))


def written(x: Float[Array, "B T N"]) -> Float[Array, "B T N"]:
    """Returns `x`, which TPUs compute once and not in each product that reads it; one token a row is left to the compiler."""
    return _written(x) if on_tpu() and x.shape[1] > 1 else x


def on_tpu() -> bool:
    """Returns whether programs are for TPUs."""
    return bool(dispatch.device().platform == "tpu")


def contracted(x: jax.Array, weights: jax.Array, axes: Any, stored: Stored | None, over: Sequence[int]) -> jax.Array:
    """Contracts as tensordot in the dtype of `x`, over the dimensions `over` of the weights; parts are summed in float32."""
    weights = weights.astype(x.dtype)
    if stored is None:
        return jnp.tensordot(x, weights, axes)
    if not stored.parts(over):
        return jnp.tensordot(*stored.whole(x, weights), axes)
    total = jnp.tensordot(x, weights, axes, preferred_element_type=jnp.float32)
    # TPU's compiler would round some parts before their sum, since what is added is rounded after it.
    return jax.lax.optimization_barrier(total).astype(x.dtype)


def applied(x: jax.Array, weights: jax.Array, inputs: int, stored: Stored | None) -> jax.Array:
    """Computes the product of the forward pass: the last `inputs` axes of `x` with the first of the weights."""
    if dispatch.ordered():
        return arithmetic.linear(x, weights, inputs)
    return contracted(x, weights, inputs, stored, range(inputs))


def rows_product(x: jax.Array, g: jax.Array, count: int) -> jax.Array:
    """Contracts the first `count` axes of both, in float32."""
    rows = tuple(range(count))
    return jnp.tensordot(x, g, (rows, rows), preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: jax.Array, weights: jax.Array, inputs: int, stored: Stored | None) -> jax.Array:
    return applied(x, weights, inputs, stored)


def _forward(
    x: jax.Array, weights: jax.Array, inputs: int, stored: Stored | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # This is a bare product instead of a call of `_product`: the remat policy "dots" recognises what to keep by its primitive.
    return applied(x, weights, inputs, stored), (x, weights)


def _backward(
    inputs: int, stored: Stored | None, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weights = saved
    outputs = weights.ndim - inputs
    last = lambda n, ndim: tuple(range(ndim - n, ndim))  # noqa: E731
    over = last(outputs, weights.ndim)
    dx = contracted(g, weights, (last(outputs, g.ndim), over), stored, over)
    dw = summed(partial(rows_product, count=g.ndim - outputs), stored, x, g)
    return dx, dw.astype(weights.dtype)


_product.defvjp(_forward, _backward)
