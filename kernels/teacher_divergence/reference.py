"""teacher_divergence in plain jnp, as the specification: all logits are in memory, gradients are by automatic differentiation.

With p the teacher's distribution, q the policy's, each softmax(h . w_v / temperature), and b the mixture:

    b = 0 (forward): KL(p || q)        b = 1 (reverse): KL(q || p)
    else (JSD):      b KL(p || m) + (1 - b) KL(q || m),  m = b p + (1 - b) q

Peak memory is a few arrays of T V float32 values.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.token_stats.definition import product


def of_log_probs(teacher: Float[Array, "T V"], policy: Float[Array, "T V"], mixture: float) -> Float[Array, "T V"]:
    """Returns each entry's summand of the divergence, from the log-probs of both models."""
    if mixture == 0:
        return jnp.exp(teacher) * (teacher - policy)
    if mixture == 1:
        return jnp.exp(policy) * (policy - teacher)
    mixed = jnp.logaddexp(teacher + jnp.log(mixture), policy + jnp.log1p(-mixture))
    return mixture * jnp.exp(teacher) * (teacher - mixed) + (1 - mixture) * jnp.exp(policy) * (policy - mixed)


def compute(
    policy: tuple[Float[Array, "T D"], Float[Array, "V D"]],
    teacher: tuple[Float[Array, "T E"], Float[Array, "V E"]],
    targets: Int[Array, " T"],
    *,
    mixture: float,
    temperature: float = 1.0,
) -> Float[Array, " T"]:
    """Returns the divergences; rows whose target is -1 are 0."""
    p, q = (jax.nn.log_softmax(product(*pair) / temperature) for pair in (teacher, policy))
    return jnp.where(targets != -1, of_log_probs(jax.lax.stop_gradient(p), q, mixture).sum(axis=1), 0.0)
