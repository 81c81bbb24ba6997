"""Holds the groups of a step on the host: unpacked for advantages, packed into minibatches and micro-batches for the device.

A rollout is one row of the unpacked arrays, which holds the tokens of its branches one after the other in the order of their calls. So
statistics of groups, means over a sequence, ratios of a sequence and generalised advantages are those of the whole trajectory: a
return flows from a later branch to the tokens of an earlier one, as time does. The model reads each branch with the tokens before it,
and each sampled token is learned from once, where its branch's mask says so.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.algorithms.batch import Advantages, MicroBatch, Sequences
from jaxrl_llm.distributed.mesh import Partitioner
from jaxrl_llm.experience import Branch, Group, Rollout
from jaxrl_llm.learner.packing import PackedRows, Packing

PACKED = ("batch", "length")


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A sequence that the model reads, and its place in the rollout's row.

    Attributes:
      prefix: int32 [P] tokens before it.
      tokens: int32 [T] tokens of the row.
      offset: index of the first of these tokens in the row.
    """

    prefix: np.ndarray
    tokens: np.ndarray
    offset: int

    @property
    def positions(self) -> int:
        """The number of positions that it takes in a packed row."""
        return len(self.prefix) + len(self.tokens) - 1


def learned_range(branch: Branch) -> tuple[int, int]:
    """Returns (first, end) of the tokens from the first to the last that is learned from in the branch; (0, 0) where none is."""
    places = np.flatnonzero(branch.mask)
    return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)


def _cuts(rollout: Rollout) -> list[tuple[Branch, int, int, int]]:
    """Returns (branch, first, end, offset of the branch in `rollout.spans`) of each branch that has a token to learn from."""
    if len(rollout.branches) < 2:
        (branch,) = rollout.paths
        return [(branch, 0, len(branch.tokens), 0)]
    starts = np.cumsum([0, *(len(b.tokens) for b in rollout.branches)]).tolist()
    ranges = [(b, *learned_range(b), start) for b, start in zip(rollout.branches, starts, strict=False)]
    return [cut for cut in ranges if cut[2] > cut[1]] or [(rollout.branches[-1], 0, len(rollout.tokens), starts[-2])]


def stretches(rollout: Rollout) -> list[Stretch]:
    """Returns the sequences that the model reads for a rollout; of several branches, tokens before the learned ones are prefix."""
    found, offset = [], 0
    for branch, first, end, _ in _cuts(rollout):
        prefix = np.concatenate([branch.prefix, branch.tokens[:first]]) if first else branch.prefix
        found.append(Stretch(prefix=prefix, tokens=branch.tokens[first:end], offset=offset))
        offset += end - first
    return found


