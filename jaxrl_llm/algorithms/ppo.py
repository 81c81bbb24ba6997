"""PPO: the clipped surrogate on generalised advantage estimates of a learned critic.

    A = whiten(GAE(gamma, lam));  L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) + value_coef x L_value

https://arxiv.org/abs/1707.06347, https://arxiv.org/abs/1506.02438. Tokens that the policy did not choose are skipped
by the recursion. Returns are taken before whitening; gamma and lam are 1 by default, as is usual with one reward at
the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import bounds
from jaxrl_llm.algorithms import advantages
from jaxrl_llm.algorithms.clipped import Clipped
from jaxrl_llm.algorithms.policy_gradient import Estimate, given
from jaxrl_llm.algorithms.value_loss import value_loss
from jaxrl_llm.batch import Batch, Credit, Term, View
from jaxrl_llm.masked import masked_mean, masked_sum, masked_var, whiten


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
        bounds.within(self, "[0, 1]", "gamma", "lam")
        bounds.above(self, 0, "value_clip")
        bounds.above(self, 0, "value_coef")

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"critic"}

    def estimate(self, view: View, rewards: Array) -> Estimate:
        credit, returns = advantages.gae(rewards, given(view.values, "critic"), view.learned, self.gamma, self.lam)
        return Estimate(whiten(credit, view.learned), returns=returns)

    def loss(self, outputs: Mapping[str, Any], batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        terms, metrics = super().loss(outputs, batch)
        streams = (outputs["critic"]["value"], given(batch.old_values, "critic"), given(batch.returns, "critic"))
        value, old, returns = (jnp.where(batch.mask, x, 0.0) for x in streams)
        losses, clipped = value_loss(value, old, returns, self.value_clip)
        terms["value"] = self._aggregate(self.value_coef * losses, batch)
        metrics |= {
            "loss/value": terms["value"],
            "value/mean": (masked_sum(value, batch.mask), "tokens"),
            "value/squared_error": (masked_sum(jnp.square(value - returns), batch.mask), "tokens"),
            "value/clip_fraction": (masked_sum(clipped.astype(jnp.float32), batch.mask), "tokens"),
        }
        return terms, metrics

    def advantages(self, view: View) -> Credit:
        credit, mask = super().advantages(view), view.learned
        returns = given(credit.returns, "critic")
        error = returns - jnp.where(mask, given(view.values, "critic"), 0.0)
        explained = 1.0 - masked_var(error, mask) / jnp.maximum(masked_var(returns, mask), 1e-8)
        measured = {"value/explained_variance": explained, "value/return_mean": masked_mean(returns, mask)}
        return replace(credit, metrics={**credit.metrics, **measured})
