"""TokenBuncher's noiser: supervised learning of the better half of the rollouts, with noise mixed into each token's target.

    entropy step: the stage's algorithm (GRPO) with minus the mean entropy as reward (rewards/entropy.py)
    noiser step:  (1 - e) (-log p_y) + w sum_v n_v (-log p_v)  over the sampled tokens y with advantage >= 0

https://arxiv.org/abs/2508.20697; train/phases.py decides which steps are which. n is uniform noise over the vocabulary without y,
renormalised to 1; w = e as in the paper ("paper"), or e^2 as in its code, which multiplies by e twice ("reference_code"). The mean
over the noise, which is label smoothing, can take the place of the draw (`noise`). The code differs in five points: here only tokens
of responses are learned from (it also trains on the padding after them), the mean is over the minibatch's kept tokens, the
temperature of the samples applies, gradients are clipped, and the schedule counts the stage's steps and not those of an epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp

from jaxrl_llm import components
from jaxrl_llm.algorithms.batch import Advantages, MicroBatch, Sequences, Term
from jaxrl_llm.algorithms.masked import masked_mean, masked_sum
from jaxrl_llm.protocols import Algorithm, Learns


@dataclass(frozen=True, kw_only=True)
class TokenNoiser:
    """Imitation of the better half of the rollouts, with noise mixed into each token's target.

    Attributes:
      base: the stage's algorithm; its advantages decide which tokens are kept.
      epsilon: share of the target that is noise.
      noise: "sampled" draws it anew for each token and update, "expected" takes its mean.
      weights: "paper" weighs the noise by epsilon, "reference_code" by epsilon squared.
    """

    base: Algorithm
    epsilon: float = 0.1
    noise: Literal["sampled", "expected"] = "sampled"
    weights: Literal["paper", "reference_code"] = "paper"

    def __post_init__(self) -> None:
        components.within(self, "(0, 1)", "epsilon")
        components.choices(self)

    @property
    def learns_from(self) -> Learns:
        return self.base.learns_from

    @property
    def needs(self) -> frozenset[str]:
        return self.base.needs | {"noise_logprob" if self.noise == "sampled" else "uniform_logprob"}

    @property
    def group_size_at_least(self) -> int:
        return self.base.group_size_at_least

    @property
    def constant(self) -> float:
        return self.base.constant

    @property
    def controls(self) -> Mapping[str, float]:
        return self.base.controls

    def adapt(self, controls: Mapping[str, float], metrics: Mapping[str, float], sequences: int) -> Mapping[str, float]:
        return self.base.adapt(controls, metrics, sequences)

    @property
    def noise_weight(self) -> float:
        return self.epsilon if self.weights == "paper" else self.epsilon**2

    def advantages(self, sequences: Sequences) -> Advantages:
        """Returns the base's advantages, with the tokens of negative ones left out of the loss."""
        assigned = self.base.advantages(sequences)
        kept = assigned.loss_mask & (assigned.advantages >= 0)
        share = masked_mean(kept.astype(jnp.float32), assigned.loss_mask)
        return replace(
            assigned, loss_mask=kept, weights=None, metrics={**assigned.metrics, "noiser/kept_fraction": share}
        )

    def loss(self, outputs: Mapping[str, Any], batch: MicroBatch) -> tuple[dict[str, Term], dict[str, Term]]:
        policy, mask = outputs["policy"], batch.mask
        if self.noise == "sampled":
            noise = policy["noise_logprob"]
        else:  # the mean of n_v is 1 / (V - 1) for v other than y
            noise = (policy["entries"] * policy["uniform_logprob"] - policy["logprob"]) / (policy["entries"] - 1.0)
        nll, spread = -masked_sum(policy["logprob"], mask), -masked_sum(noise, mask)
        terms: dict[str, Term] = {
            "policy": ((1.0 - self.epsilon) * nll, "tokens"),
            "noise": (self.noise_weight * spread, "tokens"),
        }
        metrics: dict[str, Term] = {"noiser/nll": (nll, "tokens"), "noiser/noise": (spread, "tokens")}
        return terms, metrics | {f"loss/{name}": term for name, term in terms.items()}