def row(rollout: Rollout) -> Rollout:
    """Returns the rollout with the arrays of its row: its own where it has one branch, else those of its stretches joined."""
    if len(rollout.branches) < 2:
        return rollout
    cuts = _cuts(rollout)
    joined = lambda name: np.concatenate([getattr(b, name)[first:end] for b, first, end, _ in cuts])  # noqa: E731
    spans = {
        name: np.concatenate([span[start + first : start + end] for _, first, end, start in cuts])
        for name, span in rollout.spans.items()
    }
    names = ("tokens", "sampler_logprobs", "mask", "versions")
    arrays: dict[str, Any] = {name: joined(name) for name in names}
    return replace(rollout, spans=spans, turns=(), **arrays)


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The groups of a step as flat sequences, with the packed rows of every minibatch.

    Attributes:
      groups: the scored groups.
      sources: names of the data sources; `Sequences.source` holds indices into it.
      response_tokens: T, number of tokens that the unpacked arrays have room for in each rollout's row (`row`).
      capacity: S, largest number of sequences; the unpacked arrays are padded to it, so that their shapes never change.
      minibatches: packed rows of the micro-batches of each minibatch.
      counted: numbers of the sequences that enter the counts of each minibatch; None for those of its rows.
      routes: experts that the learner recorded for each sequence, uint [n - 1, L, k]; None takes those of the rollouts.
    """

    groups: Sequence[Group]
    sources: Sequence[str]
    response_tokens: int
    capacity: int
    minibatches: Sequence[Sequence[PackedRows]]
    counted: Sequence[np.ndarray] | None = None
    routes: Sequence[np.ndarray] | None = None

    @classmethod
    def build(
        cls,
        groups: Sequence[Group],
        packing: Packing,
        *,
        minibatches: int,
        sources: Sequence[str],
        response_tokens: int,
        capacity: int,
    ) -> "Batch":
        """Packs each minibatch, which is a set of whole groups, on its own.

        `response_tokens` is doubled until the row of every rollout has room: an agent's may hold more tokens than the longest single answer.

        Raises:
          ValueError: a sequence does not fit a row, or there are more sequences than `capacity`.
        """
        count = sum(len(g.rollouts) for g in groups)
        if count > capacity:
            raise ValueError(f"{count} sequences are more than the batch holds ({capacity})")
        longest = max((len(row(r).tokens) for g in groups for r in g.rollouts), default=0)
        while response_tokens < longest:
            response_tokens *= 2
        packed = _minibatches(groups, packing, np.array_split(np.arange(len(groups)), minibatches))
        return cls(
            groups=groups, sources=sources, response_tokens=response_tokens, capacity=capacity, minibatches=packed
        )

    def shuffled(self, packing: Packing, seed: Sequence[int]) -> "Batch":
        """Returns the batch with its groups dealt anew to as many minibatches, by `seed`; its sequences keep their numbers."""
        order = np.random.default_rng(list(seed)).permutation(len(self.groups))
        parts = np.array_split(order, len(self.minibatches))
        return replace(self, minibatches=_minibatches(self.groups, packing, parts))

    def without(self, packing: Packing, silent: np.ndarray) -> "Batch":
        """Returns the batch without the rows of sequences that are `silent`, bool [S]; its counts still include all sequences.

        A minibatch whose sequences are all silent keeps one, so that it still makes an update.
        """
        counted = [_members(mini) for mini in self.minibatches]
        kept = [m[~silent[m]] if not silent[m].all() else m[:1] for m in counted]
        rollouts = [r for g in self.groups for r in g.rollouts]
        packed = [_pack(packing, rollouts, [[i] for i in sorted(m.tolist())], together=False) for m in kept]
        return replace(self, minibatches=packed, counted=counted)

    @cached_property
    def rollouts(self) -> list[Rollout]:
        """The rollouts with the arrays of their rows."""
        return [row(r) for g in self.groups for r in g.rollouts]

    @cached_property
    def recorded(self) -> Sequence[np.ndarray | None] | None:
        """The recorded experts of each sequence; None where none has any."""
        found = [r.routes for r in self.rollouts] if self.routes is None else list(self.routes)
        return found if any(x is not None for x in found) else None

    @property
    def rows(self) -> list[PackedRows]:
        """The packed rows of all micro-batches."""
        return [rows for mini in self.minibatches for rows in mini]

    def tokenwise(self, values: Sequence[np.ndarray], dtype: Any = np.float32) -> np.ndarray:
        """Pads per-sequence arrays to one array [S, T]."""
        out = np.zeros((self.capacity, self.response_tokens), dtype)
        for i, x in enumerate(values):
            out[i, : len(x)] = x
        return out

    def per_sequence(self, values: Sequence[Any], dtype: Any, fill: Any = 0) -> np.ndarray:
        """Pads per-sequence values with `fill` to one array [S]."""
        out = np.full(self.capacity, fill, dtype)
        out[: len(values)] = values
        return out

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The fields of `Sequences` that are known without a model, as NumPy arrays."""
        names = {n for g in self.groups for n in g.scores.parts}
        spans = {n for r in self.rollouts for n in r.spans}
        flat = lambda get: [x for g in self.groups for x in get(g)]  # noqa: E731
        part = lambda name: flat(lambda g: np.nan_to_num(g.scores.parts.get(name, np.zeros(len(g.rollouts)))))  # noqa: E731
        none = lambda r: np.zeros(len(r.tokens), bool)  # noqa: E731
        return {
            "reward": self.per_sequence(flat(lambda g: g.total()), np.float32),
            "parts": {n: self.per_sequence(part(n), np.float32) for n in sorted(names) if not n.startswith("log/")},
            "valid": self.per_sequence(flat(lambda g: g.valid()), bool, False),
            "greedy": self.per_sequence([r.role == "greedy" for r in self.rollouts], bool, False),
            "truncated": self.per_sequence([r.finish == "length" for r in self.rollouts], bool, False),
            "group": self.per_sequence(
                [i for i, g in enumerate(self.groups) for _ in g.rollouts], np.int32, max(len(self.groups) - 1, 0)
            ),
            "source": self.per_sequence([self.sources.index(r.prompt.source) for r in self.rollouts], np.int32),
            "side": self.per_sequence(part("log/side"), np.int32),
            "mask": self.tokenwise([r.mask for r in self.rollouts], bool),
            "spans": {n: self.tokenwise([r.spans.get(n, none(r)) for r in self.rollouts], bool) for n in sorted(spans)},
            "sampler_logprobs": self.tokenwise([r.sampler_logprobs for r in self.rollouts]),
        }

    def sequences(self, stats: Mapping[str, np.ndarray], controls: Mapping[str, float], groups: int) -> Sequences:
        """Returns the unpacked batch with token stats [S, T], which may replace fields of `fields`; `groups` is static."""
        absent: dict[str, Any] = dict.fromkeys(
            ("ref_logprobs", "sum_p2", "uniform_logprob", "values", "teacher_logprobs")
        )
        zeros = np.zeros((self.capacity, self.response_tokens), np.float32)
        known: dict[str, Any] = {"old_logprobs": zeros, "entropy": zeros, **absent, **stats}
        moved = {n: np.float32(c) for n, c in controls.items()}
        return Sequences(**{**self.fields, **known}, controls=moved, groups=groups, sources=tuple(self.sources))

    def unpack(self, packed: Sequence[np.ndarray]) -> np.ndarray:
        """Unpacks a token stat of all micro-batches, [B, T] each in the order of `rows`, into one array [S, T]."""
        out = np.zeros((self.capacity, self.response_tokens), np.float32)
        for rows, stats in zip(self.rows, packed, strict=True):
            rows.gather(np.asarray(stats, np.float32), out)
        return out

    def unpack_routes(self, packed: Sequence[np.ndarray]) -> np.ndarray:
        """Unpacks the experts recorded in all micro-batches, [B, T, L, k] each, into an array [S] of arrays [n - 1, L, k]."""
        found: list[Any] = [None] * len(self.rollouts)
        for rows, record in zip(self.rows, packed, strict=True):
            rows.gather_routes(np.asarray(record), found)
        out = np.empty(len(found), object)
        out[:] = found
        return out

    def micro_batches(
        self, sequences: Sequences, advantages: Advantages, constant: float, partitioner: Partitioner
    ) -> list[list[MicroBatch]]:
        """Returns the micro-batches of every minibatch on the device; `sequences` and `advantages` hold NumPy arrays."""
        counted = self.counted or itertools.repeat(None, len(self.minibatches))
        return [
            [to_device(b, partitioner) for b in filled(mini, sequences, advantages, constant, self.recorded, members)]
            for mini, members in zip(self.minibatches, counted, strict=True)
        ]


