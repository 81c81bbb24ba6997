"""TokenBuncher: steps that take a policy's entropy away alternate with steps that put noise where it was.

    entropy step: the stage's algorithm (GRPO) with minus the mean entropy as reward (rewards/entropy.py)
    noiser step:  (1 - e) (-log p_y) + w sum_v n_v (-log p_v)  over the sampled tokens y with advantage >= 0

https://arxiv.org/abs/2508.20697. n is uniform noise over the vocabulary without y, renormalised to 1; w = e as in the
paper ("paper"), or e^2 as in its code, which multiplies by e twice ("reference_code"). The mean over the noise, which is
label smoothing, is offered beside the draw. Against the code: only tokens of responses are learned from (it also trains on
the padding after them), the mean is over the mini-batch's kept tokens, the temperature of the samples applies, gradients
are clipped, and the schedule counts the stage's steps and not those of an epoch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp

from jaxrl_llm import bounds
from jaxrl_llm.batch import Batch, Credit, Term, View
from jaxrl_llm.masked import masked_mean, masked_sum
from jaxrl_llm.phases import Phase
from jaxrl_llm.protocols import Algorithm, Learns


@dataclass(frozen=True, kw_only=True)
class TokenNoiser:
    """Imitation of the better half of the rollouts with noise beside each token.

    Attributes:
      base: the algorithm whose credit says which tokens are kept: that of the stage.
      epsilon: share of the target that is noise.
      noise: "sampled" draws it anew for each token and update, "expected" takes its mean.
      weights: "paper" weighs the noise by epsilon, "reference_code" by epsilon squared.
    """

    base: Algorithm
    epsilon: float = 0.1
    noise: Literal["sampled", "expected"] = "sampled"
    weights: Literal["paper", "reference_code"] = "paper"

    def __post_init__(self) -> None:
        bounds.within(self, "(0, 1)", "epsilon")
        bounds.one_of(self, ("sampled", "expected"), "noise")
        bounds.one_of(self, ("paper", "reference_code"), "weights")

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

    def advantages(self, view: View) -> Credit:
        """The base's credit, less the tokens whose advantage is negative."""
        credit = self.base.advantages(view)
        kept = credit.loss_mask & (credit.advantages >= 0)
        share = masked_mean(kept.astype(jnp.float32), credit.loss_mask)
        return replace(credit, loss_mask=kept, weights=None, metrics={**credit.metrics, "noiser/kept_fraction": share})

    def loss(self, outputs: Mapping[str, Any], batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
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


@dataclass(frozen=True, kw_only=True)
class TokenBuncher:
    """Entropy steps, and from the end of the warm-up on a noiser step at every `period`-th.

    Attributes:
      noiser: the objective of the noiser steps.
      warmup_steps: first steps, all of them entropy steps; the paper's are an eighth of all.
      period: with the stage's steps numbered from 0, those that `period` divides are noiser steps.
    """

    noiser: TokenNoiser
    warmup_steps: int = 25
    period: int = 2

    def __post_init__(self) -> None:
        bounds.at_least(self, 0, "warmup_steps")
        bounds.at_least(self, 1, "period")

    @property
    def phases(self) -> Sequence[Phase]:
        return Phase(name="entropy"), Phase(name="noiser", loss=self.noiser)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    @property
    def controls(self) -> Mapping[str, float]:
        return {}

    def check(self, layers: int) -> None:
        del layers  # any model

    def phase(self, step: int, controls: Mapping[str, float]) -> Phase:
        del controls
        number = step - 1
        return self.phases[number >= self.warmup_steps and number % self.period == 0]

    def adapt(self, step: int, controls: Mapping[str, float], metrics: Mapping[str, float]) -> Mapping[str, float]:
        del step, metrics
        return controls
