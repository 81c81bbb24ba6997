"""The critic's loss: half the squared error to the returns, clipped as PPO clips the ratio
(https://arxiv.org/abs/1707.06347)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def value_loss(
    value: Float[Array, "B T"], old_value: Float[Array, "B T"], returns: Float[Array, "B T"], limit: float | None
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """max((v - R)^2, (clip(v, v_old - limit, v_old + limit) - R)^2) / 2 of each token, and where the clipped one rules.

    `limit` is in units of reward; None is the plain squared error.
    """
    plain = jnp.square(value - returns)
    if limit is None:
        return 0.5 * plain, jnp.zeros(value.shape, bool)
    clipped = jnp.square(jnp.clip(value, old_value - limit, old_value + limit) - returns)
    return 0.5 * jnp.maximum(plain, clipped), clipped > plain
