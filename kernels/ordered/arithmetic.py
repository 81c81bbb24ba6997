"""The bitwise mode's arithmetic: products, sums and functions whose result for a row has the same bits in every program of a process.

XLA may compute one expression with other bits in another program, for four reasons, each of which has its remedy here:

    a sum's order depends on its product's shape         a product is computed in tiles of ROWS rows, of one shape (`matmul`)
    a reduction's order depends on its fusion            a sum over an axis is such a product with ones (`totals`)
    a * b + c is rounded once or twice                   a product that is added to something is pinned, and so rounded (`pin`)
    a rounding to bfloat16 is omitted between fusions    a rounding is an operation of its own, which is kept (`rounded`)

The code of exp and log depends on how many are computed together, so they are written out in additions and multiplications (the
polynomials of Cephes). Additions, multiplications, divisions and square roots are correctly rounded by IEEE 754. Within a tile a row
has the same bits at every place, which the tests check for the installed libraries.

On a mesh each device computes its rows with whole weights (`by_rows`): left to the compiler, a product whose weights are sharded may
become a sum of parts. The assignment of rows to devices changes no bit.

On a GPU, products and norms are the kernels of `hopper`; pins and roundings are those of this file.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import dispatch

ROWS = 64  # rows of a tile
ONES = 8  # columns of ones with which a sum is a product; a single column would be another kind of product

WHOLE = PartitionSpec()  # the spec of arrays that every device of a mesh holds whole

HOPPER = (9, 0)  # compute capability of the supported GPUs

LOG2_E = 1.44269504088896341
# log 2 in two parts; the first has so few digits that its products with exponents are exact.
LOG_2_HIGH, LOG_2_LOW = 0.693359375, -2.12194440e-4
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
LOG = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
       -2.4999993993e-1, 3.3333331174e-1)  # fmt: skip
EXP_LOWEST, EXP_HIGHEST = -87.0, 88.0


def refusal(platform: str) -> str | None:
    """Returns the reason why a platform, on GPUs the kernels' device, has no ordered arithmetic, or None."""
    if platform == "cpu":
        return None
    capability = dispatch.capability() if platform == "gpu" else None
    if capability == HOPPER:
        return None
    found = platform if capability is None else f"a GPU of compute capability {capability[0]}.{capability[1]}"
    return f"its order of sums is fixed on CPUs and on NVIDIA Hopper GPUs, compute capability 9.0 (got {found})"


def on_gpu() -> bool:
    """Returns True where sums are computed by the GPU's kernels (kernels/ordered/hopper.py)."""
    return bool(dispatch.device().platform == "gpu")


def split(rows: int) -> PartitionSpec:
    """Returns how the mesh divides `rows` rows, the first axis of an array; axes that do not divide them are left out."""
    spread = dispatch.spread()
    return WHOLE if spread is None else spread.spec(("batch",), (rows,))


def by_rows(compute: Callable[..., Any], given: Any, found: Any) -> Callable[..., Any]:
    """Returns `compute`, which on a mesh each device runs for its own rows.

    Args:
      compute: maps arrays to arrays whose rows do not depend on each other.
      given: spec of each argument: from `split`, or WHOLE.
      found: specs of the results.
    """
    spread = dispatch.spread()
    if spread is None:
        return compute
    # Kernels' outputs carry no types of the axes over which they vary.
    return jax.shard_map(compute, mesh=spread.mesh, in_specs=given, out_specs=found, check_vma=False)


