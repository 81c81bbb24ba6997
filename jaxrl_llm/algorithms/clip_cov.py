"""Clip-Cov: the clipped surrogate without a few random tokens of high covariance, which cost the most entropy.

    L = 0 on a random `share` of the tokens, drawn among those with low < (A - mean A)(log pi - mean log pi) < high
    that the clip leaves alone;  max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) elsewhere

https://arxiv.org/abs/2505.22617. The tokens are drawn once, over the global batch and with the log-probs before the
update, so that micro-batches do not matter; tokens that are clipped by the time of the loss stay clipped. The draw is a hash of
the token's own log-probs: equal batches give equal draws, and the order of the sequences is irrelevant.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms import surrogate
from jaxrl_llm.algorithms.batch import Sequences
from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.algorithms.penalties import covariance, draw


@dataclass(frozen=True, kw_only=True)
class ClipCov(GRPO):
    """PPO's clip with a share of the high-covariance tokens left out.

    Attributes:
      share: share of all tokens that is left out; at least one token.
      covariance_min: smallest covariance of a token that may be left out.
      covariance_max: largest covariance of a token that may be left out.
    """

    share: float = 2e-4
    covariance_min: float = 1.0
    covariance_max: float = 5.0
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        components.within(self, "(0, 1]", "share")
        if not self.covariance_min < self.covariance_max:
            components.refuse(self, "covariance_min", f"below covariance_max={self.covariance_max}")

    def prepare(self, sequences: Sequences, advantages: Array) -> dict[str, Array]:
        shared = covariance(sequences.old_logprobs, advantages, sequences.learned)
        eligible = sequences.learned & (shared > self.covariance_min) & (shared < self.covariance_max)
        count = jnp.maximum(jnp.floor(self.share * jnp.sum(sequences.learned)).astype(jnp.int32), 1)
        return {"left_out": draw(eligible, count, sequences.old_logprobs, sequences.sampler_logprobs)}

    def surrogate(self, tokens: surrogate.Tokens) -> tuple[Array, surrogate.TokenMetrics]:
        losses, metrics = super().surrogate(tokens)
        left_out = tokens.aux["left_out"] & ~metrics["ratio/clip_fraction"]
        return jnp.where(left_out, 0.0, losses), {**metrics, "clip_cov/left_out_fraction": left_out}
