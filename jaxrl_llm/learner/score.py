"""What models say of a batch: log-probs, entropies and values by the policy, the critic, the reference and the teacher."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_llm.algorithms.batch import Advantages, MicroBatch, Sequences
from jaxrl_llm.distributed import xla_flags
from jaxrl_llm.distributed.mesh import Partitioner, to_host
from jaxrl_llm.experience import Group
from jaxrl_llm.kernels.dispatch import ORDERED
from jaxrl_llm.kernels.teacher_divergence.api import teacher_divergence
from jaxrl_llm.kernels.token_stats import api as kernel
from jaxrl_llm.learner.batch import Batch, bare, by_sequence, row, to_device
from jaxrl_llm.learner.router import Router
from jaxrl_llm.models.architecture import Capture
from jaxrl_llm.models.experts import Report
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.sources import ModelSource, Opened
from jaxrl_llm.protocols import Algorithm, Distilling, Params

Bases = Mapping[str, Params]  # {model name: frozen parameters under its adapters}
NO_BASES: Bases = {}
STREAMS = ("logprob", "entropy", "sum_p2", "uniform_logprob", "noise_logprob", "teacher_divergence")
UPDATES = ("noise_logprob", "teacher_divergence")  # streams that are read in updates alone
TEACHER = "teacher"  # the frozen model whose distribution the policy is drawn to, among the bases

# The fields of Sequences that hold token stats which the learner names otherwise.
FIELDS = {"logprob": "old_logprobs", "value": "values"}

TokenStats = Mapping[str, np.ndarray]  # {name: float32 [S, T]}

ROUTES = "routes"  # the experts that the policy chose while it was scored, beside its token stats: an array of arrays, [S] of [n - 1, L, k]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scorer:
    """Reads micro-batches with models; it knows an algorithm by the protocol alone.

    Attributes:
      models: {"policy": Policy} and, where the algorithm needs one, {"critic": ValueModel} or {"reward_model": ValueModel}.
      algorithm: the objective.
      capture: where the policy's log-probs are read from; None is the model's own output.
      temperature: log-probs are those of softmax(logits / temperature), the distribution sampled from.
      max_segments: most sequences of a packed row.
      router: what is replayed and balanced where the policy has experts.
      teacher: the model of "teacher_divergence", whose parameters are bases["teacher"]; None for other algorithms.
    """

    models: Mapping[str, Any]
    algorithm: Algorithm
    capture: Capture | None = None
    temperature: float = 1.0
    max_segments: int | None = None
    router: Router = field(default_factory=Router)
    teacher: Policy | None = None

    @property
    def policy(self) -> Policy:
        return self.models["policy"]

    @property
    def partitioner(self) -> Partitioner:
        return self.policy.partitioner

    def jit(self, compute: Callable[..., Any], **settings: Any) -> Any:
        """`jax.jit` of a program with gradients, which in the bitwise mode gives the same bits at every call."""
        options = xla_flags.deterministic(os.environ) if self.policy.bitwise else None
        return jax.jit(compute, compiler_options=options, **settings)

    def outputs(
        self,
        params: Mapping[str, Params],
        batch: MicroBatch,
        streams: Sequence[str],
        bases: Bases = NO_BASES,
        noise_key: Array | None = None,
    ) -> dict[str, dict[str, Array]]:
        """Per-token float32 arrays [B, T] of the models that `params` names; log-probs are 0 where nothing is predicted.

        Here and below, `bases` holds the frozen parameters under adapters, of the models that have adapters.
        `noise_key` seeds the noise of "noise_logprob".
        """
        return self._read(params, batch, streams, bases, noise_key)[0]

    def _read(
        self,
        params: Mapping[str, Params],
        batch: MicroBatch,
        streams: Sequence[str],
        bases: Bases,
        noise_key: Array | None = None,
    ) -> tuple[dict[str, dict[str, Array]], Report | None]:
        """`outputs`, and what the policy's experts did."""
        places, report = (batch.tokens, batch.positions, batch.segments), None
        found = {}
        for name, model in self.models.items():
            if name not in params:
                continue
            whole = model.joined(params[name], bases.get(name))
            if name == "policy":
                hidden, report = self._routed(whole, batch)
                own, targets = (hidden.reshape(-1, hidden.shape[-1]), model.head(whole)), batch.targets.reshape(-1)
                mesh = self.partitioner.mesh if self.partitioner.mesh.size > 1 else None
                stats = kernel.token_stats(
                    *own, targets, temperature=self.temperature, outputs=tuple(s for s in streams if s != "teacher_divergence"),
                    noise_key=noise_key, mesh=mesh, backend=ORDERED if self.policy.bitwise else None,
                )  # fmt: skip
                if "teacher_divergence" in streams:
                    assert isinstance(self.algorithm, Distilling)
                    stats["teacher_divergence"] = teacher_divergence(
                        own, self._teacher(batch, bases), targets, mixture=self.algorithm.mixture, temperature=self.temperature,
                        mesh=mesh,
                    )  # fmt: skip
                found[name] = {stream: x.reshape(batch.targets.shape) for stream, x in stats.items()}
            else:
                found[name] = {"value": model.values(whole, *places, max_segments=self.max_segments)}
        return found, report

    def _routed(self, whole: Params, batch: MicroBatch) -> tuple[Array, Report | None]:
        """The policy's hidden states, with the batch's recorded experts, and what its experts did."""
        places, replay = (batch.tokens, batch.positions, batch.segments), self.router.replay != "off"
        more = {} if batch.routes is None else {"routes": batch.routes, "replay": replay}
        return self.policy.routed(whole, *places, **more, capture=self.capture, max_segments=self.max_segments)

    def _teacher(self, batch: MicroBatch, bases: Bases) -> tuple[Array, Array]:
        """The teacher's hidden states [B T, E] and head [V, E]; where it has experts, they are its own."""
        assert self.teacher is not None  # by Stage
        places = (batch.tokens, batch.positions, batch.segments)
        hidden, _ = self.teacher.routed(bases[TEACHER], *places, max_segments=self.max_segments)
        return hidden.reshape(-1, hidden.shape[-1]), self.teacher.head(bases[TEACHER])

    @cached_property
    def _loads(self) -> Any:
        def loads(params: Params, batch: MicroBatch, bases: Bases) -> Array:
            report = self._routed(self.policy.joined(params, bases.get("policy")), batch)[1]
            assert report is not None  # asked for policies with experts alone
            return report.counts

        return jax.jit(loads, out_shardings=self.partitioner.replicated)

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """The names of the policy's token stats that the algorithm reads."""
        return tuple(s for s in STREAMS if s in ("logprob", "entropy") or s in self.algorithm.needs)

    @cached_property
    def _score(self) -> Any:
        drawn = tuple(s for s in self.streams if s not in UPDATES)

        def score(params: Mapping[str, Params], batch: MicroBatch, bases: Bases) -> dict[str, dict[str, Array]]:
            found, report = self._read(params, batch, drawn, bases)
            if report is not None and self.router.replay == "R2":
                found["policy"]["routes"] = jnp.moveaxis(report.chosen, 0, 2)
            return found

        return jax.jit(score)

    @cached_property
    def _score_frozen(self) -> Any:
        def logprob(params: Params, batch: MicroBatch, bases: Bases) -> Array:
            live = batch.replace(routes=None)  # a frozen policy's experts are its own
            return self.outputs({"policy": params}, live, ("logprob",), bases)["policy"]["logprob"]

        return jax.jit(logprob)

    def score(
        self, params: Mapping[str, Params], batch: MicroBatch, bases: Bases = NO_BASES
    ) -> dict[str, dict[str, Array]]:
        """Computes `outputs` without gradient: old log-probs, entropies, values; and under replay "R2" the policy's "routes" [B, T, L, k]."""
        return self._score(dict(params), batch, dict(bases))

    def score_frozen(self, params: Params, batch: MicroBatch, bases: Bases = NO_BASES) -> Array:
        """Log-probs [B, T] of the batch's targets under frozen parameters of the policy's shape, such as the reference."""
        return self._score_frozen(params, batch, dict(bases))

    @cached_property
    def _advantages(self) -> Any:
        return jax.jit(self.algorithm.advantages)

    def advantages(self, sequences: Sequences) -> Advantages:
        """`Algorithm.advantages`, jitted, with the sequences split over the devices of the mesh."""
        found: Advantages = self._advantages(by_sequence(sequences, self.partitioner))
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Teacher:
    """A frozen model on the policy's mesh that gives the log-probs of what the policy sampled.

    Its architecture may differ from the policy's; its tokens are the same.

    Attributes:
      learner: scores micro-batches.
      params: the teacher's parameters.
    """

    learner: Scorer
    params: Params

    @classmethod
    def open(cls, opened: Opened, learner: Scorer) -> "Teacher":
        """Reads the parameters; the teacher scores with the temperature and row limits by which `learner` scores the policy."""
        scoring = Scorer(
            models={"policy": opened.policy}, algorithm=learner.algorithm, temperature=learner.temperature,
            max_segments=learner.max_segments,
        )  # fmt: skip
        return cls(learner=scoring, params=opened.params())

    def logprobs(self, batch: MicroBatch) -> Array:
        """Log-probs [B, T] of the batch's targets."""
        return self.learner.score_frozen(self.params, batch)


