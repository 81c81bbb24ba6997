"""Computes decode attention in plain jnp, as the specification and as the backend of CPUs; it copies the layer's cache."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.decode_attention import cache
from jaxrl_llm.kernels.decode_attention.api import Call

MASKED = -1e30


def refusal(call: Call) -> str | None:
    """Returns None, since every call is supported."""
    return None


def attend(
    q: Float[Array, "S H C"],
    keys: Float[Array, "L P *T_K C"],
    values: Float[Array, "L P *T_K C"],
    layer: Int[Array, ""],
    positions: Int[Array, " S"],
    call: Call,
    table: Int[Array, "S N"] | None = None,
) -> Float[Array, "S H C"]:
    """Computes attention as defined by `decode_attention`; softmax in float32, products in the dtype of `q` with float32 sums."""
    k, v = (cache.of_layer(x, layer, table).astype(q.dtype) for x in (keys, values))
    grouped = q.reshape(len(q), call.kv_heads, -1, call.width)
    scores = jnp.einsum("skgc,stkc->skgt", grouped, k, preferred_element_type=jnp.float32) * call.width**-0.5
    entries = jnp.arange(call.length)
    seen = entries <= positions[:, None]
    if call.window is not None:
        seen &= positions[:, None] - entries < call.window
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1)
    out = jnp.einsum("skgt,stkc->skgc", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)