def pin(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns `x`, rounded before anything is added to it."""
    # The compiler never removes a choice between a product and NaN, as it removes barriers before it fuses.
    return jnp.where(x == x, x, jnp.nan)


def widened(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """Returns the values of `x` rounded to `dtype`, as float32."""
    x = x.astype(jnp.float32)
    return lax.reduce_precision(x, 8, 7) if jnp.dtype(dtype) == jnp.bfloat16 else x


def rounded(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """Returns `x` in `dtype`, by a rounding that the compiler keeps."""
    return widened(x, dtype).astype(dtype)


def added(x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns x + y in the dtype of `x`."""
    return rounded(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)


def matmul(x: Float[Array, "M K"], w: Float[Array, "..."], *, turned: bool = False) -> Float[Array, "M N"]:
    """Returns x @ w for `w` [K, N], or x @ w.T for a `turned` one [N, K], in float32, by tiles of ROWS rows."""
    return over_tiles(lambda tile: tile_product(tile, w, turned=turned), x)


def tile_product(tile: Float[Array, "R K"], w: Float[Array, "..."], *, turned: bool = False) -> Float[Array, "R N"]:
    """Returns the product of one tile, as `matmul`."""
    dimensions = (((1,), (1 if turned else 0,)), ((), ()))
    return lax.dot_general(tile, w, dimensions, preferred_element_type=jnp.float32)


def over_tiles(compute: Callable[..., Any], *rows: jax.Array) -> Any:
    """Applies `compute` to each tile of ROWS rows and concatenates the results along the rows; the last tile is padded with zeros."""
    count = rows[0].shape[0]
    tiles = -(-count // ROWS)
    filled = [jnp.pad(x, ((0, tiles * ROWS - count), *((0, 0),) * (x.ndim - 1))) for x in rows]
    split = [x.reshape(tiles, ROWS, *x.shape[1:]) for x in filled]
    out = lax.map(lambda parts: compute(*parts), tuple(split))
    return jax.tree.map(lambda y: y.reshape(tiles * ROWS, *y.shape[2:])[:count], out)


def totals(x: Float[Array, "M K"]) -> Float[Array, " M"]:
    """Returns the sum of each row."""
    return matmul(x, jnp.ones((x.shape[1], ONES)))[:, 0]


def linear(x: Float[Array, "*rows inputs"], weights: Float[Array, "..."], inputs: int) -> Float[Array, "..."]:
    """Contracts the last `inputs` axes of `x` with the first ones of the weights, both in the dtype of `x`, with float32 sums."""
    if weights.dtype != x.dtype:  # rounded before devices gather them
        weights = rounded(weights, x.dtype)
    rows = split(x.shape[0])
    y: jax.Array = by_rows(partial(_linear, inputs=inputs), (rows, WHOLE), rows)(x, weights)
    return y


def _linear(x: jax.Array, weights: jax.Array, *, inputs: int) -> jax.Array:
    if on_gpu():
        from jaxrl_llm.kernels.ordered import hopper

        return hopper.linear(x, weights, inputs)
    width = math.prod(weights.shape[:inputs])
    w = widened(weights, x.dtype).reshape(width, -1)
    y = matmul(x.reshape(-1, width).astype(jnp.float32), w)
    return rounded(y.reshape(*x.shape[: x.ndim - inputs], *weights.shape[inputs:]), x.dtype)


def linears(x: Float[Array, "*rows D"], weights: Sequence[Float[Array, "D ..."]]) -> list[Float[Array, "..."]]:
    """Returns the `linear` of each of the weights, whose first axis is contracted; on a GPU by one kernel, which has no gradient."""
    if not on_gpu():
        return [linear(x, w, 1) for w in weights]
    from jaxrl_llm.kernels.ordered import hopper

    rows = split(x.shape[0])
    weights = [w if w.dtype == x.dtype else rounded(w, x.dtype) for w in weights]
    found: list[jax.Array] = by_rows(hopper.linears, (rows, WHOLE), rows)(x, weights)
    return found


def rms_norm(x: Float[Array, "*rows D"], scale: Float[Array, " D"], epsilon: float) -> Float[Array, "*rows D"]:
    """Returns scale x / sqrt(mean(x^2) + epsilon) over the last axis, computed in float32, in the dtype of `x`."""
    rows = split(x.shape[0])
    y: jax.Array = by_rows(partial(_rms_norm, epsilon=epsilon), (rows, WHOLE), rows)(x, scale)
    return y


def _rms_norm(x: jax.Array, scale: jax.Array, *, epsilon: float) -> jax.Array:
    if on_gpu():
        from jaxrl_llm.kernels.ordered import hopper

        return hopper.rms_norm(x, scale, epsilon)
    x32 = x.astype(jnp.float32)
    return rounded(x32 * inverse_rms(x32, epsilon) * scale, x.dtype)


def added_norm(
    x: Float[Array, "*rows D"], y: Float[Array, "*rows D"], scale: Float[Array, " D"], epsilon: float
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """Returns `added(x, y)` and its `rms_norm`; on a GPU by one kernel, which has no gradient."""
    if not on_gpu():
        total = added(x, y)
        return total, rms_norm(total, scale, epsilon)
    from jaxrl_llm.kernels.ordered import hopper

    rows = split(x.shape[0])
    run = by_rows(partial(hopper.added_norm, epsilon=epsilon), (rows, rows, WHOLE), (rows, rows))
    found: tuple[jax.Array, jax.Array] = run(x, y, scale)
    return found


def inverse_rms(x: Float[Array, "*rows D"], epsilon: float) -> Float[Array, "*rows 1"]:
    """Returns 1 / sqrt(mean(x^2) + epsilon) over the last axis, float32."""
    width = x.shape[-1]
    mean = pin(totals(pin(x * x).reshape(-1, width)) * (1 / width))
    return pin(1 / pin(jnp.sqrt(mean + epsilon))).reshape(*x.shape[:-1], 1)


def sums_by_key(keys: Int[Array, " n"], x: Float[Array, "n D"], count: int) -> Float[Array, "count D"]:
    """Returns the float32 sum of the rows of `x` that have each key from 0 on, in an order that their places and keys alone decide.

    Rows are sorted by key, and partial sums of 1, 2, 4, ... rows are added to those that end where they begin; no two write to one place.
    """
    n = len(keys)
    at = jnp.arange(n, dtype=jnp.int32)
    keys, order = lax.sort_key_val(keys, at, is_stable=True)

    def add(step: jax.Array, sums: jax.Array) -> jax.Array:
        before = at - (1 << step)
        same = (before >= 0) & (keys[before] == keys)
        return sums + jnp.where(same[:, None], sums[before], 0)

    sums = lax.fori_loop(0, (n - 1).bit_length(), add, x[order].astype(jnp.float32))
    wanted = jnp.arange(count, dtype=keys.dtype)
    last = jnp.searchsorted(keys, wanted, side="right") - 1
    return jnp.where(((last >= 0) & (keys[last] == wanted))[:, None], sums[last], 0)


def sigmoid(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns 1 / (1 + exp(-x)), float32."""
    return 1 / (1 + exp(-x))


def exp(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns e^x in float32 within one or two units in the last place: 0 below EXP_LOWEST, and e^EXP_HIGHEST above EXP_HIGHEST."""
    bounded = jnp.clip(x, EXP_LOWEST, EXP_HIGHEST)
    power = lax.round(bounded * LOG2_E, lax.RoundingMethod.TO_NEAREST_EVEN)
    r = (bounded - power * LOG_2_HIGH) - pin(power * LOG_2_LOW)
    y = pin(_polynomial(EXP, r) * pin(r * r)) + r + 1
    scale = lax.bitcast_convert_type((power.astype(jnp.int32) + 127) << 23, jnp.float32)
    return jnp.where(x < EXP_LOWEST, 0.0, pin(y * scale))


def log(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the natural logarithm in float32 within one or two units in the last place, for positive normal numbers."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    power = (bits >> 23) - 127
    m = lax.bitcast_convert_type((bits & 0x7FFFFF) | 0x3F800000, jnp.float32)  # x = m 2^power
    large = m > math.sqrt(2)
    t = jnp.where(large, m * 0.5, m) - 1
    e = (power + large).astype(jnp.float32)
    square = pin(t * t)
    y = pin(pin(_polynomial(LOG, t) * t) * square) + pin(e * LOG_2_LOW) - 0.5 * square
    out = t + y + e * LOG_2_HIGH  # exact products
    return jnp.where(jnp.isfinite(x), out, x)


def _polynomial(coefficients: tuple[float, ...], x: jax.Array) -> jax.Array:
    """Evaluates c_0 x^n + c_1 x^(n - 1) + ... + c_n."""
    y = jnp.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        y = pin(y * x) + c
    return y
