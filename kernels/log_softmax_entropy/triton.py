"""log_softmax_entropy on NVIDIA GPUs: a Pallas kernel, compiled by Triton, that reads the logits once.

Grid: one program per row. It iterates over the row in blocks of depth x width entries; each of the width columns keeps a running
maximum m and the sums of e and e d, d = logit - m, e = exp(d / temperature), rescaled when m grows. A column belongs to
one thread, so the loop has no exchange between threads; the columns are merged at the row's end. Exponentials are base 2.
It reads the logits once and writes three numbers per row; the gradient is `xla`'s, which reads the logits once more and writes as many.

An H200 that reads at 4 TB/s has issue slots for about 12 instructions per entry, so instructions are saved: only the block with entries
beyond a row is masked, and exp2 is the bare instruction, whose results below 2^-126 are 0.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.log_softmax_entropy import xla
from jaxrl_llm.kernels.log_softmax_entropy.api import Call
from jaxrl_llm.kernels.log_softmax_entropy.xla import FLOOR

LOG2E = math.log2(math.e)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of the kernel's blocks.

    Attributes:
      depth: entries of a column in a block.
      width: number of columns.
      warps: warps of a program.
      ahead: number of blocks that are loaded while one is summed.
      flush: whether exp2 is the bare instruction, which returns 0 for results below 2^-126.
    """

    depth: int = 4
    width: int = 1024
    warps: int = 4
    ahead: int = 1
    flush: bool = True

    def __post_init__(self) -> None:
        """Refuses sizes that Triton cannot take."""
        powers = (self.depth, self.width, self.warps)
        if any(n < 1 or n & (n - 1) for n in powers) or self.warps > 32 or self.ahead not in (1, 2):
            raise ValueError(f"depth, width and warps must be powers of 2, warps <= 32 and ahead 1 or 2 (got {self})")


RUNS_ON = ("gpu", "NVIDIA GPUs")
# The default tiles.
TILES = Tiles()


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if dispatch.capability() is None:
        return "it runs on NVIDIA GPUs (this is another GPU)"
    if call.tokens * call.vocabulary >= 2**31:
        return f"its offsets are 32 bits wide: T * V must be below 2**31 (got {call.tokens} * {call.vocabulary})"
    return None


def compute(
    logits: Float[Array, "T V"], targets: Int[Array, " T"], call: Call, tiles: Tiles | None = None
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Returns (logprob, entropy); skipped rows (target -1) are 0, other targets outside V give NaN log-probs."""
    out: tuple[jax.Array, jax.Array] = _compute(call, False, tiles or TILES, logits, targets)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _compute(call: Call, interpret: bool, tiles: Tiles, logits: Any, targets: Any) -> Any:
    return _forward(call, interpret, tiles, logits, targets)[0]


def _forward(call: Call, interpret: bool, tiles: Tiles, logits: jax.Array, targets: jax.Array) -> tuple[Any, Any]:
    keep = targets != -1
    found = row_sums(logits, call, tiles, interpret)
    sums = (jnp.where(keep, x, fill) for x, fill in zip(found, (0.0, 1.0, 0.0)))
    return xla.outputs(call, logits, targets, tuple(sums))


def _backward(call: Call, interpret: bool, tiles: Tiles, saved: Any, cotangents: Any) -> tuple[Any, None]:
    return xla.backward(call, saved, cotangents)


_compute.defvjp(_forward, _backward)


def row_sums(logits: Float[Array, "T V"], call: Call, tiles: Tiles, interpret: bool) -> tuple[Float[Array, " T"], ...]:
    """Returns each row's maximum, sum of e and sum of e d / temperature."""
    rows, columns = logits.shape
    width = min(tiles.width, pl.next_power_of_2(columns))
    row = pl.BlockSpec((None,), lambda i: (i,))
    exp2 = _bare_exp2 if tiles.flush and not interpret else jnp.exp2
    out: tuple[jax.Array, ...] = pl.pallas_call(
        functools.partial(
            _row, sizes=(columns, tiles.depth, width), ahead=tiles.ahead, scale=LOG2E / call.temperature, exp2=exp2
        ),
        out_shape=(jax.ShapeDtypeStruct((rows,), jnp.float32),) * 3,
        out_specs=(row, row, row),
        grid=(rows,),
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=2),
        interpret=interpret,
    )(logits)
    return out[0], out[1], out[2] / call.temperature


def _bare_exp2(x: jax.Array) -> jax.Array:
    """Returns 2^x by the GPU's bare instruction; elsewhere exp2 scales its argument to represent results below 2^-126."""
    (out,) = triton.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )  # fmt: skip
    return out


def _row(
    logits: Any,
    maximum: Any,
    total: Any,
    first: Any,
    *,
    sizes: tuple[int, int, int],
    ahead: int,
    scale: float,
    exp2: Any,
) -> None:
    columns, depth, width = sizes
    row, block = pl.program_id(0), depth * width
    place = lax.broadcasted_iota(jnp.int32, (depth, width), 0) * width
    place += lax.broadcasted_iota(jnp.int32, (depth, width), 1)
    whole, rest = divmod(columns, block)

    def load(i: Any) -> Any:
        return triton.load(logits.at[row, i * block + place])

    def add(z: Any, sums: Any) -> Any:
        m, e_sum, ed_sum = sums
        z = z.astype(jnp.float32)
        new = jnp.maximum(m, jnp.max(z, axis=0))
        shift = m - new
        factor = exp2(shift * scale)
        # -inf excludes an entry; FLOOR does too, and its product with 0 is 0.
        d = jnp.maximum(z - new[None, :], FLOOR)
        e = exp2(d * scale)
        ed_sum = (ed_sum + shift * e_sum) * factor + jnp.sum(e * d, axis=0)
        return new, e_sum * factor + jnp.sum(e, axis=0), ed_sum

    def step(i: Any, state: Any) -> Any:
        # The next blocks are loaded while this one is summed.
        (z, *later), sums = state
        return (*later, load(i + ahead)), add(z, sums)

    zero = jnp.zeros(width, jnp.float32)
    # The lowest maximum is above FLOOR, so that entries equal to FLOOR, also those beyond the row, add nothing.
    sums = (jnp.full(width, FLOOR / 2, jnp.float32), zero, zero)
    ahead = min(ahead, whole)
    coming = tuple(load(i) for i in range(ahead))
    if whole:
        coming, sums = lax.fori_loop(0, whole - ahead, step, (coming, sums))
    if rest:
        index = whole * block + place
        coming = (*coming, triton.load(logits.at[row, index], mask=index < columns, other=-jnp.inf))
    for z in coming:
        sums = add(z, sums)
    m, e_sum, ed_sum = sums
    top = jnp.max(m)
    shift = m - top
    factor = exp2(shift * scale)
    maximum[...], total[...] = top, jnp.sum(e_sum * factor)
    first[...] = jnp.sum((ed_sum + shift * e_sum) * factor)
