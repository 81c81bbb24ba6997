"""Token stats of a batch: log-probs, entropies and values by the policy, the critic, the reference and the teacher."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax import Array

from jaxrl_llm.algorithms.batch import MicroBatch
from jaxrl_llm.distributed.mesh import Partitioner, to_host
from jaxrl_llm.experience import Group
from jaxrl_llm.learner.batch import Batch, bare, row, to_device
from jaxrl_llm.learner.learner import Bases, Learner
from jaxrl_llm.models.sources import ModelSource, Opened
from jaxrl_llm.protocols import Params

# The fields of Sequences that hold token stats which the learner names otherwise.
FIELDS = {"logprob": "old_logprobs", "value": "values"}

TokenStats = Mapping[str, np.ndarray]  # {name: float32 [S, T]}

ROUTES = "routes"  # the experts that the policy chose while it was scored, beside its token stats: an array of arrays, [S] of [n - 1, L, k]


@dataclass(frozen=True, kw_only=True, eq=False)
class Teacher:
    """A frozen model on the policy's mesh that gives the log-probs of what the policy sampled.

    Its architecture may differ from the policy's; its tokens are the same.

    Attributes:
      learner: scores micro-batches; it trains nothing.
      params: the teacher's parameters.
    """

    learner: Learner
    params: Params

    @classmethod
    def open(cls, opened: Opened, learner: Learner) -> "Teacher":
        """Reads the parameters; the teacher scores with the temperature and row limits by which `learner` scores the policy."""
        scoring = Learner(
            models={"policy": opened.policy}, algorithm=learner.algorithm, optimizers={}, updates=1,
            temperature=learner.temperature, max_segments=learner.max_segments,
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
    learner: Learner,
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
