"""Shapes of a stage's micro-batches before it has sampled any: what its programs are compiled for ahead, and their memory is accounted by."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms.batch import MicroBatch
from jaxrl_llm.distributed.mesh import Partitioner
from jaxrl_llm.experience import Group, Prompt, Rollout, Scores, unscored
from jaxrl_llm.learner.batch import Batch, filled, packed_axes
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.protocols import Naming

SHORT = 4  # a sequence's greatest length over the least mean length that is counted on
TOKEN_STATS = {"reference": "ref_logprobs", "critic": "values", "teacher": "teacher_logprobs"}


def batch_of(stage: Any, learner: Learner, rows: int | None = None) -> MicroBatch:
    """Returns the shapes of a micro-batch of the stage, a `train.Stage`, with every token stat that its algorithm needs and all fields that it
    reads by name; of `rows` rows, or of as many as the stage's largest has."""
    packing = stage.packing if rows is None else replace(stage.packing, rows=rows, tail=0)
    reads = learner.algorithm.reads if isinstance(learner.algorithm, Naming) else {}
    one = _rollout(reads.get("spans", ()))
    if stage.algorithm.learns_from == "pairs":
        groups = [unscored([one, one], sides=(1, -1)) for _ in range(stage.prompts_per_step)]
    else:
        each = stage.sequences // stage.prompts_per_step
        groups = [_scored([one] * each, reads.get("parts", ()) or ("r",)) for _ in range(stage.prompts_per_step)]
    batch = Batch.build(
        groups, packing, minibatches=stage.minibatches, sources=["plan", *reads.get("sources", ())],
        response_tokens=stage.response_tokens, capacity=stage.sequences,
    )  # fmt: skip
    zeros = np.zeros((batch.capacity, batch.response_tokens), np.float32)
    needs = stage.needs
    stats = {field: zeros for need, field in TOKEN_STATS.items() if need in needs}
    stats |= {n: zeros for n in ("sum_p2", "uniform_logprob") if n in needs}
    return shapes_of(batch, learner, stats, stage.prompts_per_step)


def shapes_of(batch: Batch, learner: Learner, stats: Mapping[str, np.ndarray], groups: int) -> MicroBatch:
    """Returns shapes of the first micro-batch of a batch of `groups` groups, with its token stats; its devices need not be attached."""
    sequences = batch.sequences(stats, learner.algorithm.controls, groups)
    shaped = jax.eval_shape(learner.algorithm.advantages, sequences)
    advantages = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shaped)
    return abstract(filled(batch.minibatches[0], sequences, advantages, 1.0)[0], learner.partitioner)


def abstract(batch: MicroBatch, partitioner: Partitioner) -> MicroBatch:
    """Returns shapes and shardings of a micro-batch on the mesh."""

    def described(x: Any) -> jax.ShapeDtypeStruct:
        sharding = partitioner.sharding(packed_axes(x), x.shape) if np.ndim(x) >= 2 else partitioner.replicated
        return jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype, sharding=sharding)

    return jax.tree.map(described, batch)


def foreseen(stage: Any) -> int:
    """Returns the number of micro-batches that a minibatch will have: 1, or 2 for several; 0 where only its samples decide it.

    Several are foreseen where sequences of 1 / SHORT of their greatest length, on average, would need them too. Nothing is where a rollout
    may have several branches, where pairs are made of samples, and, of several, where sequences are left out.
    """
    packing, each = stage.packing, stage.sequences / stage.minibatches
    if stage.plays or stage.pairing is not None:
        return 0
    if rows_wanted(stage) <= packing.rows and not packing.tail:
        return 1
    least = max(each * longest(stage) / (SHORT * packing.row_tokens), each / packing.sequences_per_row)
    return 2 if least > packing.rows and not stage.skip_silent else 0


def summed(stage: Any) -> bool:
    """Returns whether a minibatch may take several micro-batches, whose gradients are summed."""
    return rows_wanted(stage) > stage.packing.rows


def rows_wanted(stage: Any) -> int:
    """Returns the rows that hold a minibatch whose sequences all have their greatest length."""
    each = min(max(stage.packing.row_tokens // longest(stage), 1), stage.packing.sequences_per_row)
    return math.ceil(stage.sequences / stage.minibatches / each)


def longest(stage: Any) -> int:
    """Returns the most positions that a sequence of the stage takes in a row."""
    return min(stage.max_prompt_tokens + stage.response_tokens - 1, stage.packing.row_tokens)


def _rollout(spans: Sequence[str]) -> Rollout:
    prompt = Prompt(id="plan", tokens=np.zeros(1, np.int32), source="plan")
    one = np.ones(1, np.float32)
    return Rollout(
        prompt=prompt, tokens=np.zeros(1, np.int32), sampler_logprobs=-one, mask=one > 0,
        versions=np.zeros(1, np.int32), finish="stop", spans=dict.fromkeys(spans, one > 0),
    )  # fmt: skip


def _scored(rollouts: list[Rollout], names: Sequence[str]) -> Group:
    parts = {name: np.zeros(len(rollouts)) for name in names}
    valid = {name: np.ones(len(rollouts), bool) for name in names}
    return Group(rollouts=rollouts, scores=Scores(parts=parts, valid=valid))
