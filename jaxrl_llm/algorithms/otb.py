"""OTB: every token has its own baseline, weighted by the gradient energy that each response has spent up to it.

    W_t = sum_{s <= t} (1 - 2 pi_s + sum_v pi_s(v)^2);  B_t = sum_G W_t R_t / sum_G W_t;  A_t = R_t - B_t

The optimal token baseline, https://arxiv.org/abs/2602.07078; R_t is the return to go. The energy is the squared norm
of the gradient of a token's log-prob by its logits. Where only one response of the group is that long, B_t = 0.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.algorithms import advantages
from jaxrl_llm.algorithms.batch import Sequences, given
from jaxrl_llm.algorithms.group_relative import Grouped
from jaxrl_llm.algorithms.grpo import Clipped, Estimate


@dataclass(frozen=True, kw_only=True)
class OTB(Grouped, Clipped):
    """Policy gradient with the optimal token baseline."""

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"sum_p2"}

    def estimate(self, sequences: Sequences, rewards: Array) -> Estimate:
        mask = sequences.learned
        returns = advantages.returns_to_go(rewards, mask)
        chosen = jnp.exp(jnp.where(mask, sequences.old_logprobs, 0.0))
        energy = jnp.where(mask, 1.0 - 2.0 * chosen + jnp.where(mask, given(sequences.sum_p2, "sum_p2"), 0.0), 0.0)
        advantage = returns - advantages.token_baseline(returns, energy, mask, sequences.group, sequences.groups)
        size = advantages.group_sum(
            jnp.ones_like(sequences.reward), sequences.group, sequences.counted, sequences.groups
        )
        alone = advantage if self.singleton == "raw" else jnp.zeros_like(advantage)
        return Estimate(jnp.where((size > 1)[:, None], advantage, alone))
