"""The gated delta rule token by token, as the specification."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.delta_rule.api import Call, State
from jaxrl_llm.kernels.delta_step.reference import step


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    return None


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
