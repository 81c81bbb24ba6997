"""KL-Cov: a pull towards the old policy on the few tokens whose updates cost the most entropy.

    L = -A rho + coef |l| on the `share` of tokens with the highest covariance of A and log pi;  -A rho on all others

https://arxiv.org/abs/2505.22617. The tokens are chosen once, over the global batch and with the log-probs before the
update, so that micro-batches do not matter; at least one token is chosen.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms import surrogate
from jaxrl_llm.algorithms.batch import Sequences
from jaxrl_llm.algorithms.divergence import absolute
from jaxrl_llm.algorithms.group_relative import GroupRelative
from jaxrl_llm.algorithms.penalties import covariance, highest


@dataclass(frozen=True, kw_only=True)
class KLCov(GroupRelative):
    """Policy gradient with a divergence penalty on high-covariance tokens.

    Attributes:
      share: share of the tokens that the penalty acts on.
      coef: weight of their |log-ratio|.
    """

    share: float = 2e-4
    coef: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        components.within(self, "(0, 1]", "share")
        components.at_least(self, 0, "coef")

    @property
    def silent(self) -> bool:
        """False, since the penalty acts on tokens of any advantage."""
        return False

    def prepare(self, sequences: Sequences, advantages: Array) -> dict[str, Array]:
        chosen = highest(
            covariance(sequences.old_logprobs, advantages, sequences.learned), sequences.learned, self.share
        )
        return {"held": chosen}

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.TokenMetrics]:
        held = tokens.aux["held"]
        pull = jnp.where(held, self.coef * absolute(tokens.log_ratio), 0.0)
        return -tokens.advantages * tokens.ratio + pull, {"kl_cov/held_fraction": held}
