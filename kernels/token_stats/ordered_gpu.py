"""token_stats in one order on Hopper: the kernel of running sums over fixed shares of the vocabulary, the sum of these, and the target's logit.

A share's tiles, and their columns, are summed in one order, and the shares depend on the vocabulary and the chip alone, so the sums of
a row have the same bits whatever other rows there are. The last tile may overlap the one before, whose entries it leaves out. Every row
has its own temperature, as a sampler's slots have; the target's logit is a separate sum over the width.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.ordered import hopper
from jaxrl_llm.kernels.token_stats import fused, mosaic_gpu
from jaxrl_llm.kernels.token_stats.definition import Call
from jaxrl_llm.kernels.token_stats.fused import FLOOR, Inputs
from jaxrl_llm.kernels.token_stats.mosaic_gpu import LOG2E, TILES, Plan, Tiles

UNIT = 16  # entries of which the vocabulary must be a multiple, for TMA
SLAB = 16  # entries of a tile's logits that are written at once
BLOCK = 64  # tokens whose shares one program sums

backward = mosaic_gpu.Kernels(tiles=TILES).backward


def refusal(call: Call) -> str | None:
    """Returns the reason why the kernels cannot take the call, or None."""
    if reason := fused.refusal(call):
        return reason
    if call.width % TILES.depth or call.vocabulary % UNIT or call.vocabulary < TILES.columns:
        sizes = f"{call.width} and {call.vocabulary}"
        return f"the width must be a multiple of {TILES.depth}, the vocabulary of {UNIT} and at least {TILES.columns} (got {sizes})"
    return None


def forward(inputs: Inputs, call: Call) -> tuple[dict[str, jax.Array], None]:
    """Returns the sums over the vocabulary of each token; there are no residuals for the backward pass."""
    temperature = jnp.full(call.tokens, call.temperature, jnp.float32)
    found = sums(inputs.hidden, inputs.head, inputs.targets, temperature, square="sum_p2" in call.outputs)
    if "uniform_logprob" in call.outputs:
        found["logit_sum"] = fused.logit_sums(inputs.hidden, inputs.head.astype(inputs.hidden.dtype))
    return found, None


def sums(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " T"],
    temperature: Float[Array, " T"],
    *,
    square: bool = False,
) -> dict[str, Float[Array, " T"]]:
    """Returns maximum, total, first, (square), log_total and logprob of each row, by their names in `fused`."""
    shares, _ = read(hidden, head, temperature, 4 if square else 3)
    found = logprobs(shares, hidden, head, targets, temperature)
    names = ("maximum", "total", "first", *(["square"] if square else []), "log_total", "logprob")
    return dict(zip(names, found, strict=True))


def read(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    temperature: Float[Array, " T"],
    count: int = 3,
    *,
    logits: bool = False,
    tiles: Tiles = TILES,
) -> tuple[Float[Array, "count splits T_filled"], Float[Array, "T V"] | None]:
    """Returns the first `count` of maximum, total, first and square of each share of the vocabulary, in base 2, and the logits if requested.

    Rows are padded to whole tiles.
    """
    tokens, (vocabulary, width) = hidden.shape[0], head.shape
    more = (0, -tokens % (tiles.cluster * 2 * tiles.rows))
    hidden, temperature = jnp.pad(hidden, (more, (0, 0))), jnp.pad(temperature, more, constant_values=1.0)
    work = mosaic_gpu.plan(tiles, hidden.shape[0], width, -(-vocabulary // tiles.columns))
    if vocabulary % tiles.columns:
        work = replace(work, last=vocabulary - tiles.columns)
    shares, *z = _shares(hidden, head.astype(hidden.dtype), temperature, work, count, logits)
    return shares, z[0][:tokens] if z else None


def logprobs(
    shares: Float[Array, "count splits T_filled"],
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " T"],
    temperature: Float[Array, " T"],
) -> tuple[Float[Array, " T"], ...]:
    """Returns maximum, total, first, (square), log_total and the targets' logprob from the results of `read`."""
    more = (0, shares.shape[2] - len(hidden))
    chosen = hopper.chosen_logits(hidden, head.astype(hidden.dtype), targets)
    found = _summed(shares, jnp.pad(chosen, more), jnp.pad(temperature, more, constant_values=1.0))
    return tuple(x[: len(hidden)] for x in found)


