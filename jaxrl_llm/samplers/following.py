"""The sampler of a learner's process that asks no server: process 0 does, and each writes its own shards of what is published."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxrl_llm.experience import Completion, SamplingSettings
from jaxrl_llm.protocols import Params
from jaxrl_llm.samplers.publication import Publisher


@dataclass(eq=False, kw_only=True)
class FollowingSampler:
    """Publishes together with process 0.

    Attributes:
      publisher: writes versions of the weights; all processes have one.
      version: the policy version that was published last; -1 before the first.
    """

    publisher: Publisher
    version: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self._written: asyncio.Task[None] | None = None

    overlaps = True

    def sample(
        self, prefixes: Sequence[np.ndarray], n: int, settings: SamplingSettings, seeds: Sequence[int]
    ) -> AsyncIterator[tuple[int, list[Completion]]]:
        """Raises RuntimeError: process 0 samples."""
        raise RuntimeError("process 0 alone asks the servers")

    async def publish(self, params: Params, version: int) -> None:
        """Writes this process's shards; returns when the learner may change them, and raises as the publisher does."""
        if self._written is not None:
            await self._written
        self.publisher.start(params, version)
        self.version = version
        self._written = asyncio.create_task(self.publisher.finish(version))

    async def close(self) -> None:
        """Ends what is being written."""
        if self._written is not None:
            await asyncio.gather(self._written, return_exceptions=True)
        self.publisher.close(remove=False)

    def metrics(self) -> Mapping[str, float]:
        return {}
