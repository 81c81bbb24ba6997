"""The shared parts of all backends of grouped_matmul: the static description of a call, and the buffer of the products.

The buffer holds the rows of one expert after another, each expert's rows rounded up to whole blocks by rows of zeros, so that every
block has one expert. It has room for the worst case of a call; blocks past the last one in use have undefined contents, which are never
read. The rounding costs at most E (rows of a block - 1) rows: nothing is of E times the rows' size.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class Call:
    """The static description of a call, by which a backend accepts or refuses it.

    Attributes:
      platform: platform on which the call runs, "cpu", "gpu" or "tpu".
      dtype: name of the dtype of the rows, in which products are computed.
      rows: number of rows of the call, R; each is an assignment of a token to an expert.
      experts: number of experts, E.
      width: number of columns of the rows, A or D.
      inner: number of columns of the result, B, or the width of an expert, M.
      gated: whether the call is an expert MLP, whose first product has 2 M columns.
    """

    platform: str
    dtype: str
    rows: int
    experts: int
    width: int
    inner: int
    gated: bool


class Blocks(NamedTuple):
    """The experts of the buffer's blocks.

    Attributes:
      expert: int32 [N], expert of each block; any expert past the last block in use.
      first: int32 [E + 1], first block of each expert, and the number of blocks in use.
      sizes: int32 [E], number of rows of each expert without padding; they come first.
    """

    expert: jax.Array
    first: jax.Array
    sizes: jax.Array

    @property
    def used(self) -> jax.Array:
        """The number of blocks in use, int32."""
        return self.first[-1]


class Plan(NamedTuple):
    """The places of a call's rows in the buffer of P rows.

    Attributes:
      blocks: the experts of the buffer's blocks.
      row: int32 [P], row of the call that each row of the buffer holds; R where it holds zeros.
      slot: int32 [R], row of the buffer that holds each row of the call; P where no expert takes it.
    """

    blocks: Blocks
    row: jax.Array
    slot: jax.Array


def most_blocks(rows: int, experts: int, block: int) -> int:
    """Returns the most blocks of `block` rows that `rows` rows of `experts` experts can need."""
    return max((rows + min(experts, rows) * (block - 1)) // block, 1)


def plan_of_sizes(sizes: Int[Array, " E"], rows: int, block: int) -> Plan:
    """Returns the plan of `rows` rows that are sorted by expert, `sizes` of each; rows past their sum are left out."""
    ends = jnp.cumsum(sizes.astype(jnp.int32))
    expert = jnp.repeat(jnp.arange(len(sizes), dtype=jnp.int32), sizes, total_repeat_length=rows)
    expert = jnp.where(jnp.arange(rows) < ends[-1], expert, len(sizes))
    return _plan(jnp.concatenate([jnp.zeros(1, jnp.int32), ends]), expert, block)


def plan_of_experts(experts: Int[Array, " R"], count: int, block: int) -> Plan:
    """Returns the plan of rows in any order; ids outside [0, count) are left out. Rows of one expert keep their order."""
    key = jnp.where((experts >= 0) & (experts < count), experts, count).astype(jnp.int32)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    expert = key[order]
    # Counts by comparisons are one kernel each, where searches and running sums are several.
    starts = jnp.sum(key < jnp.arange(count + 1)[:, None], axis=1, dtype=jnp.int32)
    plan = _plan(starts, expert, block)
    slot = jnp.zeros_like(order).at[order].set(plan.slot, unique_indices=True)
    return plan._replace(row=_take(order, plan.row, len(order)), slot=slot)


def _plan(starts: jax.Array, expert: jax.Array, block: int) -> Plan:
    """Returns the plan of sorted rows, from the first row of each expert [E + 1] and the expert of each row (E: left out)."""
    rows, count = len(expert), len(starts) - 1
    most = most_blocks(rows, count, block)
    sizes = jnp.diff(starts)
    needed = -(-sizes // block)
    earlier = jnp.arange(count) < jnp.arange(count + 1)[:, None]
    first = jnp.sum(jnp.where(earlier, needed, 0), axis=1, dtype=jnp.int32)
    of_block = jnp.sum(first[1:] <= jnp.arange(most)[:, None], axis=1, dtype=jnp.int32)
    of_block = jnp.minimum(of_block, count - 1)
    # From the buffer to the rows.
    place = jnp.arange(most * block, dtype=jnp.int32)
    owner = jnp.repeat(of_block, block)
    within = place - first[owner] * block
    used = (within < sizes[owner]) & (place < first[-1] * block)
    row = jnp.where(used, starts[owner] + within, rows)
    # From the rows to the buffer.
    known = jnp.minimum(expert, count - 1)
    slot = first[known] * block + jnp.arange(rows, dtype=jnp.int32) - starts[known]
    slot = jnp.where(expert < count, slot, most * block)
    return Plan(blocks=Blocks(expert=of_block, first=first, sizes=sizes), row=row, slot=slot)


def _take(x: jax.Array, index: jax.Array, fill: int) -> jax.Array:
    return x.at[index].get(mode="fill", fill_value=fill)


def rows_of(x: Float[Array, "R *A"], index: Int[Array, " P"]) -> Float[Array, "P *A"]:
    """Returns x[index], with zeros where the index is the number of rows."""
    return x.at[index].get(mode="fill", fill_value=0)


def spread(x: Float[Array, "n D"], plan: Plan) -> Float[Array, "P D"]:
    """Returns the buffer's rows of x; each row of x belongs to len(plan.slot) / n consecutive rows of the call."""
    return rows_of(x, plan.row // (len(plan.slot) // len(x)))


def float32_or_wider(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype in which products of `dtype` are summed."""
    return jnp.promote_types(dtype, jnp.float32)


def activation(gate_up: Float[Array, "P M2"]) -> Float[Array, "P M"]:
    """Returns silu(g) u of g and u side by side, computed in float32 and rounded once."""
    gate, up = jnp.split(gate_up.astype(float32_or_wider(gate_up.dtype)), 2, axis=1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def activation_gradient(
    gate_up: Float[Array, "P M2"], dh: Float[Array, "P M"], weight: Float[Array, " P"]
) -> tuple[Float[Array, "P M"], Float[Array, "P M2"], Float[Array, " P"]]:
    """Returns w h for h = silu(g) u, w times the gradient of g and u side by side, and <dh, h>."""
    wide = float32_or_wider(gate_up.dtype)
    g, u = jnp.split(gate_up.astype(wide), 2, axis=1)
    dh, w = dh.astype(wide), weight.astype(wide)[:, None]
    share = jax.nn.sigmoid(g)
    silu = g * share
    both = jnp.concatenate([w * dh * u * (share + silu * (1 - share)), w * dh * silu], axis=1)
    return (w * silu * u).astype(gate_up.dtype), both.astype(gate_up.dtype), (dh * silu * u).sum(axis=1)
