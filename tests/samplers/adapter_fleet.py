"""Learners of adapters alone and the servers that play vLLM for them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from fake_vllm import FakeVllm
from fleet_cases import ToyPublisher
from sampler_cases import MAX_LENGTH, Letters, Tiny

from jaxrl_llm.models.lora import AdaptedPolicy, LoRA
from jaxrl_llm.samplers.servers.client import FleetClient
from jaxrl_llm.samplers.vllm.adapters import AdapterPublisher
from jaxrl_llm.samplers.vllm.sampler import VllmSampler

LOW = LoRA(rank=3, alpha=6.0, targets=("q_proj", "o_proj", "down_proj"))


class ToyAdapters(ToyPublisher, AdapterPublisher):
    """Publishes numbers of versions, under the names of a real publisher."""

    def start(self, params: dict[str, Any], version: int) -> Any:
        self._count += 1
        return super().start(params, version)


def adapted(tiny: Tiny) -> AdaptedPolicy:
    plain = tiny.policy
    return AdaptedPolicy(plain.architecture, plain.partitioner, plain.compute_dtype, plain.remat, LOW)


@asynccontextmanager
async def client_of(tiny: Tiny, folder: Path, urls: Sequence[str], **fields: Any) -> AsyncIterator[FleetClient]:
    """A client of servers that run already."""
    sampler = VllmSampler(spawn=False, urls=urls, publication=str(folder), adapters=True, **fields)
    policy = adapted(tiny)
    client: Any = sampler.start(policy, Letters(), max_length=MAX_LENGTH, run_dir=folder)
    assert client.adapted and type(client.publisher) is AdapterPublisher and client.publisher.base is None
    client.publisher = ToyAdapters(
        policy=tiny.policy, adapted=policy, folder=folder, dtype="float32", keep=1, canary=np.zeros(0, np.int32),
        tenant=client.publisher.tenant,
    )  # fmt: skip
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def running(tiny: Tiny, folder: Path, servers: Sequence[FakeVllm], **fields: Any) -> AsyncIterator[FleetClient]:
    """A client of servers that it starts and ends."""
    for server in servers:
        await server.start()
    try:
        async with client_of(tiny, folder, [server.url for server in servers], **fields) as client:
            yield client
    finally:
        for server in servers:
            await server.kill()