def filled(
    mini: Sequence[PackedRows],
    sequences: Sequences,
    advantages: Advantages,
    constant: float,
    recorded: Sequence[np.ndarray | None] | None = None,
    counted: np.ndarray | None = None,
) -> list[MicroBatch]:
    """Returns the micro-batches of one minibatch, on the host, with its global counts and the experts recorded for each sequence.

    The counts are over the sequences with the numbers `counted`; None takes the ones in its rows.
    """
    members = _members(mini) if counted is None else counted
    learned = np.any(advantages.loss_mask[members], axis=1)
    group, side = np.asarray(sequences.group)[members], np.asarray(sequences.side)[members]
    learned_sequences = float(np.sum(learned))
    counts = {
        "tokens": float(np.sum(advantages.loss_mask[members])),
        "sequences": learned_sequences,
        "pairs": float(len(np.intersect1d(group[learned & (side > 0)], group[learned & (side < 0)]))),
        "constant": learned_sequences * constant,
        "one": 1.0,
        "read": float(np.sum(advantages.loss_mask[_members(mini)])),
        "routed": float(sum(int(np.sum(rows.segments > 0)) for rows in mini)),
    }
    denominators = {n: np.float32(max(c, 1.0)) for n, c in counts.items()}
    micro = [_fill(rows, sequences, advantages, denominators) for rows in mini]
    if recorded is None:
        return micro
    return [batch.replace(routes=rows.scatter_routes(recorded)) for rows, batch in zip(mini, micro, strict=True)]


