"""Packs sequences of any length into rows of a fixed shape, with no token learned twice and little padding.

A sequence of n tokens takes n - 1 positions: position t holds token t and predicts token t + 1. Sequences are spread by
longest-first scheduling (Graham 1969), so micro-batches and rows carry nearly equal numbers of tokens; where that leaves
no room in the rows, they are filled one after the other (best fit, longest first), before another micro-batch is added.

With a tail, rows are filled first: each takes the longest sequence left, and those that then leave the least room. The last
micro-batches have fewer rows in place of empty ones: their numbers of rows are halved, and each is a shape of its own to compile. Rows
of similar cost then share a micro-batch, in an order by which the devices' shares cost nearly the same; a sequence of n tokens costs
n + n^2 / ATTENTION, since attention grows with its length.
"""

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm import components

WINDOW = 128  # largest number of sequences that are tried beside a row's longest one

# The length at which a causal sequence's attention costs as much as its matrix products, weights / (layers x heads x head width).
# It is 23,000 for Qwen2.5-0.5B, 36,000 for 1.5B and 76,000 for 7B.
ATTENTION = 32768


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The shape of a micro-batch.

    Attributes:
      row_tokens: number of positions of a row; a sequence (the tokens of prompt and response, less one) must fit.
      rows: number of rows of a micro-batch over all devices, a multiple of data x fsdp x expert; "auto" lets a launch choose it by the
        device's memory, with rematerialisation and the place and dtype of moments. A resumed run keeps what was chosen.
      sequences_per_row: largest number of sequences of one row; below row_tokens / (mean positions of a sequence) it leaves rows half empty.
      tail: smallest number of rows of a step's last micro-batches, which have rows / 2, rows / 4, ...; a multiple of data x fsdp x expert. 0
        gives every micro-batch the same shape.
    """

    row_tokens: int = 1024
    rows: Any = 8
    sequences_per_row: int = 16
    tail: int = 0

    def __post_init__(self) -> None:
        components.at_least(self, 1, "row_tokens", "sequences_per_row")
        if self.rows == "auto":
            if self.tail:
                raise ValueError(f"train.Packing.tail must be 0 where rows are 'auto' (got {self.tail})")
            return
        if not isinstance(self.rows, int) or isinstance(self.rows, bool):
            components.refuse(self, "rows", "a whole number >= 1, or 'auto'")
        components.at_least(self, 1, "rows")
        if self.tail and self.tail not in (
            self.rows >> k for k in range(self.rows.bit_length()) if self.rows % 2**k == 0
        ):
            raise ValueError(f"train.Packing.tail must be 0, or rows ({self.rows}) halved some times (got {self.tail})")

    @property
    def sequences(self) -> int:
        """The largest number of sequences of a micro-batch."""
        return self.rows * self.sequences_per_row

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows that a micro-batch may have, the largest first."""
        if not self.tail:
            return [self.rows]
        return [self.rows >> k for k in range(self.rows.bit_length()) if self.rows >> k >= self.tail]

    def fits(self, lengths: Sequence[int]) -> bool:
        """Returns whether sequences of `lengths` positions fit one micro-batch together."""
        return max(lengths) <= self.row_tokens and self._rows(lengths, list(range(len(lengths)))) is not None

    def place(self, lengths: Sequence[int], atoms: Sequence[Sequence[int]] | None = None) -> list["Placement"]:
        """Assigns every sequence to a row of a micro-batch.

        Args:
          lengths: positions of each sequence (its tokens less one).
          atoms: sequences that must share a micro-batch, such as the halves of a pair; by default each stands alone.

        Raises:
          ValueError: a sequence is longer than a row, or an atom does not fit a micro-batch.
        """
        if not len(lengths):
            return []
        longest = max(lengths)
        if longest > self.row_tokens:
            raise ValueError(
                f"a sequence of {longest} positions does not fit a row: set train.Packing.row_tokens >= {longest} (got {self.row_tokens})"
            )
        units = [[i] for i in range(len(lengths))] if atoms is None else [list(a) for a in atoms]
        for unit in units:
            if len(unit) > 1 and self._rows(lengths, unit) is None:
                raise ValueError(
                    f"{len(unit)} sequences of {sum(lengths[i] for i in unit)} positions must share a micro-batch and do not fit its "
                    f"{self.rows} rows of {self.row_tokens} positions and {self.sequences_per_row} sequences: set train.Packing.rows, "
                    "row_tokens or sequences_per_row higher"
                )
        if self.tail and atoms is None:
            return self._with_tail(lengths)
        tokens = -(-sum(lengths) // (self.rows * self.row_tokens))
        alone = sum(2 * n > self.row_tokens for n in lengths)  # no two of these share a row
        count = max(tokens, -(-len(lengths) // self.sequences), -(-alone // self.rows), 1)
        while (placed := self._try(lengths, units, count)) is None:
            count += 1
        return placed

    def _with_tail(self, lengths: Sequence[int]) -> list["Placement"]:
        """Fills rows and places them, the costliest first, into micro-batches of `rows` rows and then of halved numbers of rows."""
        rows = _fill(lengths, self.row_tokens, self.sequences_per_row)
        cost = lambda row: sum(lengths[i] + lengths[i] ** 2 / ATTENTION for i in row)  # noqa: E731
        rows.sort(key=lambda row: (-cost(row), row))
        placements = []
        while rows:
            needed = -(-len(rows) // self.tail) * self.tail
            size = next(size for size in self.sizes if size <= needed)
            members, rows = rows[:size], rows[size:]
            members += [[] for _ in range(size - len(members))]
            placements.append(Placement([members[i] for i in _spread_order(size)]))
        return placements

    def _try(self, lengths: Sequence[int], atoms: list[list[int]], count: int) -> list["Placement"] | None:
        """Spreads atoms over `count` micro-batches, then each one's sequences over its rows; None where something does not fit."""
        members = _spread(
            atoms, [sum(lengths[i] for i in a) for a in atoms], count, self.rows * self.row_tokens, self.sequences
        )
        if members is None:
            return None
        placements = []
        for atom_list in members:
            inside = [i for a in atom_list for i in a]
            rows = self._rows(lengths, inside)
            if rows is None:
                return None
            placements.append(Placement(rows))
        return placements

    def _rows(self, lengths: Sequence[int], inside: list[int]) -> list[list[int]] | None:
        """Spreads the sequences of one micro-batch over its rows; None where they do not fit."""
        alone, loads = [[i] for i in inside], [lengths[i] for i in inside]
        limits = (self.rows, self.row_tokens, self.sequences_per_row)
        rows = _spread(alone, loads, *limits) or _fit(alone, loads, *limits)
        return None if rows is None else [[i for (i,) in row] for row in rows]


@dataclass(frozen=True)
class Placement:
    """The assignment of sequences to the rows of a micro-batch, in order.

    Attributes:
      rows: sequence numbers by row.
    """

    rows: list[list[int]]

    @property
    def members(self) -> list[int]:
        """The micro-batch's sequences in the order of their local numbers."""
        return [i for row in self.rows for i in row]


def _fill(lengths: Sequence[int], capacity: int, most: int) -> list[list[int]]:
    """Fills rows with at most `most` sequences each: the longest one left, and those that then leave the least room (Gupta and Ho 1999).

    Where more than WINDOW sequences would fit beside it, evenly spaced ones of them are tried.
    """
    size = [max(n, 1) for n in lengths]
    left, rows = sorted(range(len(lengths)), key=lambda i: (-size[i], i)), []
    while left:
        row = [left.pop(0)]
        room = capacity - size[row[0]]
        begin = bisect.bisect_left(left, -room, key=lambda i: -size[i])
        tried = range(begin, len(left), max(1, -(-(len(left) - begin) // WINDOW)))
        beside = _closest([size[left[k]] for k in tried], room)[: most - 1]
        row += [left[tried[k]] for k in beside]
        for k in reversed(beside):
            del left[tried[k]]
        rows.append(row)
    return rows


def _closest(sizes: Sequence[int], room: int) -> list[int]:
    """Returns the indices, in order, of the `sizes` with the largest sum that is at most `room`; bit n of a sum set marks n as reachable."""
    within, reached = (1 << (room + 1)) - 1, [1]
    for size in sizes:
        reached.append((reached[-1] | (reached[-1] << size)) & within)
    total, found = reached[-1].bit_length() - 1, []
    for k in range(len(sizes) - 1, -1, -1):
        if not reached[k] >> total & 1:
            found.append(k)
            total -= sizes[k]
    return found[::-1]


def _spread_order(size: int) -> list[int]:
    """Returns the order in which `size` rows, sorted by cost, are placed: each half, quarter, ... gets every second, fourth, ... of them."""
    if size % 2:
        return list(range(size))
    half = _spread_order(size // 2)
    # Of each two neighbours in cost, the two halves get the costlier one in turn.
    return [2 * i + i % 2 for i in half] + [2 * i + 1 - i % 2 for i in half]


def _spread(
    items: list[list[int]], loads: Sequence[int], bins: int, capacity: int, most: int
) -> list[list[list[int]]] | None:
    """Puts items, longest first, onto the least loaded of `bins`; None where a bin would pass its capacity or number of sequences."""
    heap = [(0, b) for b in range(bins)]
    filled: list[list[list[int]]] = [[] for _ in range(bins)]
    counts = [0] * bins
    for item in sorted(range(len(items)), key=lambda i: (-loads[i], i)):
        aside = []
        while heap:
            load, b = heapq.heappop(heap)
            if load + loads[item] > capacity:
                return None  # the least loaded bin with room for one more sequence is too full
            if counts[b] + len(items[item]) <= most:
                break
            aside.append((load, b))
        else:
            return None
        filled[b].append(items[item])
        counts[b] += len(items[item])
        for entry in (*aside, (load + loads[item], b)):
            heapq.heappush(heap, entry)
    return filled


def _fit(
    items: list[list[int]], loads: Sequence[int], bins: int, capacity: int, most: int
) -> list[list[list[int]]] | None:
    """Puts items, longest first, into the fullest of `bins` that still takes each; None where none does."""
    filled: list[list[list[int]]] = [[] for _ in range(bins)]
    load, counts = [0] * bins, [0] * bins
    for item in sorted(range(len(items)), key=lambda i: (-loads[i], i)):
        n = len(items[item])
        open_bins = [b for b in range(bins) if load[b] + loads[item] <= capacity and counts[b] + n <= most]
        if not open_bins:
            return None
        fullest = max(open_bins, key=lambda b: load[b])
        filled[fullest].append(items[item])
        load[fullest] += loads[item]
        counts[fullest] += n
    return filled


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """One micro-batch on the host: its fixed arrays, and the place of each position in the unpacked arrays [S, T].

    Attributes:
      tokens, targets, positions, segments, sequence: int32 [B, T], as in `batch.MicroBatch`.
      row_of: int32 [B, T] row of the unpacked arrays that the position's target belongs to; -1 where nothing is predicted.
      index_of: int32 [B, T] index of the target within the response; -1 within the prompt.
      members: int32 [S] unpacked row of each local sequence; -1 beyond the last.
    """

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    sequence: np.ndarray
    row_of: np.ndarray
    index_of: np.ndarray
    members: np.ndarray

    @classmethod
    def build(
        cls, packing: Packing, placement: Placement, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]
    ) -> "PackedRows":
        """Fills the arrays; `placement` numbers `prompts` and `responses`, int32 token ids."""
        shape = (len(placement.rows), packing.row_tokens)
        tokens, positions, segments, sequence = (np.zeros(shape, np.int32) for _ in range(4))
        targets, row_of, index_of = (np.full(shape, -1, np.int32) for _ in range(3))
        members = np.full(len(placement.rows) * packing.sequences_per_row, -1, np.int32)
        local = 0
        for r, row in enumerate(placement.rows):
            start = 0
            for segment, i in enumerate(row, start=1):
                whole = np.concatenate([prompts[i], responses[i]])
                n, first = len(whole) - 1, len(prompts[i]) - 1
                here = slice(start, start + n)
                tokens[r, here], positions[r, here] = whole[:-1], np.arange(n)
                segments[r, here], sequence[r, here] = segment, local
                predicts = slice(start + first, start + n)
                targets[r, predicts], row_of[r, predicts] = whole[first + 1 :], i
                index_of[r, predicts] = np.arange(n - first)
                members[local] = i
                local, start = local + 1, start + n
        return cls(
            tokens=tokens, targets=targets, positions=positions, segments=segments, sequence=sequence,
            row_of=row_of, index_of=index_of, members=members,
        )  # fmt: skip

    def scatter(self, stats: np.ndarray) -> np.ndarray:
        """Packs an array [S, T] to the positions that predict its tokens [B, T]; other positions get 0."""
        return np.where(self.index_of >= 0, stats[np.maximum(self.row_of, 0), np.maximum(self.index_of, 0)], 0)

    def gather(self, packed: np.ndarray, into: np.ndarray) -> None:
        """Writes a packed array [B, T] into the unpacked array `into` [S, T]."""
        here = self.index_of >= 0
        into[self.row_of[here], self.index_of[here]] = packed[here]

    def scatter_routes(self, recorded: Sequence[np.ndarray | None]) -> np.ndarray:
        """Packs recorded experts, uint [at most n - 1, L, k] by unpacked row, to [B, T, L, k]; the dtype's largest number stands for none."""
        shape, dtype = next((x.shape[1:], x.dtype) for x in recorded if x is not None)
        out = np.full((*self.tokens.shape, *shape), np.iinfo(dtype).max, dtype)
        for member, here in self._places():
            found = recorded[member]
            if found is not None:
                positions = self.positions[here]
                within = positions < len(found)
                out[here[0][within], here[1][within]] = found[positions[within]]
        return out

    def gather_routes(self, packed: np.ndarray, into: list[Any]) -> None:
        """Writes packed experts [B, T, L, k] into a list by unpacked row, [n - 1, L, k] each."""
        for member, here in self._places():
            into[member] = packed[here]

    def _places(self) -> list[tuple[Any, tuple[np.ndarray, ...]]]:
        """Returns (unpacked row, indices of its positions in order) of each sequence."""
        filled = self.segments > 0
        return [
            (member, np.nonzero(filled & (self.sequence == i)))
            for i, member in enumerate(self.members.tolist())
            if member >= 0
        ]
