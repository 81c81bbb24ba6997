"""grouped_matmul in plain jnp, as the specification: every expert's product of all rows, masked, with E times the work."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.kernels.grouped_matmul import definition
from jaxrl_llm.kernels.grouped_matmul.definition import (
    Blocks,
    Call,
    Plan,
    float32_or_wider,
)


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if call.rows * call.experts > 2**22:
        return f"it multiplies all rows by all experts (got {call.rows} rows and {call.experts} experts): use xla"
    return None


def block_rows(call: Call) -> int:
    """Returns the rows of a block, 1, so that the buffer has no padding."""
    return 1


def spread(x: Float[Array, "n D"], plan: Plan, call: Call) -> Float[Array, "P D"]:
    """Returns the buffer's rows of x; each row of x belongs to R / n consecutive rows of the call."""
    return definition.spread(x, plan)


def product(
    x: Float[Array, "P A"], w: Float[Array, "E ..."], blocks: Blocks, call: Call, *, transposed: bool = False
) -> Float[Array, "P B"]:
    """Returns x_p W of the row's expert with W [E, A, B], or x_p W^T with W [E, B, A] where `transposed`."""
    wide = float32_or_wider(x.dtype)
    out = jnp.zeros((x.shape[0], w.shape[1 if transposed else 2]), wide)
    for expert in range(w.shape[0]):
        weight = w[expert].T if transposed else w[expert]
        y = jnp.matmul(x, weight, preferred_element_type=wide, precision="highest")
        out = jnp.where(_mine(blocks, expert), y, out)
    return out.astype(x.dtype)


def weight_gradient(
    x: Float[Array, "P A"], dy: Float[Array, "P B"], blocks: Blocks, call: Call, dtype: jnp.dtype
) -> Float[Array, "E A B"]:
    """Returns sum_p x_p dy_p^T over the rows of each expert."""
    wide = float32_or_wider(x.dtype)

    def one(expert: int) -> jax.Array:
        mine = _mine(blocks, expert)
        rows = jnp.where(mine, x, 0).T, jnp.where(mine, dy, 0)
        return jnp.matmul(*rows, preferred_element_type=wide, precision="highest").astype(dtype)

    return jnp.stack([one(expert) for expert in range(call.experts)])


def _mine(blocks: Blocks, expert: int) -> jax.Array:
    """Returns bool [P, 1], True for the expert's rows."""
    place = jnp.arange(len(blocks.expert))[:, None]
    return (place >= blocks.first[expert]) & (place < blocks.first[expert + 1])
