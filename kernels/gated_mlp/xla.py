"""gated_mlp by XLA: three products, and the values between them."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.kernels.gated_mlp.api import Call


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    return None


def gradients(x: Any, g: Any, gate: Any, up: Any, down: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `api.gradients`."""
    products = x @ gate, x @ up, g @ down.T
    h, dgate, dup = between(*(part.astype(jnp.float32) for part in products))
    return h.astype(x.dtype), dgate.astype(x.dtype), dup.astype(x.dtype)


def between(gate: jax.Array, up: jax.Array, dh: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """silu(gate) * up, and the gradients of gate and up where `dh` is that of it, in float32."""
    share = jax.nn.sigmoid(gate)
    return gate * share * up, dh * up * share * (1 + gate * (1 - share)), dh * gate * share
