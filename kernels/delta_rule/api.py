"""Computes the gated delta rule (https://arxiv.org/abs/2412.06464) over packed rows: one function with several backends."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.delta_rule.definition import CHUNK

# Tried in this order; a backend is the module of that name, with `refusal(call)` and `rule(tokens, segments, state, call)`.
BACKENDS = ("triton", "xla", "reference")

State = Float[Array, "B Hv dk dv"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """The static description of a call, by which a backend accepts or refuses it.

    Attributes:
      platform: platform on which the call runs, "cpu", "gpu" or "tpu".
      rows: number of rows of the batch.
      tokens: tokens of a row, a multiple of `size`.
      size: tokens of a chunk.
      key_heads: heads of queries and keys.
      value_heads: heads of values, each with a state.
      key_width: width of a query and a key.
      value_width: width of a value.
    """

    platform: str
    rows: int
    tokens: int
    size: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int


def delta_rule(
    q: Float[Array, "B T Hk dk"],
    k: Float[Array, "B T Hk dk"],
    v: Float[Array, "B T Hv dv"],
    g: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    segments: Int[Array, "B T"],
    state: State,
    *,
    size: int = CHUNK,
    backend: str | None = None,
) -> tuple[Float[Array, "B T Hv dv"], State]:
    """Computes the outputs of all tokens, float32, and the state after the last one.

    Args:
      q: queries, already normalised and scaled; value heads h r .. h r + r - 1 read query and key head h.
      k: keys, already normalised.
      v: values. Where q, k and v are all bfloat16, products take them as they are; else as float32.
      g: logarithms of the decays, float32 and at most 0.
      beta: strengths of the updates in [0, 1], float32. A token with beta = 0 and g = 0 changes no state, which is how callers mask padding.
      segments: the segment of each token; tokens of one segment are contiguous, and no state passes from one segment to the next.
      state: the state before the first token, which belongs to the first token's segment.
      size: tokens of a chunk, a power of 2. The backward pass keeps one state per chunk and recomputes most of the rest.
      backend: one of BACKENDS, or None for the first that supports the call.

    Raises:
      ValueError: the size is not a power of 2, value heads cannot share the key heads evenly, or the named backend is unknown or does
        not support the call.
    """
    rows, length, key_heads, key_width = k.shape
    value_heads, value_width = v.shape[2:]
    if size < 1 or size & (size - 1):
        raise ValueError(f"size must be a power of 2, tokens of a chunk (got {size})")
    if value_heads % key_heads:
        raise ValueError(f"{value_heads} value heads cannot share {key_heads} key heads evenly")
    fill = -length % size
    call = Call(
        platform=dispatch.device().platform,
        rows=rows,
        tokens=length + fill,
        size=size,
        key_heads=key_heads,
        value_heads=value_heads,
        key_width=key_width,
        value_width=value_width,
    )
    module = dispatch.choose("delta_rule", BACKENDS, call, backend)
    # Tokens that fill the last chunk have beta = 0 and g = 0, and belong to the last segment.
    dtype = jnp.bfloat16 if {x.dtype for x in (q, k, v)} == {jnp.dtype(jnp.bfloat16)} else jnp.float32
    numbers = (*(x.astype(dtype) for x in (q, k, v)), g.astype(jnp.float32), beta.astype(jnp.float32))
    tokens = tuple(_filled(x, fill, "constant") for x in numbers)
    out, last = module.rule(tokens, _filled(segments, fill, "edge"), state.astype(jnp.float32), call)
    return out[:, :length], last


def _filled(x: jax.Array, count: int, mode: str) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, count), *((0, 0),) * (x.ndim - 2)), mode=mode) if count else x
