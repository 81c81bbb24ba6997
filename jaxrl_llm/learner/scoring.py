"""What the learner reads from models, under jit: log-probs, entropies and values of packed rows, and the advantages of sequences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.algorithms.batch import Advantages, MicroBatch, Sequences
from jaxrl_llm.distributed.mesh import Partitioner
from jaxrl_llm.kernels.token_stats.api import token_stats
from jaxrl_llm.learner.batch import by_sequence
from jaxrl_llm.learner.router import Router
from jaxrl_llm.models.architecture import Capture
from jaxrl_llm.models.experts import Report
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.protocols import Algorithm, Params

Bases = Mapping[str, Params]  # {model name: frozen parameters under its adapters}
NO_BASES: Bases = {}
STREAMS = ("logprob", "entropy", "sum_p2", "uniform_logprob", "noise_logprob")


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
    """

    models: Mapping[str, Any]
    algorithm: Algorithm
    capture: Capture | None = None
    temperature: float = 1.0
    max_segments: int | None = None
    router: Router = field(default_factory=Router)

    @property
    def policy(self) -> Policy:
        return self.models["policy"]

    @property
    def partitioner(self) -> Partitioner:
        return self.policy.partitioner

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
                stats = token_stats(
                    hidden.reshape(-1, hidden.shape[-1]), model.head(whole), batch.targets.reshape(-1),
                    temperature=self.temperature, outputs=tuple(streams), noise_key=noise_key,
                    mesh=self.partitioner.mesh if self.partitioner.mesh.size > 1 else None,
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
        drawn = tuple(s for s in self.streams if s != "noise_logprob")  # noise is drawn in updates alone

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
