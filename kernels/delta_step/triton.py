"""One token of the gated delta rule on NVIDIA GPUs: a Pallas kernel, compiled by Triton, that reads and writes each state once.

Grid: one program per slot, head and block of the values' columns, which are independent.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.delta_step.api import Call, Tokens

RUNS_ON = ("gpu", "NVIDIA GPUs")
WIDTHS = (16, 32, 64, 128, 256)
COLUMNS = 64
WARPS = 4


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if dispatch.capability() is None:
        return "it runs on NVIDIA GPUs (this is another GPU)"
    if call.key_width not in WIDTHS or call.value_width not in WIDTHS:
        return f"heads must be {', '.join(map(str, WIDTHS))} wide (got {call.key_width}, {call.value_width})"
    return None


def advance(
    tokens: Tokens,
    states: Float[Array, "L S Hv dk dv"],
    layer: Int[Array, ""],
    *,
    columns: int = COLUMNS,
    interpret: bool = False,
) -> tuple[Float[Array, "S Hv dv"], Float[Array, "L S Hv dk dv"]]:
    """Computes as defined by `delta_step`."""
    _, slots, heads, _, width = states.shape
    wide = min(columns, width)
    out: tuple[jax.Array, jax.Array] = pl.pallas_call(
        functools.partial(_step, wide=wide),
        out_shape=(
            jax.ShapeDtypeStruct((slots, heads, width), jnp.float32), jax.ShapeDtypeStruct(states.shape, states.dtype)
        ),
        grid=(slots, heads, width // wide),
        input_output_aliases={1 + len(tokens): 1},
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="delta_step",
    )(layer.reshape(1), *(x.astype(jnp.float32) for x in tokens), states)  # fmt: skip
    return out


def _step(
    layer: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, states: Any, out: Any, after: Any, *, wide: int
) -> None:
    slot, head, block = (pl.program_id(axis) for axis in range(3))
    columns, of = pl.ds(block * wide, wide), head // (states.shape[2] // k.shape[1])
    at, key = (layer[0], slot, head, slice(None), columns), k[slot, of, :][:, None]
    state = jnp.exp(g[slot, head]) * states[at]
    change = beta[slot, head] * (v[slot, head, columns] - jnp.sum(state * key, axis=0))
    state = state + key * change[None, :]
    after[at] = state
    out[slot, head, columns] = jnp.sum(state * q[slot, of, :][:, None], axis=0)
