"""PPO: the clipped surrogate on generalised advantage estimates of a learned critic.

    A = whiten(GAE(gamma, lam));  L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) + value_coef x L_value
    L_value = half the squared error to the returns, clipped as the ratio is

https://arxiv.org/abs/1707.06347, https://arxiv.org/abs/1506.02438. Tokens that the policy did not choose are skipped
by the recursion. Returns are taken before whitening; gamma and lam are 1 by default, as is usual with one reward at
the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm import components
from jaxrl_llm.algorithms import advantages
from jaxrl_llm.algorithms.batch import Advantages, MicroBatch, Sequences, Term, given
from jaxrl_llm.algorithms.grpo import Clipped, Estimate
from jaxrl_llm.algorithms.masked import masked_mean, masked_sum, masked_var, whiten


def value_loss(
    value: Float[Array, "B T"], old_value: Float[Array, "B T"], returns: Float[Array, "B T"], limit: float | None
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Returns max((v - R)^2, (clip(v, v_old - limit, v_old + limit) - R)^2) / 2 of each token, and where the clipped term is larger.

    `limit` is in units of reward; None is the plain squared error.
    """
    plain = jnp.square(value - returns)
    if limit is None:
        return 0.5 * plain, jnp.zeros(value.shape, bool)
    clipped = jnp.square(jnp.clip(value, old_value - limit, old_value + limit) - returns)
    return 0.5 * jnp.maximum(plain, clipped), clipped > plain


@dataclass(frozen=True, kw_only=True)
class PPO(Clipped):
    """Proximal policy optimisation with a critic.

    Attributes:
      gamma: discount per token.
      lam: GAE's mixing of one-step (0) and full returns (1).
      value_clip: how far a value may move in one update and still have a gradient, in units of reward; None for no
        limit.
      value_coef: weight of the critic's loss.
    """

    gamma: float = 1.0
    lam: float = 1.0
    value_clip: float | None = 0.5
    value_coef: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        components.within(self, "[0, 1]", "gamma", "lam")
        components.above(self, 0, "value_clip")
        components.above(self, 0, "value_coef")

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"critic"}

    def estimate(self, sequences: Sequences, rewards: Array) -> Estimate:
        advantage, returns = advantages.gae(
            rewards, given(sequences.values, "critic"), sequences.learned, self.gamma, self.lam
        )
        return Estimate(whiten(advantage, sequences.learned), returns=returns)

    def loss(self, outputs: Mapping[str, Any], batch: MicroBatch) -> tuple[dict[str, Term], dict[str, Term]]:
        terms, metrics = super().loss(outputs, batch)
        stats = (outputs["critic"]["value"], given(batch.old_values, "critic"), given(batch.returns, "critic"))
        value, old, returns = (jnp.where(batch.mask, x, 0.0) for x in stats)
        losses, clipped = value_loss(value, old, returns, self.value_clip)
        terms["value"] = self._aggregate(self.value_coef * losses, batch)
        metrics |= {
            "loss/value": terms["value"],
            "value/mean": (masked_sum(value, batch.mask), "tokens"),
            "value/squared_error": (masked_sum(jnp.square(value - returns), batch.mask), "tokens"),
            "value/clip_fraction": (masked_sum(clipped.astype(jnp.float32), batch.mask), "tokens"),
        }
        return terms, metrics

    def advantages(self, sequences: Sequences) -> Advantages:
        assigned, mask = super().advantages(sequences), sequences.learned
        returns = given(assigned.returns, "critic")
        error = returns - jnp.where(mask, given(sequences.values, "critic"), 0.0)
        explained = 1.0 - masked_var(error, mask) / jnp.maximum(masked_var(returns, mask), 1e-8)
        measured = {"value/explained_variance": explained, "value/return_mean": masked_mean(returns, mask)}
        return replace(assigned, metrics={**assigned.metrics, **measured})
