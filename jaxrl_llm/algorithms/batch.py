"""An algorithm's inputs and outputs: the step's sequences, the advantages of their tokens, and packed micro-batches.

Fields are jax.Arrays under jit and NumPy arrays on the host, where sequences are unpacked and micro-batches are filled.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Array = Any  # jax.Array or np.ndarray

# A sum, and the name of the global count that divides it: "tokens", "read", "sequences", "pairs", "constant" or "one".
Term = tuple[jax.Array, str]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "reward", "parts", "valid", "greedy", "truncated", "group", "source", "side", "mask", "spans", "sampler_logprobs",
        "old_logprobs", "entropy", "ref_logprobs", "sum_p2", "uniform_logprob", "values", "teacher_logprobs", "controls",
    ],
    meta_fields=["groups", "sources"],
)  # fmt: skip
@dataclass(frozen=True, kw_only=True)
class Sequences:
    """All sequences of a step's batch, unpacked and padded to [S, T]: the input of `Algorithm.advantages`.

    A rollout is one sequence, whatever the number of its branches, whose tokens stand one after the other in the order of their calls.

    Attributes:
      reward: float32 [S] weighted sum of the reward's parts; 0 where invalid.
      parts: {name: float32 [S]} parts of the reward.
      valid: bool [S]; False for padding and for rollouts whose reward could not be computed.
      greedy: bool [S]; True for greedy rollouts, which are left out of statistics and loss.
      truncated: bool [S]; True for responses that a length limit cut off before their end.
      group: int32 [S] number of the prompt's group, in 0..groups-1.
      source: int32 [S] number of the data source.
      side: int32 [S] 1 for the preferred, -1 for the rejected answer of a pair, 0 otherwise.
      mask: bool [S, T] tokens that the policy chose.
      spans: {name: bool [S, T]} named token ranges.
      sampler_logprobs: float32 [S, T] log-probs under the distribution that the token was drawn from.
      old_logprobs: float32 [S, T] log-probs of the learner's policy before the update; 0 where it was not scored.
      entropy: float32 [S, T] entropies of the learner's policy before the update; 0 where it was not scored.
      ref_logprobs, sum_p2, uniform_logprob, values, teacher_logprobs: float32 [S, T], or None where the algorithm does not need them.
      controls: {name: float32 []} values of the controllers, such as an adaptive KL coefficient.
      groups: number of groups that statistics have room for, static.
      sources: names of the data sources by number, static.
    """

    reward: Array
    parts: dict[str, Array]
    valid: Array
    greedy: Array
    truncated: Array
    group: Array
    source: Array
    side: Array
    mask: Array
    spans: dict[str, Array]
    sampler_logprobs: Array
    old_logprobs: Array
    entropy: Array
    ref_logprobs: Array | None
    sum_p2: Array | None
    uniform_logprob: Array | None
    values: Array | None
    teacher_logprobs: Array | None
    controls: dict[str, Array]
    groups: int
    sources: tuple[str, ...] = ()

    @property
    def counted(self) -> Array:
        """The sequences that enter statistics and loss, bool [S]."""
        return self.valid & ~self.greedy & jnp.any(self.mask, axis=1)

    @property
    def learned(self) -> Array:
        """The tokens that enter statistics and loss, bool [S, T]."""
        return self.mask & self.counted[:, None]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["advantages", "loss_mask", "returns", "weights", "aux", "metrics"],
    meta_fields=[],
)
@dataclass(frozen=True, kw_only=True)
class Advantages:
    """The result of `Algorithm.advantages`: what it assigns to every token of the sequences.

    Attributes:
      advantages: float32 [S, T].
      loss_mask: bool [S, T] tokens that are learned from.
      returns: float32 [S, T] targets of the critic, or None.
      weights: float32 [S, T] importance weights of the tokens, or None for 1.
      aux: {name: [S, T]} further per-token arrays that `loss` reads from the micro-batch.
      metrics: {name: float32 []} scalars to log.
    """

    advantages: Array
    loss_mask: Array
    returns: Array | None = None
    weights: Array | None = None
    aux: dict[str, Array] = field(default_factory=dict)
    metrics: dict[str, Array] = field(default_factory=dict)

    @property
    def silent(self) -> Array:
        """The sequences without an advantage at any token that is learned from, bool [S]."""
        return ((self.advantages == 0) | ~self.loss_mask).all(axis=1)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "tokens", "targets", "positions", "segments", "sequence", "mask", "sampler_logprobs", "old_logprobs", "ref_logprobs",
        "old_values", "advantages", "returns", "weights", "aux", "group", "side", "counts", "routes", "loads",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One packed micro-batch; every per-token array is indexed by the position that predicts `targets[b, t]`.

    Attributes:
      tokens, targets: int32 [B, T]; targets is -1 where nothing is predicted.
      positions: int32 [B, T] position within the sequence.
      segments: int32 [B, T] number of the sequence, or of a branch of it, within its row, from 1; 0 is padding.
      sequence: int32 [B, T] number of the sequence within the micro-batch, 0..S-1, which its branches share.
      mask: bool [B, T] targets that are learned from.
      sampler_logprobs, old_logprobs, advantages: float32 [B, T].
      ref_logprobs, old_values, returns, weights: float32 [B, T], or None.
      aux: {name: [B, T]} the arrays of `Advantages.aux`.
      group, side: int32 [S], as in `Sequences`; entries beyond the last sequence have an empty mask.
      counts: {name: float32 []} global denominators: tokens, sequences, pairs, constant, one; read, the tokens of the sequences that are in
        rows; and routed, the minibatch's positions that are no padding.
      routes: uint [B, T, L, k] experts that were recorded for each position in each layer with experts, or None.
      loads: int32 [L, E] positions of the whole minibatch at each expert of each such layer, or None.
    """

    tokens: Array
    targets: Array
    positions: Array
    segments: Array
    sequence: Array
    mask: Array
    sampler_logprobs: Array
    old_logprobs: Array
    advantages: Array
    ref_logprobs: Array | None
    old_values: Array | None
    returns: Array | None
    weights: Array | None
    aux: dict[str, Array]
    group: Array
    side: Array
    counts: dict[str, Array]
    routes: Array | None = None
    loads: Array | None = None

    @property
    def sequences(self) -> int:
        """The number of sequences that a micro-batch has room for, static."""
        return self.group.shape[0]

    def replace(self, **changes: Any) -> "MicroBatch":
        return replace(self, **changes)


def given(stats: Array | None, need: str) -> Array:
    """Returns `stats`; raises ValueError where it is None, since the run does not provide what the algorithm needs."""
    if stats is None:
        raise ValueError(f"this algorithm needs {need!r}, which the run does not give: configure the {need}")
    return stats
