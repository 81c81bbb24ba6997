"""The bitwise mode's matrix products, norms and row sums on one NVIDIA Hopper GPU.

A product is `grouped_matmul`'s stream of tiles with one group: a tile of the result sums over K in pieces of one depth, in order, in
one float32 sum, by an instruction (64 rows x the tile's columns x 16 of K) that depends on the weights' shape alone. Rows are padded to
whole tiles. The number of tiles of a block, and the blocks that share the weights' pieces, depend on the number of rows and change no
bit: a wgmma instruction has 64 rows in every block and multiplies each of them independently, so that a block of 256 rows takes four
instructions for each piece of K where one of 64 takes one. Norms and sums of rows are Triton programs whose blocks depend on the row's
width.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.grouped_matmul import mosaic_gpu as grouped
from jaxrl_llm.kernels.grouped_matmul.definition import Blocks
from jaxrl_llm.kernels.grouped_matmul.mosaic_gpu import Tiles

WIDE = Tiles(rows=64, columns=256)
NARROW_MANY = Tiles(rows=128, columns=128, slice_bytes=64)
NARROW_FEW = Tiles(rows=64, columns=128, stages=6)
WIDE_FROM = 4096  # columns of weights from which on tiles are WIDE
MANY_FROM = 8192  # rows of narrow products from which on blocks have 256 rows
TOGETHER = 512  # rows from which on two blocks share the weights' pieces
LOW = 0.6  # time of a block with one tile of rows relative to two tiles, on one H200 (tests/bitwise_decode.py)
BLOCK = 4096  # most elements of rows that a Triton program holds at once


def tiles_of(rows: int, columns: int, beside: int = 0) -> Tiles:
    """Returns the tiles of a product; columns and depth, and so the bits, depend on the weights' columns alone.

    For few rows a block has one tile, where that keeps more multiprocessors busy; the kernel also has `beside` columns of other
    weights. Such blocks of narrow tiles form no clusters, which would cost more than they save in reads of weights.
    """
    if columns >= WIDE_FROM and columns % WIDE.columns == 0:
        tiles = WIDE
    elif rows >= MANY_FROM:
        return NARROW_MANY
    else:
        tiles = NARROW_FEW
    turns = [_turns(replace(tiles, warpgroups=count), rows, columns + beside) for count in (1, 2)]
    count = 1 if turns[0] * LOW <= turns[1] else 2
    together = rows >= TOGETHER and (count == 2 or tiles is WIDE)
    return replace(tiles, warpgroups=count, cluster=2 if together else 1)


def _turns(tiles: Tiles, rows: int, columns: int) -> int:
    """Returns the most blocks of a product that one multiprocessor computes."""
    chip = tiles.multiprocessors or dispatch.device().core_count
    return pl.cdiv(pl.cdiv(rows, tiles.height) * pl.cdiv(columns, tiles.columns), chip)


@functools.partial(jax.jit, static_argnames=("turned",))
def product(x: Float[Array, "M K"], w: Float[Array, "..."], *, turned: bool = False) -> Float[Array, "M N"]:
    """Returns x @ w for `w` [K, N], or x @ w.T for a `turned` one [N, K], of bfloat16 with float32 sums, rounded once."""
    tiles = tiles_of(len(x), w.shape[0 if turned else 1])
    (y,) = _joined(x, [w], tiles, turned)
    return y


@jax.jit
def products(x: Float[Array, "M K"], weights: Sequence[Float[Array, "K _"]]) -> list[Float[Array, "M _"]]:
    """Returns the `product` of x and each of the weights; one kernel computes those with the same instruction."""
    kernels: dict[int, list[int]] = {}
    for i, w in enumerate(weights):
        kernels.setdefault(tiles_of(len(x), w.shape[1]).columns, []).append(i)
    found: dict[int, jax.Array] = {}
    for own in kernels.values():
        first, *others = (weights[i].shape[1] for i in own)
        found |= zip(own, _joined(x, [weights[i] for i in own], tiles_of(len(x), first, sum(others)), False))
    return [found[i] for i in range(len(weights))]


def _joined(x: jax.Array, weights: Sequence[jax.Array], tiles: Tiles, turned: bool) -> list[jax.Array]:
    """Returns the products of x and each of the weights by one kernel; rows, depth and columns are padded to whole tiles."""
    (rows, width), columns = x.shape, [w.shape[0 if turned else 1] for w in weights]
    deeper = 0, -width % tiles.depth
    x = jnp.pad(x, ((0, -rows % tiles.block), deeper))
    wider = [(0, -n % tiles.columns) for n in columns]
    filled = [jnp.pad(w, (more, deeper) if turned else (deeper, more))[None] for w, more in zip(weights, wider)]
    count = x.shape[0] // tiles.block
    one = Blocks(
        expert=jnp.zeros(count, jnp.int32), first=jnp.array([0, count], jnp.int32), sizes=jnp.array([rows], jnp.int32)
    )
    found = grouped.products(x, filled, one, tiles, transposed=turned)
    return [y[:rows, :n] for y, n in zip(found, columns)]


def linear(x: Float[Array, "*rows inputs"], weights: Float[Array, "..."], inputs: int) -> Float[Array, "..."]:
    """Contracts the last `inputs` axes of `x`, bfloat16, with the first ones of the weights."""
    width = math.prod(weights.shape[:inputs])
    y = product(x.reshape(-1, width), weights.astype(x.dtype).reshape(width, -1))
    return y.reshape(*x.shape[: x.ndim - inputs], *weights.shape[inputs:])


def linears(x: Float[Array, "*rows D"], weights: Sequence[Float[Array, "D ..."]]) -> list[Float[Array, "..."]]:
    """Returns the `linear` of each of the weights."""
    found = products(x.reshape(-1, x.shape[-1]), [w.astype(x.dtype).reshape(len(w), -1) for w in weights])
    return [y.reshape(*x.shape[:-1], *w.shape[1:]) for y, w in zip(found, weights)]


# -- rows ------------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Float[Array, "*rows D"], scale: Float[Array, " D"], epsilon: float) -> Float[Array, "*rows D"]:
    """Returns scale x / sqrt(mean(x^2) + epsilon) over the last axis, computed in float32, in the dtype of `x`."""
    return _norms(x.reshape(-1, x.shape[-1]), scale, epsilon).reshape(x.shape)


def _rms_norm_forward(x: jax.Array, scale: jax.Array, epsilon: float) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return rms_norm(x, scale, epsilon), (x, scale)


def _rms_norm_backward(epsilon: float, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    def plain(x: jax.Array, scale: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
        return (x32 * inverse * scale).astype(x.dtype)

    dx, dscale = jax.vjp(plain, *saved)[1](g)
    return dx, dscale


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _norms(x: Float[Array, "M D"], scale: Float[Array, " D"], epsilon: float, interpret: bool = False) -> jax.Array:
    def body(x: Any, scale: Any, out: Any, *, at: "_Rows") -> None:
        def squares(part: Any) -> Any:
            values = triton.load(x.at[at.index, part]).astype(jnp.float32)
            return values * values

        inverse = lax.rsqrt(at.summed(squares) / at.width + epsilon)[:, None]
        for part in at.parts:
            values = triton.load(x.at[at.index, part]).astype(jnp.float32)
            values = values * inverse * triton.load(scale.at[part])
            triton.store(out.at[at.index, part], values.astype(out.dtype))

    found: jax.Array = _over_rows(body, (x, scale), jax.ShapeDtypeStruct(x.shape, x.dtype), interpret)
    return found


@functools.partial(jax.jit, static_argnums=(3, 4))
def added_norm(
    x: Float[Array, "*rows D"],
    y: Float[Array, "*rows D"],
    scale: Float[Array, " D"],
    epsilon: float,
    interpret: bool = False,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """Returns x + y, rounded to their dtype, and its `rms_norm`, with the same bits as two separate operations; it has no gradient."""

    def body(x: Any, y: Any, scale: Any, total: Any, out: Any, *, at: "_Rows") -> None:
        def added(part: Any) -> Any:
            one, other = (triton.load(ref.at[at.index, part]).astype(jnp.float32) for ref in (x, y))
            return (one + other).astype(total.dtype)

        def squares(part: Any) -> Any:
            values = added(part).astype(jnp.float32)
            return values * values

        inverse = lax.rsqrt(at.summed(squares) / at.width + epsilon)[:, None]
        for part in at.parts:
            values = added(part)
            triton.store(total.at[at.index, part], values)
            values = values.astype(jnp.float32) * inverse * triton.load(scale.at[part])
            triton.store(out.at[at.index, part], values.astype(out.dtype))

    rows = x.reshape(-1, x.shape[-1])
    shape = jax.ShapeDtypeStruct(rows.shape, x.dtype)
    found = _over_rows(body, (rows, y.reshape(rows.shape), scale), (shape, shape), interpret)
    return found[0].reshape(x.shape), found[1].reshape(x.shape)


def chosen_logits(
    hidden: Float[Array, "T D"], head: Float[Array, "V D"], targets: Int[Array, " T"], *, interpret: bool = False
) -> Float[Array, " T"]:
    """Returns h . w of each token's target in float32; for a target outside V, that of some entry inside."""

    def body(hidden: Any, head: Any, targets: Any, out: Any, *, at: "_Rows") -> None:
        own = jnp.clip(triton.load(targets.at[at.row]), 0, head.shape[0] - 1)
        own = lax.broadcast_in_dim(own, at.index.shape, (0,))

        def products(part: Any) -> Any:
            h, w = triton.load(hidden.at[at.index, part]), triton.load(head.at[own, part])
            return h.astype(jnp.float32) * w.astype(jnp.float32)

        triton.store(out.at[at.row], at.summed(products))

    shape = jax.ShapeDtypeStruct(hidden.shape[:1], jnp.float32)
    found: jax.Array = _over_rows(body, (hidden, head, targets), shape, interpret)
    return found


