"""The blocks of a version that relays pass on, and where the learner wrote them (no jax).

The learner lists the objects of a version with a digest for each block of 4 MiB (`object_store.BLOCKS`).
"""

import asyncio
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import tensorstore as ts

from jaxrl_llm.publication.object_store import BLOCK_BYTES, RETRIES, digest, folder_of, spec

_AHEAD_BYTES = 1 << 29  # of objects that a relay holds of a store


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of an object, of at most 4 MiB.

    Attributes:
      key: the object.
      first: its first byte there.
      nbytes: its length.
      digest: what the function `digest` gives of it.
    """

    key: str
    first: int
    nbytes: int
    digest: str

    def read(self, folder: Path) -> bytes:
        """Returns it from a version that lies in a folder; OSError where it is not all there."""
        with (folder / self.key).open("rb") as file:
            content = os.pread(file.fileno(), self.nbytes, self.first)
        if len(content) != self.nbytes:
            raise OSError(f"{folder / self.key} is shorter than was announced")
        return content

    def write(self, folder: Path, content: bytes) -> None:
        """Puts it into a file that is there already; OSError where the disk is full."""
        with (folder / self.key).open("r+b") as file:
            file.seek(self.first)
            file.write(content)


def blocks_of(text: bytes) -> list[Block]:
    """Reads the list of a version's blocks; ValueError where it is none, or names a place outside the version."""
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
    """The objects of a version where the learner wrote it, for a relay that reads them block by block.

    An object of a store comes whole, and those that follow are asked for ahead, of which memory holds half a gigabyte at least one; of a
    folder a block is read alone.
    """

    def __init__(self, address: str, blocks: Sequence[Block] = ()) -> None:
        self.address = address
        self._folder = folder_of(address)
        self._store: ts.KvStore | None = None
        self._left = Counter(block.key for block in blocks)
        self._sizes: Counter[str] = Counter()
        for block in blocks:
            self._sizes[block.key] += block.nbytes
        self._reading: dict[str, asyncio.Task[bytes]] = {}

    async def object(self, key: str) -> bytes:
        """Returns a whole object; OSError where it cannot be read."""
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
        """Returns a block; OSError where it cannot be read."""
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
                self._reading[following] = asyncio.create_task(self.object(following))

    def done(self, block: Block) -> None:
        """Notes that a block is there, whoever gave it: an object of which all are is held no longer."""
        self._left[block.key] -= 1
        if not self._left[block.key]:
            del self._left[block.key]
            self._reading.pop(block.key, None)

    def close(self) -> None:
        """Gives up what is under way."""
        for task in self._reading.values():
            if not task.cancel() and not task.cancelled():
                task.exception()  # nobody asked for what failed ahead