def _members(mini: Sequence[PackedRows]) -> np.ndarray:
    """Returns the numbers of the sequences that are in the rows of a minibatch."""
    return np.concatenate([rows.members[rows.members >= 0] for rows in mini])


def _fill(rows: PackedRows, sequences: Sequences, advantages: Advantages, counts: dict[str, Any]) -> MicroBatch:
    def placed(x: np.ndarray | None) -> Any:
        return None if x is None else rows.scatter(x).astype(x.dtype)

    def members(x: np.ndarray) -> np.ndarray:
        return np.where(rows.members >= 0, x[np.maximum(rows.members, 0)], 0).astype(np.int32)

    return MicroBatch(
        tokens=rows.tokens, targets=rows.targets, positions=rows.positions, segments=rows.segments, sequence=rows.sequence,
        mask=placed(advantages.loss_mask), sampler_logprobs=placed(sequences.sampler_logprobs), old_logprobs=placed(sequences.old_logprobs),
        advantages=placed(advantages.advantages), ref_logprobs=placed(sequences.ref_logprobs), old_values=placed(sequences.values),
        returns=placed(advantages.returns), weights=placed(advantages.weights), aux={n: placed(x) for n, x in advantages.aux.items()},
        group=members(sequences.group), side=members(sequences.side), counts=counts,
    )  # fmt: skip


def bare(rows: PackedRows, recorded: Sequence[np.ndarray | None] | None = None) -> MicroBatch:
    """Returns a micro-batch with the tokens alone, and the experts recorded for each sequence where there are any, for scoring."""
    zeros = np.zeros(rows.tokens.shape, np.float32)
    none = np.zeros(rows.members.shape, np.int32)
    return MicroBatch(
        tokens=rows.tokens, targets=rows.targets, positions=rows.positions, segments=rows.segments, sequence=rows.sequence,
        mask=rows.targets >= 0, sampler_logprobs=zeros, old_logprobs=zeros, advantages=zeros, ref_logprobs=None, old_values=None,
        returns=None, weights=None, aux={}, group=none, side=none, counts={},
        routes=None if recorded is None else rows.scatter_routes(recorded),
    )  # fmt: skip


def to_device(batch: MicroBatch, partitioner: Partitioner) -> MicroBatch:
    """Puts a micro-batch on the mesh: rows are split over data and fsdp, positions over context, and the rest is replicated."""
    place = lambda x: partitioner.sharding(packed_axes(x), x.shape) if np.ndim(x) >= 2 else partitioner.replicated  # noqa: E731
    if partitioner.replicated.is_fully_addressable:
        return jax.device_put(batch, jax.tree.map(place, batch))
    # Every process has the whole batch, and gives its devices their shards: nothing is sent between processes.
    return jax.tree.map(lambda x: jax.make_array_from_callback(np.shape(x), place(x), np.asarray(x).__getitem__), batch)


