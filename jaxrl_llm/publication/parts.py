"""One rank's parts of a version's tensors, the memory into which they are read, and what that memory still holds (NumPy only)."""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.publication.manifest import Manifest, TensorEntry, element_type, partial_sum

Box = tuple[slice, ...]
_ALIGNMENT = 64  # bytes
_SUMMED_BYTES = 1 << 26  # most bytes that one thread sums at a time


@dataclass(frozen=True, kw_only=True)
class Target:
    """One rank's part of one tensor.

    Attributes:
      shape: shape of the whole tensor.
      box: the part that the rank loads, one slice with a start and a stop for each axis.
      counted: whether this rank's part counts in the tensor's checksum; of ranks that load the same part, one counts. Each rank checks
        a tensor that every rank loads whole.
      divided: whether the ranks load different parts, even where this one's is the whole tensor and the others' are empty.
    """

    shape: tuple[int, ...]
    box: Box
    counted: bool = True
    divided: bool = False

    @property
    def whole(self) -> bool:
        """Whether every rank's part is the whole tensor."""
        return not self.divided and self.box == whole_box(self.shape)


def whole_box(shape: Sequence[int]) -> Box:
    """Returns the box that covers a whole tensor."""
    return tuple(slice(0, n) for n in shape)


def in_one_block(
    manifest: Manifest, targets: Mapping[str, Target], allocate: Callable[[int], np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns uninitialised memory for each part in one block, which is freed as a whole when the parts are."""
    places, size = {}, 0
    for name, target in targets.items():
        shape, dtype = tuple(axis.stop - axis.start for axis in target.box), element_type(manifest.tensors[name].dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        places[name] = (slice(size, size + nbytes), shape, dtype)
        size += math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
    block = allocate(size)
    return {name: block[place].view(dtype).reshape(shape) for name, (place, shape, dtype) in places.items()}


def summed(threads: Executor, part: np.ndarray, target: Target) -> list[Future[int]]:
    """Begins to sum a part; the results add up to its contribution to the tensor's checksum, modulo 2^32."""
    return [threads.submit(partial_sum, *block, target.shape) for block in _blocks(part, target)]


def total(sums: Sequence[Future[int]]) -> int:
    """Returns the sum of `summed` once it is computed, 0 <= sum < 2^32."""
    return sum(one.result() for one in sums) % (1 << 32)


def _blocks(part: np.ndarray, target: Target) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
    """Yields a rank's part of a tensor in blocks of some rows, each with its origin in the whole tensor."""
    origin = tuple(axis.start for axis in target.box)
    if part.nbytes <= _SUMMED_BYTES:
        yield part, origin
        return
    rows = max(1, _SUMMED_BYTES * len(part) // part.nbytes)
    for first in range(0, len(part), rows):
        yield part[first : first + rows], (origin[0] + first, *origin[1:])


class Kept:
    """The parts of the last version that a block of memory still holds, which need not be read again where the next version has them too.

    A part is the same where the tensor's published checksum, shape and type are, and its bytes still have the sum that was checked: they
    are summed anew with each version, as bytes that are read are. Only a block that `allocate` returns again holds anything.
    """

    def __init__(self, allocate: Callable[[int], np.ndarray]) -> None:
        self._allocate = allocate
        self._block: Callable[[], np.ndarray | None] = lambda: None
        self._held: dict[str, tuple[TensorEntry, Target, int]] = {}

    def __call__(self, nbytes: int) -> np.ndarray:
        """Returns a block of so many bytes."""
        block = self._allocate(nbytes)
        if block is not self._block():
            self.clear()
            self._block = weakref.ref(block)
        return block

    def clear(self) -> None:
        """Has the next version be read whole."""
        self._held = {}

    def take(
        self, manifest: Manifest, parts: Mapping[str, np.ndarray], targets: Mapping[str, Target], threads: Executor
    ) -> dict[str, int]:
        """Returns the sums of the parts that are those of a version already, by name; until `hold`, nothing counts as held."""
        held, self._held = self._held, {}
        places = {name: (entry.shape, entry.dtype, target) for name, (entry, target, _) in held.items()}
        wanted = {name: (manifest.tensors[name].shape, manifest.tensors[name].dtype, t) for name, t in targets.items()}
        if list(places.items()) != list(wanted.items()):  # each part lies where it lay if all are alike, in their order
            return {}
        same = [name for name in targets if held[name][0].checksum == manifest.tensors[name].checksum]
        adding = {name: summed(threads, parts[name], targets[name]) for name in same}
        sums = {name: total(blocks) for name, blocks in adding.items()}
        return {name: found for name, found in sums.items() if found == held[name][2]}

    def hold(self, manifest: Manifest, targets: Mapping[str, Target], totals: Mapping[str, int]) -> None:
        """Notes that the block holds a version's parts with these sums, all of which were checked as far as one rank can."""
        self._held = {name: (manifest.tensors[name], target, totals[name]) for name, target in targets.items()}
