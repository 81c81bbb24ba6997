"""What all policy-gradient algorithms share: token rewards, correction, KL, entropy and aggregation.

An algorithm chooses `estimate` (rewards -> advantages, on the global view) and `surrogate` (advantages -> per-token
loss, on a micro-batch). The loss of a micro-batch is

    aggregate(w x surrogate) + kl_coef x aggregate(KL) - entropy_coef x aggregate(entropy)

where w corrects the mismatch of sampler and learner, and all aggregates share one mode. Whatever depends on more than
one token's own sequence (group statistics, whitening, selections of tokens) is settled on the global view, so
splitting a batch changes nothing.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import bounds
from jaxrl_llm.algorithms.advantages import group_sum, on_last_token
from jaxrl_llm.algorithms.correction import Correction, Rejection, log_ratios
from jaxrl_llm.algorithms.divergence import ESTIMATORS, AdaptiveKL, Estimator, divergence
from jaxrl_llm.algorithms.objective import Objective
from jaxrl_llm.algorithms.penalties import Overlong, highest
from jaxrl_llm.algorithms.surrogate import MetricStreams, Tokens
from jaxrl_llm.batch import Batch, Credit, Term, View
from jaxrl_llm.masked import AGGREGATIONS, Aggregation, aggregate, masked_mean, masked_sum
from jaxrl_llm.protocols import Learns


class Estimate(NamedTuple):
    """What an estimator assigns.

    Attributes:
      advantages: float32 [S, T].
      returns: float32 [S, T] targets of the critic, or None.
      keep: bool [S] sequences whose advantage is known, or None for all.
    """

    advantages: Array
    returns: Array | None = None
    keep: Array | None = None


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Objective):
    """The shared part of a policy-gradient algorithm.

    Attributes:
      aggregation: what a loss is averaged over: "token-mean", "token-sum", "seq-mean-token-sum",
        "seq-mean-token-mean" or "constant" (sum divided by sequences x constant_length).
      constant_length: tokens a sequence counts as under aggregation "constant".
      correction: weights for the mismatch of sampler and learner; None for 1.
      rejections: tests that tokens must pass, all of them, to be learned from.
      kl_coef: weight of the divergence from the reference policy; 0 needs no reference.
      kl_estimator: "k1", "abs", "k2", "k3", or "k1+", "abs+", "k3+" with k2's gradient.
      kl_in: "loss", or "reward" of each token, where the policy before the update is measured.
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
    kl_in: Literal["loss", "reward"] = "loss"
    kl_by_source: tuple[tuple[str, float], ...] = ()
    kl_controller: AdaptiveKL | None = None
    entropy_coef: float = 0.0
    entropy_share: float = 1.0
    overlong: Overlong | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kl_by_source", tuple((str(n), float(f)) for n, f in self.kl_by_source))  # hashable
        bounds.one_of(self, AGGREGATIONS, "aggregation")
        bounds.one_of(self, ESTIMATORS, "kl_estimator")
        bounds.one_of(self, ("loss", "reward"), "kl_in")
        bounds.at_least(self, 1, "constant_length")
        bounds.at_least(self, 0, "kl_coef")
        if self.kl_controller is not None and self.kl_coef == 0:
            bounds.refuse(self, "kl_coef", "> 0 where kl_controller multiplies it")
        names = [name for name, _ in self.kl_by_source]
        if len(set(names)) < len(names) or any(factor < 0 for _, factor in self.kl_by_source):
            bounds.refuse(self, "kl_by_source", "pairs of a source, each once, and a factor >= 0")
        if self.kl_by_source and self.kl_coef == 0:
            bounds.refuse(self, "kl_coef", "> 0 where kl_by_source multiplies it")
        bounds.within(self, "(0, 1]", "entropy_share")

    @property
    def learns_from(self) -> Learns:
        return "samples"

    @property
    def needs(self) -> frozenset[str]:
        reference = {"reference"} if self.kl_coef > 0 else set()
        return frozenset(reference | ({"entropy"} if self.entropy_coef or self.entropy_share < 1 else set()))

    @property
    def selects(self) -> bool:
        """True where tokens leave the loss by the ratio of old to sampler log-probs."""
        return bool(self.rejections) or (self.correction is not None and self.correction.mode == "mask")

    @property
    def constant(self) -> float:
        """What a sequence adds to the count "constant"."""
        return float(self.constant_length)

    @property
    def controls(self) -> Mapping[str, float]:
        """The KL coefficient, where there is one."""
        return {"kl_coef": self.kl_coef} if self.kl_coef > 0 else {}

    def adapt(self, controls: Mapping[str, float], metrics: Mapping[str, float], sequences: int) -> Mapping[str, float]:
        """The KL coefficient after a step, moved by `kl_controller`."""
        if self.kl_controller is None:
            return controls
        coef = self.kl_controller.update(controls["kl_coef"], metrics["kl/reference_before"], sequences)
        return {**controls, "kl_coef": coef}

    @abstractmethod
    def estimate(self, view: View, rewards: Array) -> Estimate:
        """Advantages of the view from float32 [S, T] rewards of its tokens."""

    @abstractmethod
    def surrogate(self, tokens: Tokens) -> tuple[Array, MetricStreams]:
        """Loss [B, T] of each token, and metrics [B, T]."""

    def prepare(self, view: View, advantages: Array) -> dict[str, Array]:
        """Streams [S, T] that `surrogate` reads from `Tokens.aux`; selections among all tokens are made here."""
        return {}

    def advantages(self, view: View) -> Credit:
        mask, metrics = view.learned, _group_metrics(view)
        if self.overlong is not None:
            penalty = self.overlong.penalty(view.mask)
            metrics["reward/overlong"] = masked_mean(penalty, view.counted)
            view = replace(view, reward=view.reward + penalty, parts={**view.parts, "overlong": penalty})
        rewards = on_last_token(jnp.where(view.counted, view.reward, 0.0), mask)
        coef = view.controls.get("kl_coef", jnp.asarray(self.kl_coef, jnp.float32))
        if self.kl_coef > 0:
            metrics["kl/coef"] = coef
            coef = coef * self._by_source(view)
            kl = divergence(
                _clean(view.old_logprobs, mask), _clean(given(view.ref_logprobs, "reference"), mask), self.kl_estimator
            )
            metrics["kl/reference_before"] = masked_mean(kl, mask)
            if self.kl_in == "reward":
                rewards -= jnp.where(mask, coef * kl, 0.0)
        estimate = self.estimate(view, rewards)
        advantages = jnp.where(mask, estimate.advantages, 0.0)
        if self.entropy_share < 1:
            advantages = jnp.where(highest(view.entropy, mask, self.entropy_share), advantages, 0.0)
        aux = self.prepare(view, advantages)
        if self.kl_coef > 0 and self.kl_in == "loss":
            aux["kl_coef"] = jnp.where(mask, coef, 0.0)
        loss_mask, weights = self._correct(view, metrics)
        if estimate.keep is not None:
            loss_mask &= estimate.keep[:, None]
        metrics["advantage/mean"] = masked_mean(advantages, loss_mask)
        metrics["advantage/absolute"] = masked_mean(jnp.abs(advantages), loss_mask)
        returns = None if estimate.returns is None else jnp.where(mask, estimate.returns, 0.0)
        return Credit(
            advantages=advantages, loss_mask=loss_mask, returns=returns, weights=weights, aux=aux, metrics=metrics
        )

    def _by_source(self, view: View) -> Array:
        """float32 [S, 1]: the factor of kl_coef at each sequence; raises ValueError for a source that the data lacks."""
        factors = dict(self.kl_by_source)
        if unknown := sorted(set(factors) - set(view.sources)):
            bounds.refuse(self, "kl_by_source", f"of sources that the data has, {list(view.sources)} and not {unknown}")
        return jnp.asarray([factors.get(name, 1.0) for name in view.sources or ("",)], jnp.float32)[view.source][
            :, None
        ]

    def _correct(self, view: View, metrics: dict[str, Array]) -> tuple[Array, Array | None]:
        """The tokens that are learned from, and their weights."""
        mask = view.learned
        if self.overlong is not None:
            mask &= self.overlong.keep(view.mask)[:, None]
        log_ratio = log_ratios(view.old_logprobs, view.sampler_logprobs, view.learned)
        for rejection in self.rejections:
            mask &= rejection.keep(log_ratio, view.learned)
        if self.rejections:
            metrics["correction/rejected_fraction"] = 1.0 - masked_mean(mask.astype(jnp.float32), view.learned)
        if self.correction is None:
            return mask, None
        weights, measured = self.correction.weights(log_ratio, view.learned)
        metrics.update(measured)
        return mask, weights

    def loss(self, outputs: Mapping[str, Any], batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        policy, mask = outputs["policy"], batch.mask
        tokens = Tokens(
            logprob=_clean(policy["logprob"], mask),
            old_logprobs=_clean(batch.old_logprobs, mask),
            advantages=_clean(batch.advantages, mask),
            mask=mask,
            sequence=batch.sequence,
            sequences=batch.sequences,
            aux={name: _clean(stream, mask) for name, stream in batch.aux.items()},
        )
        losses, streams = self.surrogate(tokens)
        if batch.weights is not None:
            losses = losses * _clean(batch.weights, mask)
        terms = {"policy": self._aggregate(losses, batch)}
        streams |= {"ratio/mean": tokens.ratio, "kl/k3_to_old": tokens.ratio - 1.0 - tokens.log_ratio}
        if "entropy" in policy:
            entropy = _clean(policy["entropy"], mask)
            streams["entropy"] = entropy
            if self.entropy_coef:
                terms["entropy"] = self._aggregate(-self.entropy_coef * entropy, batch)
        if "kl_coef" in tokens.aux:
            kl = divergence(tokens.logprob, _clean(given(batch.ref_logprobs, "reference"), mask), self.kl_estimator)
            streams["kl/reference"] = kl
            terms["kl"] = self._aggregate(tokens.aux["kl_coef"] * kl, batch)
        metrics = {name: (masked_sum(jnp.asarray(x, jnp.float32), mask), "tokens") for name, x in streams.items()}
        metrics |= {f"loss/{name}": term for name, term in terms.items()}
        return terms, metrics

    def _aggregate(self, losses: Array, batch: Batch) -> Term:
        return aggregate(losses, batch.mask, batch.sequence, batch.sequences, self.aggregation)


def given(stream: Array | None, need: str) -> Array:
    """The stream of the view or the batch; raises ValueError where the run does not give what the algorithm needs."""
    if stream is None:
        raise ValueError(f"this algorithm needs {need!r}, which the run does not give: configure the {need}")
    return stream


def _clean(x: Any, mask: Array) -> Array:
    """0 outside the mask, whatever stands there."""
    return jnp.where(mask, x, jnp.zeros((), jnp.asarray(x).dtype))


def _group_metrics(view: View) -> dict[str, Array]:
    """Counts of sequences that were left out and of groups that compare with nobody."""
    ones = jnp.ones(view.group.shape, jnp.float32)
    count = group_sum(ones, view.group, view.counted, view.groups)
    present = jnp.any(view.mask, axis=1) & ~view.greedy
    return {
        "groups/singletons": jnp.sum(jnp.where(view.counted & (count == 1), 1.0, 0.0)),
        "groups/invalid": jnp.sum(jnp.where(present & ~view.valid, 1.0, 0.0)),
        "reward/mean": masked_mean(view.reward, view.counted),
    }
