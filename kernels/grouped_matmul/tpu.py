"""grouped_matmul on TPUs by JAX's megablox kernels, over the buffer's whole blocks.

Blocks are megablox's tiles of rows, so that no tile is visited for two experts; its tiles divide the other axes, because its results
are wrong where the contracted axis is not a multiple of a tile.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array, Float

from jaxrl_llm.kernels.grouped_matmul import definition
from jaxrl_llm.kernels.grouped_matmul.definition import Blocks, Call, Plan

RUNS_ON = ("tpu", "TPUs")
UNIT = 128  # lanes of a vector, of which every axis of a tile must be a multiple
TILES = (1024, 512, 256, UNIT)


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if call.dtype != "bfloat16":
        return f"it takes bfloat16 (got {call.dtype})"
    if call.width % UNIT or call.inner % UNIT:
        return f"the rows' and the experts' widths must be multiples of {UNIT} (got {call.width} and {call.inner})"
    return None


def block_rows(call: Call) -> int:
    """Returns the rows of a block, which are many where an expert has many rows."""
    return 512 if call.rows >= 2048 * call.experts else UNIT


def spread(x: Float[Array, "n D"], plan: Plan, call: Call) -> Float[Array, "P D"]:
    """Returns the buffer's rows of x; each row of x belongs to R / n consecutive rows of the call."""
    return definition.spread(x, plan)


def product(
    x: Float[Array, "P A"], w: Float[Array, "E ..."], blocks: Blocks, call: Call, *, transposed: bool = False
) -> Float[Array, "P B"]:
    """Returns x_p W of the row's expert with W [E, A, B], or x_p W^T with W [E, B, A] where `transposed`."""
    columns = w.shape[1 if transposed else 2]
    tiling = (_rows(x, blocks), _tile(x.shape[1]), _tile(columns))
    y: jax.Array = gmm(x, w, _sizes(x, blocks), x.dtype, tiling, transpose_rhs=transposed)
    return y


def weight_gradient(
    x: Float[Array, "P A"], dy: Float[Array, "P B"], blocks: Blocks, call: Call, dtype: jnp.dtype
) -> Float[Array, "E A B"]:
    """Returns sum_p x_p dy_p^T over the rows of each expert."""
    tiling = (_rows(x, blocks), _tile(x.shape[1]), _tile(dy.shape[1]))
    dw: jax.Array = tgmm(x.T, dy, _sizes(x, blocks), dtype, tiling)
    return dw


def _rows(x: jax.Array, blocks: Blocks) -> int:
    return x.shape[0] // len(blocks.expert)


def _sizes(x: jax.Array, blocks: Blocks) -> jax.Array:
    """Returns the number of the buffer's rows of each expert."""
    return jnp.diff(blocks.first) * _rows(x, blocks)


def _tile(length: int) -> int:
    """Returns the largest of TILES that divides the axis."""
    return next(size for size in TILES if length % size == 0)
