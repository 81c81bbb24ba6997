"""The blocks of a version that relays pass on, and the source where the learner wrote them (no jax).

The learner lists the objects of a version with a digest for each block of 4 MiB (`object_store.BLOCKS`).
"""

import asyncio
import itertools
import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import tensorstore as ts

from jaxrl_llm.publication.object_store import BLOCK_BYTES, RETRIES, digest, folder_of, spec

_AHEAD_BYTES = 1 << 29  # most bytes of objects of a store that a relay holds
_READS = 8  # most objects of a store that are read at a time


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of an object, of at most 4 MiB.

    Attributes:
      key: key of the object.
      first: position of its first byte in the object.
      nbytes: length in bytes.
      digest: digest by the function `digest`.
    """

    key: str
    first: int
    nbytes: int
    digest: str

    def read(self, folder: Path) -> bytes:
        """Reads the block from a version in a folder; raises OSError where the file is shorter."""
        with (folder / self.key).open("rb") as file:
            content = os.pread(file.fileno(), self.nbytes, self.first)
        if len(content) != self.nbytes:
            raise OSError(f"{folder / self.key} is shorter than was announced")
        return content

    def write(self, folder: Path, content: bytes) -> None:
        """Writes the block into an existing file; raises OSError where the disk is full."""
        with (folder / self.key).open("r+b") as file:
            file.seek(self.first)
            file.write(content)

    def intact(self, folder: Path) -> bytes | None:
        """Returns the block of a version in a folder; None where it is damaged or gone there."""
        try:
            content = self.read(folder)
        except OSError:
            return None
        return content if digest(content) == self.digest else None

    def copied(self, folder: Path, to: Path) -> bool:
        """Copies the block of a version in a folder into an existing file of another; returns False where it is damaged or gone there."""
        content = self.intact(folder)
        if content is not None:
            self.write(to, content)
        return content is not None


@dataclass(frozen=True, kw_only=True)
class Held:
    """A whole version that a relay has: its folder and its blocks, which the next version may have at the same places."""

    folder: Path
    blocks: frozenset[Block]


def blocks_of(text: bytes) -> list[Block]:
    """Parses the list of a version's blocks; raises ValueError where it is not such a list, or names a place outside the version."""
    try:
        objects = {str(key): (int(size), str(digests)) for key, (size, digests) in json.loads(text)["objects"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as wrong:
        raise ValueError(f"the list of blocks cannot be read: {wrong!r}") from wrong
    return [block for key, (size, digests) in objects.items() for block in _of_object(key, size, digests)]


def _of_object(key: str, size: int, digests: str) -> Iterator[Block]:
    place, length = PurePosixPath(key), len(digest(b""))
    if place.is_absolute() or ".." in place.parts or not place.parts:
        raise ValueError(f"the list of blocks names {key!r}, which is no place in a version")
    firsts = range(0, size, BLOCK_BYTES)
    if len(digests) != length * len(firsts):
        raise ValueError(f"the list of blocks has {len(digests)} digits for the {size} bytes of {key!r}")
    for i, first in enumerate(firsts):
        said = digests[i * length : (i + 1) * length]
        yield Block(key=key, first=first, nbytes=min(BLOCK_BYTES, size - first), digest=said)


class Source:
    """The objects of a version as the learner wrote it, for a relay that reads them block by block.

    An object of a store is read whole, and the next ones are read ahead, up to half a gigabyte and at least one object; from a folder
    single blocks are read. A few objects are read at a time, in order: of more, which share the link, the first would arrive late, and
    relays that wait for it would have nothing to pass on. Blocks that the relay is likely to keep from the version before are not read ahead.
    """

    def __init__(self, address: str, blocks: Sequence[Block] = (), kept: Collection[Block] = frozenset()) -> None:
        self.address = address
        self._folder = folder_of(address)
        self._store: ts.KvStore | None = None
        self._left = Counter(block.key for block in blocks if block not in kept)
        self._sizes: Counter[str] = Counter()
        for block in blocks:
            self._sizes[block.key] += block.nbytes
        self._reading: dict[str, asyncio.Task[bytes]] = {}
        self._turns = asyncio.Semaphore(_READS)

    async def object(self, key: str) -> bytes:
        """Returns a whole object; raises OSError where it cannot be read."""
        try:
            if self._store is None:
                self._store = await ts.KvStore.open(spec(self.address), context=ts.Context(dict(RETRIES)))
            found = await self._store.read(key)
        except Exception as failure:
            line = str(failure).partition("\n")[0][:300]
            raise OSError(f"{self.address}/{key} cannot be read: {line}") from failure
        if found.state != "value":
            raise OSError(f"{self.address} has no {key}; publish the version again")
        return found.value

    async def block(self, block: Block) -> bytes:
        """Returns a block; raises OSError where it cannot be read."""
        if self._folder is not None:
            return await asyncio.to_thread(block.read, self._folder)
        self._read_ahead(block.key)
        content = await asyncio.shield(self._reading[block.key])
        return content[block.first : block.first + block.nbytes]

    def _read_ahead(self, key: str) -> None:
        for following in itertools.dropwhile(lambda one: one != key, self._left):
            if following not in self._reading:
                under_way = sum(self._sizes[one] for one in self._reading)
                if self._reading and following != key and under_way + self._sizes[following] > _AHEAD_BYTES:
                    return
                self._reading[following] = asyncio.create_task(self._in_turn(following))

    async def _in_turn(self, key: str) -> bytes:
        async with self._turns:
            return await self.object(key)

    def wanted(self, block: Block) -> None:
        """Records that a block of `kept` is to be fetched after all."""
        self._left[block.key] += 1

    def done(self, block: Block) -> None:
        """Records that a block to be fetched has arrived, from whatever source; an object whose blocks have all arrived is freed."""
        self._left[block.key] -= 1
        if not self._left[block.key]:
            del self._left[block.key]
            self._reading.pop(block.key, None)

    def close(self) -> None:
        """Cancels the reads in progress."""
        for task in self._reading.values():
            if not task.cancel() and not task.cancelled():
                task.exception()  # nobody waits for a failed read ahead
