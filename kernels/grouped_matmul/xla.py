"""grouped_matmul by a loop over blocks of rows, each times its expert's weights, in time linear in the rows, on any device."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxrl_llm.kernels.grouped_matmul import definition
from jaxrl_llm.kernels.grouped_matmul.definition import (
    Blocks,
    Call,
    Plan,
    float32_or_wider,
)

# Blocks are as large as possible while the padding of all experts stays within a share of the rows.
PADDING = 8  # padded rows are at most 1 / PADDING of the rows on average
LEAST, MOST = 8, 512


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    return None


def block_rows(call: Call) -> int:
    """Returns the rows of a block, a power of two; half of a block times the number of experts is at most 1 / PADDING of the rows."""
    most = max(2 * call.rows // (PADDING * call.experts), 1)
    return min(max(1 << (most.bit_length() - 1), LEAST), MOST)


def spread(x: Float[Array, "n D"], plan: Plan, call: Call) -> Float[Array, "P D"]:
    """Returns the buffer's rows of x; each row of x belongs to R / n consecutive rows of the call."""
    return definition.spread(x, plan)


def product(
    x: Float[Array, "P A"], w: Float[Array, "E ..."], blocks: Blocks, call: Call, *, transposed: bool = False
) -> Float[Array, "P B"]:
    """Returns x_p W of the row's expert with W [E, A, B], or x_p W^T with W [E, B, A] where `transposed`; unused blocks are zeros."""
    size = x.shape[0] // len(blocks.expert)
    contract = (((1,), (1 if transposed else 0,)), ((), ()))

    def one(i: Any, out: jax.Array) -> jax.Array:
        weight = lax.dynamic_index_in_dim(w, blocks.expert[i], keepdims=False)
        rows = lax.dynamic_slice_in_dim(x, i * size, size)
        y = lax.dot_general(rows, weight, contract, preferred_element_type=float32_or_wider(x.dtype))
        return lax.dynamic_update_slice_in_dim(out, y.astype(out.dtype), i * size, axis=0)

    columns = w.shape[1 if transposed else 2]
    return lax.fori_loop(0, blocks.used, one, jnp.zeros((x.shape[0], columns), x.dtype))


def weight_gradient(
    x: Float[Array, "P A"], dy: Float[Array, "P B"], blocks: Blocks, call: Call, dtype: jnp.dtype
) -> Float[Array, "E A B"]:
    """Returns sum_p x_p dy_p^T over the rows of each expert, block after block."""
    size = x.shape[0] // len(blocks.expert)
    wide = float32_or_wider(x.dtype)

    def one(i: Any, out: jax.Array) -> jax.Array:
        left, right = (lax.dynamic_slice_in_dim(part, i * size, size) for part in (x, dy))
        add = lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=wide)
        before = lax.dynamic_index_in_dim(out, blocks.expert[i], keepdims=False)
        return lax.dynamic_update_index_in_dim(out, before + add, blocks.expert[i], axis=0)

    shape = (call.experts, x.shape[1], dy.shape[1])
    return lax.fori_loop(0, blocks.used, one, jnp.zeros(shape, wide)).astype(dtype)
