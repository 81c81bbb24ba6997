"""One token of the gated delta rule, as the specification.

S' = exp(g_t) S_{t-1}     d_t = beta_t (v_t - S'^T k_t)     S_t = S' + k_t d_t^T     o_t = S_t^T q_t
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.delta_step.api import Call, Tokens

State = Float[Array, "S Hv dk dv"]


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    return None


def step(
    q: Float[Array, "S Hk dk"],
    k: Float[Array, "S Hk dk"],
    v: Float[Array, "S Hv dv"],
    g: Float[Array, "S Hv"],
    beta: Float[Array, "S Hv"],
    state: State,
) -> tuple[Float[Array, "S Hv dv"], State]:
    """Computes the output of one token per slot, and the state after it."""
    times = v.shape[1] // k.shape[1]
    q, k = (jnp.repeat(x.astype(jnp.float32), times, axis=1) for x in (q, k))
    decayed = jnp.exp(g)[..., None, None] * state
    change = beta[..., None] * (v.astype(jnp.float32) - jnp.sum(decayed * k[..., None], axis=-2))
    state = decayed + k[..., None] * change[..., None, :]
    return jnp.sum(state * q[..., None], axis=-2), state


def advance(
    tokens: Tokens, states: Float[Array, "L S Hv dk dv"], layer: Int[Array, ""]
) -> tuple[Float[Array, "S Hv dv"], Float[Array, "L S Hv dk dv"]]:
    """Computes as defined by `delta_step`."""
    out, state = step(*tokens, jax.lax.dynamic_index_in_dim(states, layer, keepdims=False))
    return out, states.at[layer].set(state)
