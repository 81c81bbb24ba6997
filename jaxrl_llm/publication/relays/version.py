"""Fetches a version through the relays of a site: chooses the peer or source of each block (no jax).

The learner announces the digest of the list of all blocks, so that a relay can check every block from any sender. A relay asks the one
before it in the order of the announcement; where that one is dead, hangs, is slow or sends wrong bytes, it asks the one before that,
and finally the source. All fetch in one order, so that a block is passed on as soon as it arrives: a chain takes hardly longer than one
host. A block that the version before has at the same place, with the same digest, is copied from there and not fetched; copies wait for
no fetch, and fetches for no copy. An object of which no block has changed is the file of the version before, by a second name.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from jaxrl_llm.publication import object_store
from jaxrl_llm.publication.object_store import BLOCK_BYTES, BLOCKS, MARKER, digest
from jaxrl_llm.publication.relays.blocks import Block, Held, Source, blocks_of

_LOG = logging.getLogger(__name__)
SOURCES = (*object_store.SCHEMES, "file://")
HOLD_S = 1.0  # seconds for which a relay holds a request for a block that has not arrived, before it answers so
_AT_ONCE = 8  # most blocks that are fetched at a time
_CONNECT_S = 2.0
_DIGEST = re.compile("[0-9a-f]{64}")


class _Bypassed(Exception):
    """The reason why a peer is asked for nothing more of a version."""


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """The announcement of a version to a relay, by a learner or another relay.

    Attributes:
      version: number of the version.
      source: address at which the learner wrote it: "gs://...", "s3://..." or "file://...".
      blocks: SHA-256 of the list of its blocks, 64 hexadecimal digits.
      before: addresses of the relays before this one, the nearest first.
    """

    version: int
    source: str
    blocks: str
    before: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The name of the version among relays."""
        return hashlib.sha256(f"{self.version}\n{self.source}\n{self.blocks}".encode()).hexdigest()[:32]

    def content(self) -> dict[str, Any]:
        """Returns the JSON object that `of` parses."""
        return asdict(self) | {"before": list(self.before)}

    @staticmethod
    def of(content: Any) -> "Announcement":
        """Parses the JSON object of an announcement; raises ValueError where it is not one."""
        try:
            before = tuple(str(url).rstrip("/") for url in content["before"])
            found = Announcement(
                version=int(content["version"]), source=str(content["source"]), blocks=str(content["blocks"]), before=before
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as wrong:
            raise ValueError(f"an announcement has version, source, blocks and before: {wrong!r}") from wrong
        if not found.source.startswith(SOURCES):
            raise ValueError(f"a source is an address with {', '.join(SOURCES)} (got {found.source!r})")
        if not _DIGEST.fullmatch(found.blocks):
            raise ValueError(f"blocks must be 64 hexadecimal digits (got {found.blocks!r})")
        if not all(url.startswith(("http://", "https://")) for url in before):
            raise ValueError(f"relays before this one are addresses like http://HOST:PORT (got {before})")
        return found


@dataclass(frozen=True, kw_only=True)
class Patience:
    """The limits of a relay's waiting for a peer.

    Attributes:
      silent_s: seconds without an answer after which a peer counts as hung; a peer without a block answers so after a second.
      least_rate: bytes per second below which a peer counts as slow.
      block_s: seconds within which a peer that answers must get a block.
    """

    silent_s: float = 5.0
    least_rate: float = 1e7
    block_s: float = 60.0

    @property
    def body_s(self) -> float:
        """The seconds that one block takes at the least rate, among those that are fetched at a time."""
        return _AT_ONCE * BLOCK_BYTES / self.least_rate


@dataclass(eq=False, kw_only=True)
class RelayedVersion:
    """A version that a relay fetches and passes on.

    Attributes:
      announced: the announcement.
      folder: its folder on this host; the learner's own folder where `own`.
      own: whether it is already complete in that folder.
      session: HTTP session to peers, with the token.
      patience: limits of waiting for peers.
      earlier: a version before, of which it keeps the blocks that are the same; None fetches all.
      state: "fetching", "whole" or "failed".
      error: the error where it failed.
      seconds: seconds that it took.
      bypassed: {peer: why it is asked for nothing more}.
      nbytes: {peer, or "source": bytes that it sent}.
      kept: bytes that are those of the version before.
    """

    announced: Announcement
    folder: Path
    own: bool
    session: aiohttp.ClientSession
    patience: Patience
    earlier: Held | None = None
    state: str = "fetching"
    error: str = ""
    seconds: float = 0.0
    bypassed: dict[str, str] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    kept: int = 0

    def __post_init__(self) -> None:
        self._began, self._text, self._blocks = time.perf_counter(), b"", []  # type: tuple[float, bytes, list[Block]]
        self._there: dict[int, asyncio.Event] = {}  # by number of a block that is awaited, or has arrived
        self._listed, self._introduced, self._lost = asyncio.Event(), set[str](), False
        self._shared, self._parting = set[str](), asyncio.Lock()  # objects whose files are those of the version before
        self._source, self._fetching = Source(self.announced.source), asyncio.Semaphore(_AT_ONCE)
        self.task = asyncio.create_task(self._fetch())

    def status(self) -> dict[str, Any]:
        """Returns state, error, seconds, bytes by their sender, bytes kept, by-passed peers with the reasons, and the folder."""
        return {
            "version": self.announced.version, "state": self.state, "error": self.error, "seconds": self.seconds,
            "bytes": dict(self.nbytes), "kept": self.kept, "bypassed": dict(self.bypassed), "path": str(self.folder),
        }  # fmt: skip

    def held(self) -> Held | None:
        """Returns what the next version may keep of this one; None where this one is not whole."""
        return Held(folder=self.folder, blocks=frozenset(self._blocks)) if self.state == "whole" else None

    # -- what others are given -----------------------------------------------------------------------------------------

    async def listing(self) -> bytes | None:
        """Returns the list of blocks; None where it does not arrive within a second."""
        return self._text if await self._within(self._listed) else None

    async def has(self, number: int) -> bool:
        """Returns whether a block has arrived, or arrives within a second; raises IndexError where there is none of that number."""
        return await self._within(self._listed) and await self._within(self._event(number))

    def place(self, number: int) -> tuple[Path, int, int]:
        """Returns the place of an arrived block: the file, its first byte and its length."""
        block = self._blocks[number]
        return self.folder / block.key, block.first, block.nbytes

    async def _within(self, event: asyncio.Event) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HOLD_S):
                await event.wait()
        return event.is_set()

    def _event(self, number: int) -> asyncio.Event:
        if not 0 <= number < len(self._blocks):
            raise IndexError(f"there are {len(self._blocks)} blocks")
        return self._there.setdefault(number, asyncio.Event())

    # -- what is fetched -----------------------------------------------------------------------------------------------

    async def _fetch(self) -> None:
        try:
            self._text = await self._given("blocks", None)
            self._blocks = blocks_of(self._text)
            self._source = Source(self.announced.source, self._blocks, self.earlier.blocks if self.earlier else ())
            self._listed.set()
            if self.own:
                for number in range(len(self._blocks)):
                    self._event(number).set()
            else:
                await self._fetch_blocks()
            self.seconds, self.state = time.perf_counter() - self._began, "whole"
        except Exception as failure:
            told = str(failure) if isinstance(failure, OSError | ValueError) else repr(failure)
            self.state, self.error = "failed", f"version {self.announced.version} is not relayed: {told}"
            _LOG.warning("%s", self.error)
        finally:
            self._source.close()

    async def _fetch_blocks(self) -> None:
        """Fetches and copies at the same time: the link is not idle while unchanged blocks are copied."""
        held = self.earlier.blocks if self.earlier is not None else frozenset()
        new = {block.key for block in self._blocks if block not in held}
        self._shared = await asyncio.to_thread(_lay_out, self.folder, self._text, self.earlier, new)
        kept = (number for number, block in enumerate(self._blocks) if block in held)
        others = (number for number, block in enumerate(self._blocks) if block not in held)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_AT_ONCE):
                    group.create_task(self._one_after_the_other(kept))
                    group.create_task(self._one_after_the_other(others))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        marker = self.folder / MARKER
        await asyncio.to_thread(marker.write_bytes, b"{}")

    async def _one_after_the_other(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            block = self._blocks[number]
            if not await self._keeps(block):
                async with self._fetching:
                    content = await self._given(str(number), block)
                await self._part(block.key)
                await asyncio.to_thread(block.write, self.folder, content)
                self._source.done(block)
            self._event(number).set()

    async def _keeps(self, block: Block) -> bool:
        """Copies a block from the version before, or checks it in a shared file; returns False where that has it not, or no longer as it was."""
        if self.earlier is None or block not in self.earlier.blocks:
            return False
        if block.key in self._shared:
            kept = await asyncio.to_thread(block.intact, self.folder) is not None
        else:
            kept = await asyncio.to_thread(block.copied, self.earlier.folder, self.folder)
        if kept:
            self.kept += block.nbytes
            return True
        level, self._lost = logging.DEBUG if self._lost else logging.WARNING, True
        _LOG.log(level, "version %d: %s of the version before is damaged or gone", self.announced.version, block.key)
        self._source.wanted(block)
        return False

    async def _part(self, key: str) -> None:
        """Gives an object a file of its own, before it is written to."""
        async with self._parting:
            if key in self._shared:
                await asyncio.to_thread(_copy_apart, self.folder / key)
                self._shared.remove(key)

    def _right(self, block: Block | None, content: bytes) -> bool:
        if block is None:
            return hashlib.sha256(content).hexdigest() == self.announced.blocks
        return digest(content) == block.digest

    async def _given(self, name: str, block: Block | None) -> bytes:
        """Fetches a block, or the list of all for None, from a peer or from the source.

        Raises:
          OSError: the source cannot be read, or its bytes do not fit the announced digest.
        """
        for peer in () if self.own else self.announced.before:
            if peer in self.bypassed:
                continue
            try:
                content = await self._asked(peer, name)
                if not await asyncio.to_thread(self._right, block, content):
                    raise _Bypassed("it sent wrong bytes")
            except _Bypassed as why:
                self._bypass(peer, str(why))
                continue
            self.nbytes[peer] = self.nbytes.get(peer, 0) + len(content)
            return content
        content = await (self._source.object(BLOCKS) if block is None else self._source.block(block))
        if not await asyncio.to_thread(self._right, block, content):
            what = BLOCKS if block is None else block.key
            raise OSError(f"{self.announced.source}/{what} is not what was announced; publish the version again")
        self.nbytes["source"] = self.nbytes.get("source", 0) + len(content)
        return content

    def _bypass(self, peer: str, why: str) -> None:
        """Records and logs, once, why a peer is asked for nothing more of the version."""
        if peer not in self.bypassed:
            self.bypassed[peer] = why
            _LOG.warning("version %d: %s is by-passed: %s", self.announced.version, peer, why)

    async def _asked(self, peer: str, name: str) -> bytes:
        """Returns a peer's bytes of a name, once it has them; raises _Bypassed where the peer fails."""
        until, url = time.monotonic() + self.patience.block_s, f"{peer}/{self.announced.id}/{name}"
        limit = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        while time.monotonic() < until and peer not in self.bypassed:
            try:
                async with asyncio.timeout(self.patience.silent_s):
                    answer = await self.session.get(url, timeout=limit)
                async with answer, asyncio.timeout(self.patience.body_s):
                    content = await answer.read()
            except TimeoutError:
                raise _Bypassed("it hangs, or is slow") from None
            except (aiohttp.ClientError, OSError) as gone:
                raise _Bypassed(f"it is not reached: {type(gone).__name__} {gone}") from None
            if answer.status == 200:
                return content
            if answer.status == 404 and peer not in self._introduced:
                await self._introduce(peer)
            elif answer.status != 202:
                raise _Bypassed(f"it answers {answer.status}: {content[:200].decode(errors='replace')}")
        raise _Bypassed(f"it has not had a block for {self.patience.block_s:g} s")

    async def _introduce(self, peer: str) -> None:
        """Announces the version to a peer to which the learner has not announced it yet, or that has dropped it."""
        self._introduced.add(peer)
        before = self.announced.before
        said = replace(self.announced, before=before[before.index(peer) + 1 :]).content()
        try:
            limit = aiohttp.ClientTimeout(total=self.patience.silent_s)
            async with self.session.post(f"{peer}/announce", json=said, timeout=limit) as answer:
                await answer.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as gone:
            raise _Bypassed(f"it is not reached: {type(gone).__name__} {gone}") from None


def _lay_out(folder: Path, text: bytes, earlier: Held | None, new: Collection[str]) -> set[str]:
    """Creates the files of a version at their final sizes; returns the objects, not among `new`, whose files are those of the version before."""
    shutil.rmtree(folder, ignore_errors=True)
    sizes: Mapping[str, Any] = json.loads(text)["objects"]
    shared = set()
    for key, (size, _) in sizes.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        if earlier is not None and key not in new and _linked(earlier.folder / key, folder / key, int(size)):
            shared.add(key)
    needed = sum(int(size) for key, (size, _) in sizes.items() if key not in shared)
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(f"it takes {needed / 2**20:.0f} MiB in {folder.parent}, and {free / 2**20:.0f} MiB are free")
    for key in sizes.keys() - shared:
        with (folder / key).open("wb") as file:
            file.truncate(int(sizes[key][0]))
    listed = folder / BLOCKS
    listed.parent.mkdir(parents=True, exist_ok=True)
    listed.write_bytes(text)
    return shared


def _linked(file: Path, to: Path, size: int) -> bool:
    """Gives a file of a size a second name; returns False where it is gone or of another size, or the two are on different file systems."""
    try:
        if not 0 < size == file.stat().st_size:
            return False
        to.hardlink_to(file)
    except OSError:
        return False
    return True


def _copy_apart(file: Path) -> None:
    """Replaces a file that has several names by a copy that has this one."""
    copy = file.with_name(f"{file.name}.apart")
    shutil.copyfile(file, copy)
    copy.replace(file)
