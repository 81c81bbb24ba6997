"""Computes queries, keys and values of a gated delta rule from its layer's projection: one function with several backends."""

from dataclasses import dataclass

from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import dispatch

# Tried in this order; a backend is the module of that name, with `refusal(call)` and `inputs(x, taps, segments, before, call)`.
BACKENDS = ("triton", "reference")

Inputs = tuple[Float[Array, "B T Hk dk"], Float[Array, "B T Hk dk"], Float[Array, "B T Hv dv"]]


@dataclass(frozen=True, kw_only=True)
class Call:
    """The static description of a call, by which a backend accepts or refuses it.

    Attributes:
      platform: platform on which the call runs, "cpu", "gpu" or "tpu".
      key_heads: heads of queries and keys.
      key_width: width of a query and a key.
      value_width: width of a value.
      continued: whether inputs that precede the rows are given.
    """

    platform: str
    key_heads: int
    key_width: int
    value_width: int
    continued: bool


def delta_inputs(
    x: Float[Array, "B T channels"],
    taps: Float[Array, "channels taps"],
    segments: Int[Array, "B T"],
    before: Float[Array, "B reach channels"] | None = None,
    *,
    key_heads: int,
    key_width: int,
    value_width: int,
    backend: str | None = None,
) -> Inputs:
    """Computes q, k and v in the dtype of `x`; everything before their rounding is float32.

    With c_t = sum_i taps[:, -1 - i] x_{t - i} over tokens of t's segment and s = silu(c), whose channels are those of queries, keys and values,
    head by head: q = unit(s_q) / sqrt(dk), k = unit(s_k), v = s_v, where unit(y) = y / sqrt(y^2 + 1e-6).

    Args:
      x: the projection.
      taps: the weights of the convolution, the last one that of the token itself.
      segments: the segment of each token; tokens of one segment see no other.
      before: the inputs of the first token's segment that precede the row, as many as taps but one; None where there are none.
      key_heads: heads of queries and keys.
      key_width: width of a query and a key.
      value_width: width of a value.
      backend: one of BACKENDS, or None for the first that supports the call.

    Raises:
      ValueError: the named backend is unknown or does not support the call.
    """
    call = Call(
        platform=dispatch.device().platform,
        key_heads=key_heads,
        key_width=key_width,
        value_width=value_width,
        continued=before is not None,
    )
    found: Inputs = dispatch.choose("delta_inputs", BACKENDS, call, backend).inputs(x, taps, segments, before, call)
    return found
