"""GRPO, and the base that it shares with every policy gradient: token rewards, correction, KL, entropy and aggregation.

    A_i = (r_i - mean_G r) / (std_G r + 1e-6)        L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))

DeepSeekMath, https://arxiv.org/abs/2402.03300. Dr. GRPO (https://arxiv.org/abs/2503.20783) is the case std=False with
aggregation="constant"; DAPO (https://arxiv.org/abs/2503.14476) is the case clip_high > clip_low with
aggregation="token-mean" and an over-long penalty. The standard deviation uses n - 1. Unlike the first
paper, the defaults average over tokens, clip higher above 1 than below it, and use no reference policy; gin/algorithms has
each paper's own settings.

An algorithm chooses `estimate` (rewards -> advantages, on all sequences of a step) and `surrogate` (advantages -> per-token
loss, on a micro-batch). The loss of a micro-batch is

    aggregate(w x surrogate) + kl_coef x aggregate(KL) - entropy_coef x aggregate(entropy)

where w corrects the mismatch of sampler and learner, and all aggregates share one mode. Everything that depends on
more than a token's own sequence (group statistics, whitening, selections of tokens) is computed on all sequences of a
step, so splitting a batch changes nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import components
from jaxrl_llm.algorithms import surrogate
from jaxrl_llm.algorithms.advantages import (
    Singleton,
    group_relative,
    group_statistics,
    group_sum,
    least_group,
    on_last_token,
    to_tokens,
)
from jaxrl_llm.algorithms.batch import Advantages, MicroBatch, Sequences, Term, given
from jaxrl_llm.algorithms.correction import Correction, Rejection, log_ratios
from jaxrl_llm.algorithms.divergence import AdaptiveKL, Estimator, divergence
from jaxrl_llm.algorithms.masked import Aggregation, aggregate, masked_mean, masked_sum
from jaxrl_llm.algorithms.penalties import Overlong, highest
from jaxrl_llm.algorithms.surrogate import TokenMetrics, Tokens
from jaxrl_llm.protocols import Learns


class Estimate(NamedTuple):
    """The result of `PolicyGradient.estimate`.

    Attributes:
      advantages: float32 [S, T].
      returns: float32 [S, T] targets of the critic, or None.
      keep: bool [S] sequences whose advantage is known, or None for all.
    """

    advantages: Array
    returns: Array | None = None
    keep: Array | None = None


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(ABC):
    """The shared part of a policy-gradient algorithm.

    Attributes:
      aggregation: what a loss is averaged over: "token-mean", "token-sum", "seq-mean-token-sum",
        "seq-mean-token-mean" or "constant" (sum divided by sequences x constant_length).
      constant_length: tokens a sequence counts as under aggregation "constant".
      correction: weights for the mismatch of sampler and learner; None for 1.
      rejections: tests that tokens must all pass to be learned from.
      kl_coef: weight of the divergence from the reference policy; 0 needs no reference.
      kl_estimator: "k1", "abs", "k2", "k3", or "k1+", "abs+", "k3+" with k2's gradient.
      kl_by_ratio: multiply the divergence in the loss by rho, so that its gradient is unbiased where the policy has moved since it
        sampled (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, equation 7).
      kl_in: "loss" adds the divergence to the loss; "reward" subtracts it, under the policy before the update, from
        each token's reward.
      kl_by_source: pairs of a data source's name and the factor of kl_coef there; other sources have 1.
      kl_controller: moves kl_coef towards a target divergence; None keeps it.
      entropy_coef: weight of the entropy bonus.
      entropy_share: share of the tokens with the highest entropy that get an advantage; 1 for all.
      overlong: penalty or mask for responses near the length limit; None for neither.
    """

    aggregation: Aggregation = "token-mean"
    constant_length: int = 1024
    correction: Correction | None = field(default_factory=Correction)
    rejections: tuple[Rejection, ...] = ()
    kl_coef: float = 0.0
    kl_estimator: Estimator = "k3"
    kl_by_ratio: bool = False
    kl_in: Literal["loss", "reward"] = "loss"
    kl_by_source: tuple[tuple[str, float], ...] = ()
    kl_controller: AdaptiveKL | None = None
    entropy_coef: float = 0.0
    entropy_share: float = 1.0
    overlong: Overlong | None = None
    learns_from: ClassVar[Learns] = "samples"

    def __post_init__(self) -> None:
        object.__setattr__(self, "kl_by_source", tuple((str(n), float(f)) for n, f in self.kl_by_source))  # hashable
        components.choices(self)
        components.at_least(self, 1, "constant_length")
        components.at_least(self, 0, "kl_coef")
        if self.kl_by_ratio and self.kl_in == "reward":
            components.refuse(self, "kl_by_ratio", "False with kl_in='reward', where the policy has not moved yet")
        if self.kl_controller is not None and self.kl_coef == 0:
            components.refuse(self, "kl_coef", "> 0 where kl_controller multiplies it")
        names = [name for name, _ in self.kl_by_source]
        if len(set(names)) < len(names) or any(factor < 0 for _, factor in self.kl_by_source):
            components.refuse(self, "kl_by_source", "pairs of a source, each once, and a factor >= 0")
        if self.kl_by_source and self.kl_coef == 0:
            components.refuse(self, "kl_coef", "> 0 where kl_by_source multiplies it")
        components.within(self, "(0, 1]", "entropy_share")

    @property
    def needs(self) -> frozenset[str]:
        reference = {"reference"} if self.kl_coef > 0 else set()
        return frozenset(reference | ({"entropy"} if self.entropy_coef or self.entropy_share < 1 else set()))

    @property
    def reads(self) -> Mapping[str, Sequence[str]]:
        """The data sources that have a factor of their own."""
        return {"sources": tuple(name for name, _ in self.kl_by_source)}

    @property
    def group_size_at_least(self) -> int:
        return 1

    @property
    def selects(self) -> bool:
        """Whether tokens leave the loss by the ratio of old to sampler log-probs."""
        return bool(self.rejections) or (
            self.correction is not None and (self.correction.mode == "mask" or self.correction.veto > 0)
        )

    @property
    def silent(self) -> bool:
        """Whether a sequence whose advantages are all 0 adds nothing to the loss, nor to its gradient."""
        pulled = self.entropy_coef or (self.kl_coef and self.kl_in == "loss")
        return not pulled and "critic" not in self.needs

    @property
    def constant(self) -> float:
        """The number that a sequence adds to the count "constant"."""
        return float(self.constant_length)

    @property
    def controls(self) -> Mapping[str, float]:
        """The KL coefficient, where there is one."""
        return {"kl_coef": self.kl_coef} if self.kl_coef > 0 else {}

    def adapt(self, controls: Mapping[str, float], metrics: Mapping[str, float], sequences: int) -> Mapping[str, float]:
        """Returns the controllers after a step, with the KL coefficient moved by `kl_controller`."""
        if self.kl_controller is None:
            return controls
        coef = self.kl_controller.update(controls["kl_coef"], metrics["kl/reference_before"], sequences)
        return {**controls, "kl_coef": coef}

    @abstractmethod
    def estimate(self, sequences: Sequences, rewards: Array) -> Estimate:
        """Returns advantages from the float32 [S, T] rewards of the sequences' tokens."""

    @abstractmethod
    def surrogate(self, tokens: Tokens) -> tuple[Array, TokenMetrics]:
        """Returns the loss [B, T] of each token, and metrics [B, T]."""

    def prepare(self, sequences: Sequences, advantages: Array) -> dict[str, Array]:
        """Returns arrays [S, T] that `surrogate` reads from `Tokens.aux`; selections among all tokens are made here."""
        return {}

    def advantages(self, sequences: Sequences) -> Advantages:
        mask, metrics = sequences.learned, _group_metrics(sequences)
        if self.overlong is not None:
            penalty = self.overlong.penalty(sequences.mask)
            metrics["reward/overlong"] = masked_mean(penalty, sequences.counted)
            sequences = replace(
                sequences, reward=sequences.reward + penalty, parts={**sequences.parts, "overlong": penalty}
            )
        rewards = on_last_token(jnp.where(sequences.counted, sequences.reward, 0.0), mask)
        coef = sequences.controls.get("kl_coef", jnp.asarray(self.kl_coef, jnp.float32))
        if self.kl_coef > 0:
            metrics["kl/coef"] = coef
            coef = coef * self._by_source(sequences)
            kl = divergence(
                _clean(sequences.old_logprobs, mask),
                _clean(given(sequences.ref_logprobs, "reference"), mask),
                self.kl_estimator,
            )
            metrics["kl/reference_before"] = masked_mean(kl, mask)
            if self.kl_in == "reward":
                rewards -= jnp.where(mask, coef * kl, 0.0)
        estimate = self.estimate(sequences, rewards)
        advantages = jnp.where(mask, estimate.advantages, 0.0)
        if self.entropy_share < 1:
            advantages = jnp.where(highest(sequences.entropy, mask, self.entropy_share), advantages, 0.0)
        aux = self.prepare(sequences, advantages)
        if self.kl_coef > 0 and self.kl_in == "loss":
            aux["kl_coef"] = jnp.where(mask, coef, 0.0)
        loss_mask, weights = self._correct(sequences, metrics)
        if estimate.keep is not None:
            loss_mask &= estimate.keep[:, None]
        metrics["advantage/mean"] = masked_mean(advantages, loss_mask)
        metrics["advantage/absolute"] = masked_mean(jnp.abs(advantages), loss_mask)
        returns = None if estimate.returns is None else jnp.where(mask, estimate.returns, 0.0)
        return Advantages(
            advantages=advantages, loss_mask=loss_mask, returns=returns, weights=weights, aux=aux, metrics=metrics
        )

    def _by_source(self, sequences: Sequences) -> Array:
        """Returns the factor of kl_coef at each sequence, float32 [S, 1]; raises ValueError for a source that the data lacks."""
        factors = dict(self.kl_by_source)
        if unknown := sorted(set(factors) - set(sequences.sources)):
            components.refuse(
                self, "kl_by_source", f"of sources that the data has, {list(sequences.sources)} and not {unknown}"
            )
        return jnp.asarray([factors.get(name, 1.0) for name in sequences.sources or ("",)], jnp.float32)[
            sequences.source
        ][:, None]

    def _correct(self, sequences: Sequences, metrics: dict[str, Array]) -> tuple[Array, Array | None]:
        """Returns the tokens that are learned from, bool [S, T], and their weights, None for 1."""
        mask = sequences.learned
        if self.overlong is not None:
            mask &= self.overlong.keep(sequences.mask, sequences.truncated)[:, None]
        log_ratio = log_ratios(sequences.old_logprobs, sequences.sampler_logprobs, sequences.learned)
        for rejection in self.rejections:
            mask &= rejection.keep(log_ratio, sequences.learned)
        if self.rejections:
            metrics["correction/rejected_fraction"] = 1.0 - masked_mean(mask.astype(jnp.float32), sequences.learned)
        if self.correction is None:
            return mask, None
        weights, measured = self.correction.weights(log_ratio, sequences.learned)
        metrics.update(measured)
        return mask, weights

    def loss(self, outputs: Mapping[str, Any], batch: MicroBatch) -> tuple[dict[str, Term], dict[str, Term]]:
        policy, mask = outputs["policy"], batch.mask
        tokens = Tokens(
            logprob=_clean(policy["logprob"], mask),
            old_logprobs=_clean(batch.old_logprobs, mask),
            advantages=_clean(batch.advantages, mask),
            mask=mask,
            sequence=batch.sequence,
            sequences=batch.sequences,
            aux={name: _clean(x, mask) for name, x in batch.aux.items()},
        )
        losses, measured = self.surrogate(tokens)
        if batch.weights is not None:
            losses = losses * _clean(batch.weights, mask)
        terms = {"policy": self._aggregate(losses, batch)}
        measured |= {"ratio/mean": tokens.ratio, "kl/k3_to_old": tokens.ratio - 1.0 - tokens.log_ratio}
        if "entropy" in policy:
            entropy = _clean(policy["entropy"], mask)
            measured["entropy"] = entropy
            if self.entropy_coef:
                terms["entropy"] = self._aggregate(-self.entropy_coef * entropy, batch)
        if "kl_coef" in tokens.aux:
            kl = divergence(tokens.logprob, _clean(given(batch.ref_logprobs, "reference"), mask), self.kl_estimator)
            measured["kl/reference"] = kl
            kl = kl * tokens.ratio if self.kl_by_ratio else kl
            terms["kl"] = self._aggregate(tokens.aux["kl_coef"] * kl, batch)
        metrics = {name: (masked_sum(jnp.asarray(x, jnp.float32), mask), "read") for name, x in measured.items()}
        metrics |= {f"loss/{name}": term for name, term in terms.items()}
        return terms, metrics

    def _aggregate(self, losses: Array, batch: MicroBatch) -> Term:
        return aggregate(losses, batch.mask, batch.sequence, batch.sequences, self.aggregation)