def _shares(
    hidden: jax.Array, head: jax.Array, temperature: jax.Array, work: Plan, count: int, logits: bool
) -> list[jax.Array]:
    """Returns the results of `read` for whole tiles of rows."""
    tiles, rows, kept = work.tiles, work.tiles.rows, 1 + logits

    def body(hidden: Any, head: Any, temperature: Any, out: Any, *rest: Any) -> None:
        z_out, (stats, own, loaded, *stream) = rest[: kept - 1], rest[kept - 1 :]
        slab: Any = stream.pop(0) if logits else None
        wg = lax.axis_index("warpgroup")

        def start(row: Any) -> Any:
            plgpu.copy_gmem_to_smem(temperature.at[pl.ds(row, rows)], own.at[wg], loaded.at[wg])
            plgpu.barrier_wait(loaded.at[wg])
            zero = jnp.zeros(rows, jnp.float32)
            return (jnp.full(rows, FLOOR, jnp.float32), *[zero] * (count - 1))

        def leave(z: Any, n: Any, row: Any) -> None:
            for i, j in enumerate(range(0, tiles.columns, SLAB)):
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                slab[wg, i % 2] = z[:, j : j + SLAB]
                plgpu.commit_smem()
                to = z_out[0].at[pl.ds(row, rows), pl.ds(work.first_entry(n) + j, SLAB)]
                plgpu.copy_smem_to_gmem(slab.at[wg, i % 2], to)

        def tile(z: Any, n: Any, row: Any, carry: Any) -> Any:
            if logits:
                leave(z, n, row)
            if work.last is not None:
                entry = lax.broadcasted_iota(jnp.int32, z.shape, 1) + work.first_entry(n)
                z = jnp.where(entry >= n * tiles.columns, z, FLOOR)
            return mosaic_gpu.add_tile(z, carry, LOG2E / own[wg], tiles.slice)

        def finish(carry: Any, split: Any, row: Any) -> None:
            for i, x in enumerate(carry):
                stats[wg, i] = x
            plgpu.commit_smem()
            for i in range(count):
                plgpu.copy_smem_to_gmem(stats.at[wg, i], out.at[i, split, pl.ds(row, rows)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        mosaic_gpu.stream_of((hidden, head), 0, work, stream, (start, tile, finish))

    shapes = (count, work.splits, hidden.shape[0]), (hidden.shape[0], len(head))
    scratch = [
        plgpu.SMEM((2, count, rows), jnp.float32),
        plgpu.SMEM((2, rows), jnp.float32),
        plgpu.Barrier(num_arrivals=1, num_barriers=2),
        *([mosaic_gpu.swizzled((2, 2, rows, SLAB), jnp.float32)] if logits else []),
    ]
    out_type = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes[:kept]]
    run = mosaic_gpu.kernel_of(body, out_type, scratch, work)
    found: list[jax.Array] = list(run(hidden, mosaic_gpu.turned(head, tiles), temperature))
    return found


def _summed(
    shares: Float[Array, "count splits T"],
    chosen: Float[Array, " T"],
    temperature: Float[Array, " T"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, " T"], ...]:
    """Returns maximum, total, first, (square), log_total and logprob from those of the shares, merged in their order."""
    count, splits, tokens = shares.shape
    run = pl.pallas_call(
        functools.partial(_add_shares, splits=splits),
        out_shape=(jax.ShapeDtypeStruct((tokens,), jnp.float32),) * (count + 2),
        grid=(tokens // BLOCK,),
        compiler_params=triton.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
    )
    found: tuple[jax.Array, ...] = run(shares, chosen, temperature)
    return found


def _add_shares(shares: Any, chosen: Any, temperature: Any, *out: Any, splits: int) -> None:
    count = len(out) - 2
    row = pl.program_id(0) * BLOCK + jnp.arange(BLOCK)
    own = triton.load(temperature.at[row])
    scale = LOG2E / own

    def highest(split: Any, maximum: Any) -> Any:
        return jnp.maximum(maximum, triton.load(shares.at[0, split, row]))

    maximum = lax.fori_loop(0, splits, highest, jnp.full(BLOCK, FLOOR, jnp.float32))

    def add(split: Any, kept: Any) -> Any:
        before, total, first, *square = (triton.load(shares.at[i, split, row]) for i in range(count))
        shift = (before - maximum) * scale
        factor = jnp.exp2(shift)
        new = total * factor, (first + shift * total) * factor, *(x * factor * factor for x in square)
        return tuple(a + b for a, b in zip(kept, new))

    total, first, *square = lax.fori_loop(0, splits, add, (jnp.zeros(BLOCK, jnp.float32),) * (count - 1))
    log_total = jnp.log(total)
    logprob = (triton.load(chosen.at[row]) - maximum) / own - log_total
    for ref, x in zip(out, (maximum, total, first / LOG2E, *square, log_total, logprob), strict=True):
        triton.store(ref.at[row], x)
