"""token_stats in plain jnp, as the specification: all logits are in memory, gradients are by automatic differentiation.

With z of `definition`, p = softmax(z / temperature), y the target, F the entries with a finite bias:

    logprob = log p_y                          entropy = -sum_v p_v log p_v           sum_p2 = sum_v p_v^2
    uniform_logprob = mean_{v in F} log p_v    noise_logprob = sum_v n_v log p_v
    n_v = u_v / sum_{w in F, w != y} u_w for v in F other than y, else 0;   u ~ U(0, 1), constant in the gradient

Peak memory is a few arrays of T V float32 values.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxrl_llm.kernels.token_stats.definition import Call, logits, noise, product


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    return "it runs on one device; give no mesh" if call.shards > 1 else None


def compute(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " T"],
    bias: Float[Array, " V"] | None,
    words: UInt32[Array, "2"],
    call: Call,
    mesh: jax.sharding.Mesh | None = None,
) -> dict[str, Float[Array, " T"]]:
    """Returns the statistics named by `call.outputs`; skipped rows (target -1) are 0, targets outside V give NaN log-probs."""
    keep = targets != -1
    z = logits(product(jnp.where(keep[:, None], hidden, 0), head), bias, call)
    shifted = (z - jax.lax.stop_gradient(z.max(axis=1, keepdims=True))) / call.temperature
    logp = shifted - jnp.log(jnp.exp(shifted).sum(axis=1, keepdims=True))
    p = jnp.exp(logp)
    finite = jnp.isfinite(jnp.zeros(head.shape[0]) if bias is None else bias)
    known = (targets >= 0) & (targets < head.shape[0])
    index = jnp.where(known, targets, 0)[:, None]
    out = {}
    if "logprob" in call.outputs:
        out["logprob"] = jnp.where(known, jnp.take_along_axis(logp, index, axis=1)[:, 0], jnp.nan)
    if "entropy" in call.outputs:
        out["entropy"] = -jnp.sum(p * jnp.where(p > 0, logp, 0), axis=1)
    if "sum_p2" in call.outputs:
        out["sum_p2"] = jnp.sum(p * p, axis=1)
    if "uniform_logprob" in call.outputs:
        out["uniform_logprob"] = jnp.where(finite, logp, 0).sum(axis=1) / finite.sum()
    if "noise_logprob" in call.outputs:
        entries = jnp.arange(head.shape[0])
        used = finite & (entries != targets[:, None])
        u = jnp.where(used, noise(words, jnp.arange(targets.shape[0]), entries), 0)
        n = u / jnp.maximum(u.sum(axis=1, keepdims=True), 1e-30)
        out["noise_logprob"] = jnp.sum(n * jnp.where(used, logp, 0), axis=1)
    return {name: jnp.where(keep, out[name], 0.0) for name in call.outputs}
