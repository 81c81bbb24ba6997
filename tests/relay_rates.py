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
    """Returns bytes/s of digests, of copied blocks and of blocks from relay to relay, and the seconds that one of few bytes waits."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        return _of_blocks(Path(place)) | asyncio.run(_between(Path(place)))


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


async def _between(place: Path) -> dict[str, float]:
    """Returns what passes from one relay to another: the seconds of a block of a kilobyte, of which eight are fetched at a time, and bytes/s of large ones."""
    sizes = {str(i): 1024 for i in range(_SMALL)}, {str(i): BLOCK_BYTES for i in range(_BLOCKS)}
    said = [written(address(place / "learner"), i, contents(one, i)) for i, one in enumerate(sizes)]
    port = free_port()
    relays = [Process(place / f"relay{i}", i, port) for i in (2, 3)]
    try:
        first, second = (one.ready().url for one in relays)
        took = []
        for announced in said:
            assert (await ended(first, announced))["state"] == "whole"
            found = await ended(second, replace(announced, before=(first,)))
            assert found["state"] == "whole" and not found["bypassed"], found
            took.append(float(found["seconds"]))
        return {"wait": _AT_ONCE * took[0] / _SMALL, "relay": _BLOCKS * BLOCK_BYTES / took[1]}
    finally:
        for one in relays:
            one.end()
