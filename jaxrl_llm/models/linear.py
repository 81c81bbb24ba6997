"""The one matrix product of the models, with its gradient written out, and its sum with one of low rank.

The gradient of the weights is asked for in the weights' own layout and in float32: the order that automatic
differentiation chooses costs a transposed product (three times slower on CPU), and it rounds to the activations' dtype.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@partial(jax.tree_util.register_dataclass, data_fields=["weights", "a", "b"], meta_fields=["scale"])
@dataclass(frozen=True)
class Adapted:
    """Weights with an adapter of low rank, `weights + scale x a b`, kept apart; see models/lora.py.

    Attributes:
      weights: [*in, *out].
      a: [*in, rank].
      b: [rank, *out].
      scale: weight of the adapter.
    """

    weights: Any
    a: Any
    b: Any
    scale: float

    def __getitem__(self, index: Any) -> "Adapted":
        """Itself: layers read a parameter as `parameter[...]`."""
        return self


def linear(
    x: Float[Array, "B T ..."], weights: Float[Array, "..."] | Adapted, inputs: int = 1
) -> Float[Array, "B T ..."]:
    """Contracts the last `inputs` axes of `x` with the first `inputs` axes of the weights, in the dtype of `x`."""
    if isinstance(weights, Adapted):
        low = _product(_product(x, weights.a, inputs), weights.b, 1)
        return _product(x, weights.weights, inputs) + weights.scale * low
    return _product(x, weights, inputs)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, weights: jax.Array, inputs: int) -> jax.Array:
    return jnp.tensordot(x, weights.astype(x.dtype), inputs)


def _forward(x: jax.Array, weights: jax.Array, inputs: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # A bare product, not a call of `_product`: the remat policy "dots" knows what to keep by its primitive.
    return jnp.tensordot(x, weights.astype(x.dtype), inputs), (x, weights)


def _backward(inputs: int, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weights = saved
    outputs = weights.ndim - inputs
    last = lambda n, ndim: tuple(range(ndim - n, ndim))  # noqa: E731
    rows = tuple(range(g.ndim - outputs))
    dx = jnp.tensordot(g, weights.astype(g.dtype), (last(outputs, g.ndim), last(outputs, weights.ndim)))
    dw = jnp.tensordot(x, g, (rows, rows), preferred_element_type=jnp.float32)
    return dx, dw.astype(weights.dtype)


_product.defvjp(_forward, _backward)
