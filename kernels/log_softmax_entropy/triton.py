"""log_softmax_entropy on NVIDIA GPUs: a Pallas kernel, compiled by Triton, that reads the logits once.

Grid: a program a row. It goes over the row in blocks of DEPTH x WIDTH entries; each of the WIDTH columns keeps a running
maximum m and the sums of e and e x, x = (logit - m) / temperature, e = exp x, rescaled when m grows. A column belongs to
one thread, so the loop has no exchange between threads; the columns are merged at the row's end. Exponentials are base 2.
Bytes: the logits once, three numbers a row; the gradient is `xla`'s, which reads them once more and writes as many.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.log_softmax_entropy import xla
from jaxrl_llm.kernels.log_softmax_entropy.api import Call
from jaxrl_llm.kernels.log_softmax_entropy.xla import FLOOR

DEPTH = 8
WIDTH = 1024
WARPS = 4
LOG2E = math.log2(math.e)


def refusal(call: Call) -> str | None:
    """The reason why this backend cannot take the call, or None."""
    if call.platform != "gpu":
        return f"it runs on NVIDIA GPUs (got {call.platform})"
    if "cuda" not in jax.local_devices(backend="gpu")[0].client.platform_version.lower():
        return "it runs on NVIDIA GPUs (this is another GPU)"
    if call.tokens * call.vocabulary >= 2**31:
        return f"its offsets are 32 bits wide: T * V must be below 2**31 (got {call.tokens} * {call.vocabulary})"
    return None


def compute(
    logits: Float[Array, "T V"], targets: Int[Array, " T"], call: Call
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """(logprob, entropy); skipped rows (target -1) are 0, other targets outside V give NaN log-probs."""
    out: tuple[jax.Array, jax.Array] = _compute(call, False, logits, targets)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _compute(call: Call, interpret: bool, logits: Any, targets: Any) -> Any:
    return _forward(call, interpret, logits, targets)[0]


def _forward(call: Call, interpret: bool, logits: jax.Array, targets: jax.Array) -> tuple[Any, Any]:
    keep = targets != -1
    sums = (jnp.where(keep, x, fill) for x, fill in zip(row_sums(logits, call, interpret), (0.0, 1.0, 0.0)))
    return xla.outputs(call, logits, targets, tuple(sums))


def _backward(call: Call, interpret: bool, saved: Any, cotangents: Any) -> tuple[Any, None]:
    return xla.backward(call, saved, cotangents)


_compute.defvjp(_forward, _backward)


def row_sums(logits: Float[Array, "T V"], call: Call, interpret: bool) -> tuple[Float[Array, " T"], ...]:
    """Each row's maximum, sum of e and sum of e x."""
    rows, columns = logits.shape
    width = min(WIDTH, pl.next_power_of_2(columns))
    row = pl.BlockSpec((None,), lambda i: (i,))
    out: tuple[jax.Array, ...] = pl.pallas_call(
        functools.partial(_row, columns=columns, width=width, scale=LOG2E / call.temperature),
        out_shape=(jax.ShapeDtypeStruct((rows,), jnp.float32),) * 3,
        out_specs=(row, row, row),
        grid=(rows,),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=2),
        interpret=interpret,
    )(logits)
    return out


def _row(logits: Any, maximum: Any, total: Any, first: Any, *, columns: int, width: int, scale: float) -> None:
    row, block = pl.program_id(0), DEPTH * width
    place = lax.broadcasted_iota(jnp.int32, (DEPTH, width), 0) * width
    place += lax.broadcasted_iota(jnp.int32, (DEPTH, width), 1)

    def load(i: Any) -> Any:
        index = i * block + place
        return triton.load(logits.at[row, index], mask=index < columns, other=-jnp.inf)

    def add(z: Any, sums: Any) -> Any:
        m, e_sum, ex_sum = sums
        # -inf takes an entry out; FLOOR does too, and its products with 0 are 0.
        z = jnp.maximum(z.astype(jnp.float32), FLOOR)
        new = jnp.maximum(m, jnp.max(z, axis=0))
        shift = (m - new) * scale
        factor = jnp.exp2(shift)
        x = (z - new[None, :]) * scale
        e = jnp.exp2(x)
        ex_sum = (ex_sum + shift * e_sum) * factor + jnp.sum(e * x, axis=0)
        return new, e_sum * factor + jnp.sum(e, axis=0), ex_sum

    def step(i: Any, state: Any) -> Any:
        # The next block is on its way while this one is summed.
        z, sums = state
        return load(i + 1), add(z, sums)

    zero = jnp.zeros(width, jnp.float32)
    # A lowest maximum above FLOOR: entries that are FLOOR, those beyond the row too, add nothing.
    sums = (jnp.full(width, FLOOR / 2, jnp.float32), zero, zero)
    z, sums = lax.fori_loop(0, pl.cdiv(columns, block) - 1, step, (load(0), sums))
    m, e_sum, ex_sum = add(z, sums)
    top = jnp.max(m)
    shift = (m - top) * scale
    factor = jnp.exp2(shift)
    maximum[...], total[...] = top, jnp.sum(e_sum * factor)
    first[...] = jnp.sum((ex_sum + shift * e_sum) * factor) / LOG2E
