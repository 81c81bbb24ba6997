"""Spreads rows over the buffer of grouped_matmul by a Pallas Triton kernel: each row is read once and written to its places.

A gather would read every row from memory once per expert, because equal rows are far apart in the buffer.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from jaxrl_llm.kernels.grouped_matmul.definition import Plan

MOST = 4096  # columns of a row that are copied at once


def spread(x: Float[Array, "n D"], plan: Plan, *, interpret: bool = False) -> Float[Array, "P D"]:
    """Returns the buffer's rows of x; each row of x belongs to len(plan.slot) / n consecutive rows of the call.

    Rows of the buffer without a row of the call are zeros in the blocks in use, and undefined in the others.
    """
    rows, width = x.shape
    blocks = len(plan.blocks.expert)
    size = len(plan.row) // blocks
    number, expert = jnp.arange(blocks), plan.blocks.expert
    left = plan.blocks.sizes[expert] - (number - plan.blocks.first[expert]) * size
    filled = jnp.where(number < plan.blocks.used, jnp.minimum(left, size), size)
    body = functools.partial(_row, rows=rows, size=size, columns=min(width & -width, MOST))
    run = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((len(plan.row), width), x.dtype),
        grid=(rows + blocks,),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )
    out: jax.Array = run(plan.slot.reshape(rows, -1), filled, x)
    return out


def _row(slots: Any, filled: Any, x: Any, out: Any, *, rows: int, size: int, columns: int) -> None:
    """Writes one row of x to its places, or zeros up to the end of one block."""
    program = pl.program_id(0)
    parts = [pl.ds(first, columns) for first in range(0, x.shape[1], columns)]

    @pl.when(program < rows)
    def _spread() -> None:
        values = [x[program, part] for part in parts]
        for j in range(slots.shape[1]):
            slot = slots[program, j]

            @pl.when(slot < out.shape[0])
            def _write(slot: Any = slot) -> None:
                for part, value in zip(parts, values):
                    out[slot, part] = value

    @pl.when(program >= rows)
    def _fill() -> None:
        block = program - rows

        def one(row: Any, _: None) -> None:
            for part in parts:
                out[block * size + row, part] = jnp.zeros(columns, out.dtype)

        lax.fori_loop(filled[block], size, one, None)
