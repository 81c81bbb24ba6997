"""The gated delta rule token by token, as the specification and for decoding.

S' = exp(g_t) S_{t-1}     d_t = beta_t (v_t - S'^T k_t)     S_t = S' + k_t d_t^T     o_t = S_t^T q_t
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.delta_rule.api import Call, State


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    return None


def step(
    q: Float[Array, "B Hk dk"],
    k: Float[Array, "B Hk dk"],
    v: Float[Array, "B Hv dv"],
    g: Float[Array, "B Hv"],
    beta: Float[Array, "B Hv"],
    state: State,
) -> tuple[Float[Array, "B Hv dv"], State]:
    """Computes the output of one token per row, and the state after it."""
    times = v.shape[1] // k.shape[1]
    q, k = (jnp.repeat(x.astype(jnp.float32), times, axis=1) for x in (q, k))
    decayed = jnp.exp(g)[..., None, None] * state
    change = beta[..., None] * (v.astype(jnp.float32) - jnp.sum(decayed * k[..., None], axis=-2))
    state = decayed + k[..., None] * change[..., None, :]
    return jnp.sum(state * q[..., None], axis=-2), state


def rule(
    tokens: tuple[jax.Array, ...], segments: Int[Array, "B T"], state: State, call: Call
) -> tuple[Float[Array, "B T Hv dv"], State]:
    """Computes the rule as defined by `delta_rule`."""

    def one(
        carry: tuple[jax.Array, jax.Array], inputs: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        (state, owner), (q, k, v, g, beta, segment) = carry, inputs
        out, state = step(q, k, v, g, beta, jnp.where((segment == owner)[:, None, None, None], state, 0.0))
        return (state, segment), out

    inputs = tuple(jnp.moveaxis(x, 1, 0) for x in (*tokens, segments))
    (state, _), out = jax.lax.scan(one, (state, segments[:, 0]), inputs)
    return jnp.moveaxis(out, 0, 1), state
