"""The one matrix product of the models, with its gradient written out.

The gradient of the weights is asked for in the weights' own layout and in float32: the order that automatic
differentiation chooses costs a transposed product (three times slower on CPU), and it rounds to the activations' dtype.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(x: Float[Array, "B T ..."], weights: Float[Array, "..."], inputs: int = 1) -> Float[Array, "B T ..."]:
    """Contracts the last `inputs` axes of `x` with the first `inputs` axes of the weights, in the dtype of `x`."""
    return jnp.tensordot(x, weights.astype(x.dtype), inputs)


def _forward(x: jax.Array, weights: jax.Array, inputs: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # A bare product, not a call of `linear`: the remat policy "dots" knows what to keep by its primitive.
    return jnp.tensordot(x, weights.astype(x.dtype), inputs), (x, weights)


def _backward(inputs: int, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weights = saved
    outputs = weights.ndim - inputs
    last = lambda n, ndim: tuple(range(ndim - n, ndim))  # noqa: E731
    rows = tuple(range(g.ndim - outputs))
    dx = jnp.tensordot(g, weights.astype(g.dtype), (last(outputs, g.ndim), last(outputs, weights.ndim)))
    dw = jnp.tensordot(x, g, (rows, rows), preferred_element_type=jnp.float32)
    return dx, dw.astype(weights.dtype)


linear.defvjp(_forward, _backward)