class _Rows:
    """The rows of one Triton program, and the pieces of their columns; rows beyond the last repeat the last."""

    def __init__(self, rows: int, width: int, block: int, columns: int) -> None:
        self.width, self.shape = width, (block, columns)
        self.row = jnp.minimum(pl.program_id(0) * block + jnp.arange(block), rows - 1)
        self.index = lax.broadcast_in_dim(self.row, self.shape, (0,))
        place = lax.broadcasted_iota(jnp.int32, self.shape, 1)
        self.parts = [place + first for first in range(0, width, columns)]

    def summed(self, of: Any) -> Any:
        """Returns the row sums of `of(part)` over all parts."""
        total = jnp.zeros(self.shape, jnp.float32)
        for part in self.parts:
            total = total + of(part)
        return jnp.sum(total, axis=1)


def _over_rows(body: Any, arrays: tuple[jax.Array, ...], out: Any, interpret: bool) -> Any:
    """Runs `body(*arrays, *out, at=rows)` over blocks of the first array's rows."""
    rows, width = arrays[0].shape
    columns = min(width & -width, BLOCK // 4)
    block = min(BLOCK // columns, 32)

    def program(*refs: Any) -> None:
        body(*refs, at=_Rows(rows, width, block, columns))

    run = pl.pallas_call(
        program, out_shape=out, grid=(-(-rows // block),), interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
    )  # fmt: skip
    return run(*arrays)
