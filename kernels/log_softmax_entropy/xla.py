"""log_softmax_entropy by XLA with its gradient by hand; the logits are the only kept array of their size.

    dz_v = p_v (-g_l - g_H (log p_v + H)) + g_l [v = y],   g_l and g_H the cotangents of logprob and entropy

The forward pass reads the logits twice (maximum, then sums); the backward pass reads them once and writes their gradient.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.log_softmax_entropy.api import Call

# Replaces -inf where a product with 0 must not become NaN.
FLOOR = -1e30


def refusal(call: Call) -> str | None:
    """Returns None, since every call is supported."""
    return None


def compute(
    logits: Float[Array, "T V"], targets: Int[Array, " T"], call: Call
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Returns (logprob, entropy); skipped rows (target -1) are 0, other targets outside V give NaN log-probs."""
    out: tuple[jax.Array, jax.Array] = _compute(call, logits, targets)
    return out


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compute(call: Call, logits: Any, targets: Any) -> Any:
    return _forward(call, logits, targets)[0]


def _finite(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.where((targets != -1)[:, None], jnp.maximum(logits.astype(jnp.float32), FLOOR), 0.0)


def _forward(call: Call, logits: jax.Array, targets: jax.Array) -> tuple[Any, Any]:
    z = _finite(logits, targets)
    maximum = z.max(axis=1)
    centred = (z - maximum[:, None]) / call.temperature
    e = jnp.exp(centred)
    return outputs(call, logits, targets, (maximum, e.sum(axis=1), (e * centred).sum(axis=1)))


def outputs(call: Call, logits: jax.Array, targets: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[Any, Any]:
    """Returns ((logprob, entropy), residuals of `backward`) from each row's maximum, sum of e and sum of e x.

    x = (logit - maximum) / temperature, e = exp x; the sums of skipped rows must be finite, that of e positive.
    """
    maximum, total, first = sums
    log_total = jnp.log(total)
    entropy = log_total - first / total
    known = (targets >= 0) & (targets < logits.shape[1])
    index = jnp.where(known, targets, 0)[:, None]
    at_target = jnp.take_along_axis(logits, index, axis=1)
    picked = (_finite(at_target, targets)[:, 0] - maximum) / call.temperature - log_total
    picked = jnp.where(picked < FLOOR * 1e-10, -jnp.inf, picked)
    keep = targets != -1
    out = jnp.where(keep, jnp.where(known, picked, jnp.nan), 0.0), jnp.where(keep, entropy, 0.0)
    return out, (logits, targets, maximum, log_total, entropy)


def backward(call: Call, saved: Any, cotangents: Any) -> tuple[Any, None]:
    """Returns the gradient of the logits from the cotangents of (logprob, entropy) and the residuals of `outputs`."""
    logits, targets, maximum, log_total, entropy = saved
    keep, known = targets != -1, (targets >= 0) & (targets < logits.shape[1])
    g_logprob = jnp.where(known, cotangents[0], 0.0)[:, None] / call.temperature
    g_entropy = jnp.where(keep, cotangents[1], 0.0)[:, None] / call.temperature
    logp = (_finite(logits, targets) - maximum[:, None]) / call.temperature - log_total[:, None]
    dz = jnp.exp(logp) * (-g_logprob - g_entropy * (logp + entropy[:, None]))
    dz = dz + jnp.where(jnp.arange(logits.shape[1]) == targets[:, None], g_logprob, 0.0)
    return dz.astype(logits.dtype), None


_compute.defvjp(_forward, backward)
