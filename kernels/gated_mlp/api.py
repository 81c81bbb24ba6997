"""The values that the gradients of a gated MLP are products of, from its input and what comes back: one function has several backends."""

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxrl_llm.kernels import dispatch

# Tried in this order; a backend is the module of that name, with `refusal(call)` and `gradients(x, g, gate, up, down)`.
BACKENDS = ("mosaic_tpu", "xla")


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a backend may look at to accept or refuse a call: all static, and of one device.

    Attributes:
      platform: "cpu", "gpu" or "tpu", where the call will run.
      dtype: of the activations.
      tokens: rows of the input.
      width: of the input.
      inner: of the gated values.
    """

    platform: str
    dtype: str
    tokens: int
    width: int
    inner: int


def chosen(tokens: int, width: int, inner: int, dtype: Any, *, backend: str | None = None) -> Any:
    """Returns the backend's module for one device's part of a call.

    Raises:
      ValueError: an unknown backend, or a named one that does not support the call.
    """
    call = Call(
        platform=dispatch.device().platform,
        dtype=jax.numpy.dtype(dtype).name,
        tokens=tokens,
        width=width,
        inner=inner,
    )
    return dispatch.choose("gated_mlp", BACKENDS, call, backend)


def gradients(
    x: Float[Array, "N D"],
    g: Float[Array, "N D"],
    gate: Float[Array, "D M"],
    up: Float[Array, "D M"],
    down: Float[Array, "M D"],
    *,
    backend: str | None = None,
) -> tuple[Float[Array, "N M"], Float[Array, "N M"], Float[Array, "N M"]]:
    """Returns h = silu(x gate) (x up), and the gradients of x gate and x up where `g` is that of h down; each in the dtype of `x`.

    Every product is rounded to that dtype, and what lies between products and results is float32.
    """
    run = chosen(x.shape[0], x.shape[1], gate.shape[1], x.dtype, backend=backend)
    found: tuple[Any, Any, Any] = run.gradients(x, g, gate, up, down)
    return found