def packed_axes(x: Any) -> tuple[str | None, ...]:
    """Returns the logical axes of a packed array, [B, T] or recorded experts [B, T, L, k]."""
    return (*PACKED, *(None,) * (np.ndim(x) - 2))


def by_sequence(sequences: Sequences, partitioner: Partitioner) -> Sequences:
    """Splits the token streams [S, T] by sequence over all devices of the mesh, where their number divides S.

    Every process has all of the sequences and gives its devices their shares. The split depends on the mesh alone, so that sums have the
    same bits on any number of processes.
    """
    devices = partitioner.mesh.devices.ravel()
    if len(devices) == 1 or len(sequences.reward) % len(devices):
        return sequences
    mesh = Mesh(devices, ("sequence",))
    rows, whole = NamedSharding(mesh, PartitionSpec("sequence", None)), NamedSharding(mesh, PartitionSpec())
    place = jax.tree.map(lambda x: rows if np.ndim(x) == 2 else whole, sequences)
    if whole.is_fully_addressable:
        return jax.device_put(sequences, place)
    share = lambda x, s: jax.make_array_from_callback(np.shape(x), s, np.asarray(x).__getitem__)  # noqa: E731
    return jax.tree.map(share, sequences, place)


def _paired(group: Group) -> bool:
    return "log/side" in group.scores.parts


def _minibatches(groups: Sequence[Group], packing: Packing, parts: Sequence[np.ndarray]) -> list[list[PackedRows]]:
    """Returns the packed rows of each minibatch; a part holds the numbers of its groups."""
    rollouts = [r for g in groups for r in g.rollouts]
    starts = np.cumsum([0, *(len(g.rollouts) for g in groups)])
    packed = []
    for part in parts:
        if len(part):
            atoms = [list(range(starts[g], starts[g + 1])) for g in part]
            packed.append(_pack(packing, rollouts, atoms, together=_paired(groups[part[0]])))
    return packed


def _pack(packing: Packing, rollouts: Sequence[Rollout], atoms: list[list[int]], *, together: bool) -> list[PackedRows]:
    """Packs the rollouts of `atoms` into micro-batches; `together` keeps each atom in one, and a rollout's branches always share one."""
    held = [(i, stretch) for atom in atoms for i in atom for stretch in stretches(rollouts[i])]
    forked = len(held) > sum(map(len, atoms))
    places: dict[int, list[int]] = {}
    for k, (i, _) in enumerate(held):
        places.setdefault(i, []).append(k)
    units = [[k for i in atom for k in places[i]] for atom in atoms] if together else list(places.values())
    prompts, responses = [stretch.prefix for _, stretch in held], [stretch.tokens for _, stretch in held]
    placements = packing.place([stretch.positions for _, stretch in held], units if together or forked else None)
    packed = [PackedRows.build(packing, p, prompts, responses) for p in placements]
    return [_numbered(rows, held) for rows in packed]


def _numbered(rows: PackedRows, held: Sequence[tuple[int, Stretch]]) -> PackedRows:
    """Returns the packed stretches with the numbers of their rollouts, and their places in the rollouts' rows."""
    number = np.array([i for i, _ in held], np.int32)
    offset = np.array([stretch.offset for _, stretch in held], np.int32)
    globally = lambda x, of: np.where(x >= 0, of[np.maximum(x, 0)], -1).astype(np.int32)  # noqa: E731
    local = {i: k for k, i in enumerate(dict.fromkeys(number[rows.members[rows.members >= 0]].tolist()))}
    sequence_of = np.array([local[number[k]] if k >= 0 else 0 for k in rows.members], np.int32)
    members = np.full(len(rows.members), -1, np.int32)
    members[: len(local)] = list(local)
    index_of = np.where(rows.index_of >= 0, rows.index_of + offset[np.maximum(rows.row_of, 0)], -1).astype(np.int32)
    return replace(
        rows,
        row_of=globally(rows.row_of, number),
        index_of=index_of,
        members=members,
        sequence=sequence_of[rows.sequence],
    )
