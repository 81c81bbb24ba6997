"""Fleets of servers that play vLLM, with a client of them, and what its samples must be."""

import asyncio
import ctypes
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from fake_vllm import table
from sampler_cases import MAX_LENGTH, Letters, Tiny

from jaxrl_llm.experience import Completion, SamplingParams
from jaxrl_llm.publication.manifest import Canary, Manifest
from jaxrl_llm.samplers.servers.client import FleetClient
from jaxrl_llm.samplers.servers.publisher import Publisher
from jaxrl_llm.samplers.vllm.sampler import VllmSampler

CANARY = (3, 1, 4, 1, 5, 9, 2, 6)
PLAIN = SamplingParams(max_tokens=12)


class ToyPublisher(Publisher):
    """Publishes the numbers of versions: servers that play vLLM know the toy's tables by them."""

    def start(self, params: dict[str, Any], version: int) -> tuple[Path, Manifest]:
        log = table(version)
        likely = tuple(int(np.argmax(log[a])) for a in CANARY[:-1])
        canary = Canary(
            tokens=CANARY, logprobs=tuple(float(log[a, b]) for a, b in pairwise(CANARY)),
            likely=likely, likely_logprobs=tuple(float(log[a, b]) for a, b in zip(CANARY, likely)), limit=1e-4,
        )  # fmt: skip
        manifest = Manifest(version=version, model_type="toy", tied=False, tensors={}, forward={}, canary=canary)
        path = self.folder / f"v{version:08d}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "manifest.json").write_text(manifest.to_json())
        return path, manifest

    async def finish(self, version: int) -> None:
        await asyncio.sleep(0.01)


@asynccontextmanager
async def running(
    tiny: Tiny,
    folder: Path,
    servers: Sequence[Any],
    *,
    listed: bool = True,
    kind: type[Any] = VllmSampler,
    **fields: Any,
) -> AsyncIterator[FleetClient]:
    """Starts servers and a client of their kind; without `listed`, the client finds them by its Discovery, or at the `urls` of `fields`."""
    for server in servers:
        await server.start()
    fields = {"urls": [s.url for s in servers] if listed else [], **fields}
    sampler = kind(spawn=False, publication=str(folder), **fields)
    client = sampler.start(tiny.policy, Letters(), max_length=MAX_LENGTH, run_dir=folder)
    toy = {n: getattr(client.publisher, n) for n in ("policy", "folder", "dtype", "keep", "canary")}
    client.publisher = ToyPublisher(**toy)
    try:
        yield client
    finally:
        await client.close()
        for server in servers:
            await server.kill()


async def collect(
    client: FleetClient, prefixes: list[np.ndarray], n: int, settings: SamplingParams = PLAIN, seed: int = 0
) -> dict[int, list[Completion]]:
    found: dict[int, list[Completion]] = {}
    async for index, group in client.sample(prefixes, n, settings, [seed + i for i in range(len(prefixes))]):
        assert index not in found, "a group came twice"
        found[index] = group
    assert sorted(found) == list(range(len(prefixes))) and all(len(g) == n for g in found.values())
    return found


async def until(true: Callable[[], Any]) -> None:
    limit = time.monotonic() + 30
    while not true():
        assert time.monotonic() < limit
        await asyncio.sleep(0.002)


def checked(prefixes: list[np.ndarray], groups: dict[int, list[Completion]]) -> list[int]:
    """Versions of all tokens, after comparing each log-prob with the table of its version."""
    tables = {v: table(v) for v in {v for group in groups.values() for one in group for v in one.versions.tolist()}}
    versions = []
    for index, group in groups.items():
        for one in group:
            before = [int(prefixes[index][-1]), *one.tokens[:-1].tolist()]
            want = [tables[v][a, b] for v, a, b in zip(one.versions.tolist(), before, one.tokens.tolist())]
            np.testing.assert_allclose(one.logprobs, want, rtol=0, atol=1e-5)
            assert len(one.tokens) == len(one.logprobs) == len(one.versions)
            versions += one.versions.tolist()
    return versions


class Addresses:
    """A driver whose allocations are buffers of this process."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, int], np.ndarray] = {}

    def shared(self, device: int, number: int, size: int) -> tuple[str, int]:
        self.buffers[device, number] = np.zeros(size, np.uint8)
        return f"{number:0128x}", self.buffers[device, number].ctypes.data

    def opened(self, handle: str) -> Any:
        raise AssertionError(f"a learner shares memory and opens none (asked for {handle[:8]}...)")

    def copy(self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        ctypes.memmove(to, source, width * rows)