def _clean(x: Any, mask: Array) -> Array:
    """Returns `x` on the mask and 0 outside it, even where `x` is not finite there."""
    return jnp.where(mask, x, jnp.zeros((), jnp.asarray(x).dtype))


def _group_metrics(sequences: Sequences) -> dict[str, Array]:
    """Returns the numbers of sequences that were left out and of groups of one, and the mean reward."""
    ones = jnp.ones(sequences.group.shape, jnp.float32)
    count = group_sum(ones, sequences.group, sequences.counted, sequences.groups)
    present = jnp.any(sequences.mask, axis=1) & ~sequences.greedy
    return {
        "groups/singletons": jnp.sum(jnp.where(sequences.counted & (count == 1), 1.0, 0.0)),
        "groups/invalid": jnp.sum(jnp.where(present & ~sequences.valid, 1.0, 0.0)),
        "reward/mean": masked_mean(sequences.reward, sequences.counted),
    }


@dataclass(frozen=True, kw_only=True)
class Clipped(PolicyGradient):
    """PPO's clipped surrogate, token by token (https://arxiv.org/abs/1707.06347).

        L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), at most -A clip_dual where A < 0

    The second bound is that of dual-clip PPO (https://arxiv.org/abs/1912.09729).

    Attributes:
      clip_low: how far below 1 the ratio still has a gradient.
      clip_high: how far above 1 the ratio still has a gradient.
      clip_dual: largest ratio that counts where the advantage is negative; None for no limit.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        components.within(self, "(0, 1]", "clip_low")
        components.above(self, 0, "clip_high")
        components.above(self, 1 + self.clip_high, "clip_dual")

    def surrogate(self, tokens: Tokens) -> tuple[Array, TokenMetrics]:
        return surrogate.clip(tokens.ratio, tokens.advantages, self.clip_low, self.clip_high, self.clip_dual)


def relative(reward: Array, sequences: Sequences, *, std: bool, singleton: Singleton) -> Array:
    """Returns GRPO's advantage A_i of the float32 [S] rewards at every learned token, [S, T]."""
    stats = group_statistics(reward, sequences.group, sequences.counted, sequences.groups)
    return to_tokens(group_relative(reward, stats, std=std, singleton=singleton), sequences.learned)


@dataclass(frozen=True, kw_only=True)
class GRPO(Clipped):
    """Group-relative policy optimisation.

    Attributes:
      std: divide by the group's standard deviation (n - 1).
      singleton: advantage of a group of one: 0 ("zero") or its reward ("raw").
    """

    std: bool = True
    singleton: Singleton = "zero"
    clip_high: float = 0.28

    @property
    def group_size_at_least(self) -> int:
        return least_group(self.singleton)

    def estimate(self, sequences: Sequences, rewards: Array) -> Estimate:
        return Estimate(relative(jnp.sum(rewards, axis=1), sequences, std=self.std, singleton=self.singleton))