def found(source: ModelSource, tokenizer: Any, partitioner: Partitioner) -> Opened:
    """Opens the teacher, without reading its parameters yet.

    Raises:
      OSError: there is no such folder or checkpoint.
      ValueError: its tokens differ from those of `tokenizer`.
    """
    opened = source.open(partitioner)
    theirs, ours = opened.tokenizer.get_vocab(), tokenizer.get_vocab()
    if theirs != ours:
        different = sorted(t for t in theirs.keys() | ours.keys() if theirs.get(t) != ours.get(t))
        raise ValueError(
            f"the teacher {opened.name} has other tokens than the policy ({len(theirs)} and {len(ours)}; such as {different[:3]}) "
            "and is asked about the policy's token ids: set TEACHER_PATH to a model with the policy's tokenizer"
        )
    return opened


def token_stats(
    learner: Scorer,
    params: Mapping[str, Params] | None,
    batch: Batch,
    bases: Bases,
    *,
    reference: Params | None = None,
    teacher: Teacher | None = None,
) -> dict[str, np.ndarray]:
    """Token stats of a batch, {name: float32 [S, T]}, under the names of the fields of `Sequences`.

    Args:
      learner: reads the log-probs, at the end of the model or inside it.
      params: {model name: parameters} of the policy and the critic; None leaves these two out.
      batch: the groups of a step.
      bases: {model name: frozen parameters under its adapters}.
      reference: parameters of the reference policy on the device, or None.
      teacher: the teacher, which scores the batch too, or None.
    """
    recorded = batch.recorded if learner.router.replay == "R3" else None
    device = [to_device(bare(rows, recorded), learner.partitioner) for rows in batch.rows]
    stats: dict[str, np.ndarray] = {}
    if params is not None:
        scored = [learner.score(params, micro, bases) for micro in device]
        for model, names in scored[0].items():
            kept = [n for n in names if n != ROUTES]
            stats |= {FIELDS.get(n, n): batch.unpack([to_host(s[model][n]) for s in scored]) for n in kept}
        if ROUTES in scored[0].get("policy", {}):
            stats[ROUTES] = batch.unpack_routes([to_host(s["policy"][ROUTES]) for s in scored])
    if reference is not None:
        scored_frozen = [learner.score_frozen(reference, micro, bases) for micro in device]
        stats["ref_logprobs"] = batch.unpack([to_host(x) for x in scored_frozen])
    if teacher is not None:
        stats["teacher_logprobs"] = batch.unpack([to_host(teacher.logprobs(micro)) for micro in device])
    return stats


def with_routes(batch: Batch, stats: TokenStats) -> tuple[Batch, TokenStats]:
    """The batch with the experts that were recorded with its token stats, and the other token stats."""
    if ROUTES not in stats:
        return batch, stats
    rest = {name: x for name, x in stats.items() if name != ROUTES}
    return replace(batch, routes=list(stats[ROUTES])), rest


def means_of_rollouts(groups: Sequence[Group], stats: TokenStats) -> list[dict[str, np.ndarray]]:
    """Means over the policy's own tokens of each rollout, {name: float64 [G]} by group, of token stats [S, T]."""
    out, start = [], 0
    for group in groups:
        rows = range(start, start + len(group.rollouts))
        masks = [row(rollout).mask for rollout in group.rollouts]
        start += len(group.rollouts)
        means = {}
        for name, values in stats.items():
            each = [
                values[i, : len(mask)][mask].mean() if mask.any() else 0.0 for i, mask in zip(rows, masks, strict=True)
            ]
            means[name] = np.asarray(each, np.float64)
        out.append(means)
    return out
