"""Computes the gated delta rule for one new token per slot, on the states of its layer in place: one function with several backends."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import dispatch

# Tried in this order; a backend is the module of that name, with `refusal(call)` and `advance(tokens, states, layer)`.
BACKENDS = ("triton", "reference")

Tokens = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]  # q, k, v, g, beta


@dataclass(frozen=True, kw_only=True)
class Call:
    """The static description of a call, by which a backend accepts or refuses it.

    Attributes:
      platform: platform on which the call runs, "cpu", "gpu" or "tpu".
      key_width: width of a query and a key.
      value_width: width of a value.
    """

    platform: str
    key_width: int
    value_width: int


def delta_step(
    q: Float[Array, "S Hk dk"],
    k: Float[Array, "S Hk dk"],
    v: Float[Array, "S Hv dv"],
    g: Float[Array, "S Hv"],
    beta: Float[Array, "S Hv"],
    states: Float[Array, "L S Hv dk dv"],
    layer: Int[Array, ""],
    *,
    backend: str | None = None,
) -> tuple[Float[Array, "S Hv dv"], Float[Array, "L S Hv dk dv"]]:
    """Computes the outputs of one token per slot, float32, and the states with those of `layer` after it.

    Args:
      q: queries, already normalised and scaled; value heads h r .. h r + r - 1 read query and key head h.
      k: keys, already normalised.
      v: values.
      g: logarithms of the decays, float32 and at most 0.
      beta: strengths of the updates in [0, 1], float32. A token with beta = 0 and g = 0 changes no state.
      states: the states of all layers, float32; a donated array is written in place.
      layer: number of the layer whose states are read and written, in 0..L-1.
      backend: one of BACKENDS, or None for the first that supports the call.

    Raises:
      ValueError: value heads cannot share the key heads evenly, or the named backend is unknown or does not support the call.
    """
    heads, shared = states.shape[2], k.shape[1]
    if heads % shared:
        raise ValueError(f"{heads} value heads cannot share {shared} key heads evenly")
    call = Call(platform=dispatch.device().platform, key_width=states.shape[3], value_width=states.shape[4])
    out: tuple[jax.Array, jax.Array] = dispatch.choose("delta_step", BACKENDS, call, backend).advance(
        (q, k, v, g, beta), states, layer
    )
    return out
