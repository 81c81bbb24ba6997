"""log_softmax_entropy in plain jnp, as the specification, with gradients by automatic differentiation.

logprob = log p_y,   entropy = -sum_v p_v log p_v,   p = softmax(logits / temperature)
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.log_softmax_entropy.api import Call


def refusal(call: Call) -> str | None:
    """Returns None, since every call is supported."""
    return None


def compute(
    logits: Float[Array, "T V"], targets: Int[Array, " T"], call: Call
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Returns (logprob, entropy); skipped rows (target -1) are 0, other targets outside V give NaN log-probs."""
    keep = targets != -1
    known = (targets >= 0) & (targets < logits.shape[1])
    z = jnp.where(keep[:, None], logits, 0).astype(jnp.float32)
    shifted = (z - jax.lax.stop_gradient(z.max(axis=1, keepdims=True))) / call.temperature
    logp = shifted - jnp.log(jnp.exp(shifted).sum(axis=1, keepdims=True))
    p = jnp.exp(logp)
    picked = jnp.take_along_axis(logp, jnp.where(known, targets, 0)[:, None], axis=1)[:, 0]
    entropy = -jnp.sum(p * jnp.where(p > 0, logp, 0), axis=1)
    return jnp.where(keep, jnp.where(known, picked, jnp.nan), 0), jnp.where(keep, entropy, 0)
