"""Measures what relays do within one host: digests, copies of blocks that have not changed, and turns of a block from relay to relay."""

import asyncio
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from relay_site import Process, address, contents, ended, free_port, written

from jaxrl_llm.publication.object_store import BLOCK_BYTES, digest
from jaxrl_llm.publication.relays.blocks import Block
from jaxrl_llm.publication.relays.version import _AT_ONCE

_DIGESTING = 4  # threads in which a learner computes digests
_BLOCKS, _SMALL = 64, 400


def local_rates() -> dict[str, float]:
    """Returns bytes/s of digests and of copied blocks, and seconds that a block of few bytes waits from relay to relay."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        return _of_blocks(Path(place)) | {"wait": asyncio.run(_turn(Path(place)))}


def _of_blocks(place: Path) -> dict[str, float]:
    objects = contents({str(i): BLOCK_BYTES for i in range(_BLOCKS)})
    blocks = [Block(key=k, first=0, nbytes=len(x), digest=digest(x)) for k, x in objects.items()]
    for folder in (place / "from", place / "to"):
        for block in blocks:
            (folder / block.key).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.key).touch()
    for block in blocks:
        block.write(place / "from", objects[block.key])
    nbytes = _BLOCKS * BLOCK_BYTES
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        begin = time.perf_counter()
        assert all(threads.map(lambda block: block.copied(place / "from", place / "to"), blocks))
        copied = nbytes / (time.perf_counter() - begin)
    with ThreadPoolExecutor(_DIGESTING) as threads:
        begin = time.perf_counter()
        list(threads.map(digest, objects.values()))
        return {"copy": copied, "digest": nbytes / (time.perf_counter() - begin)}


async def _turn(place: Path) -> float:
    """Returns the seconds of one block of a kilobyte, of which a relay fetches eight at a time from another."""
    said = written(address(place / "learner"), 1, contents({str(i): 1024 for i in range(_SMALL)}))
    port = free_port()
    relays = [Process(place / f"relay{i}", i, port) for i in (2, 3)]
    try:
        first, second = (one.ready().url for one in relays)
        assert (await ended(first, said))["state"] == "whole"
        found = await ended(second, replace(said, before=(first,)))
        assert found["state"] == "whole" and not found["bypassed"], found
        return _AT_ONCE * float(found["seconds"]) / _SMALL
    finally:
        for one in relays:
            one.end()
