"""A tiny random policy, and samplers that serve it."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from fleet_cases import running
from sampler_cases import SIZES, VOCABULARY, Tiny, sample

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import Completion, SamplingParams
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.samplers.vllm import fleet


@pytest.fixture(scope="session")
def make() -> Callable[..., Tiny]:
    """Builds the tiny policy on `devices` devices of a mesh; a seed gives the same parameters on each."""

    def build(devices: int = 1, *, seed: int = 0, compute_dtype: str = "float32", **mesh: int) -> Tiny:
        partitioner = Partitioner.create(MeshConfig(**mesh), jax.devices()[:devices])
        policy = Policy(SIZES, partitioner, compute_dtype)
        rng = np.random.default_rng(seed)
        drawn = lambda leaf: rng.normal(0.1, 0.5, leaf.shape).astype(leaf.dtype)  # noqa: E731
        params = jax.tree.map(lambda leaf: jax.device_put(drawn(leaf), leaf.sharding), policy.abstract())
        return Tiny(policy=policy, params=params)

    return build


@pytest.fixture(scope="session")
def tiny(make: Callable[..., Tiny]) -> Tiny:
    return make()


@pytest.fixture(scope="session")
def prefixes() -> list[np.ndarray]:
    """Ten prompts of 1 to 12 tokens."""
    rng = np.random.default_rng(7)
    return [rng.integers(0, VOCABULARY, length).astype(np.int32) for length in (5, 12, 1, 7, 7, 2, 9, 3, 11, 4)]


@pytest.fixture(scope="session")
def draw() -> Callable[..., list[list[Completion]]]:
    """Starts a sampler with `fields`, serves the policy, samples once, closes."""

    def run(
        tiny: Tiny,
        prefixes: list[np.ndarray],
        n: int,
        settings: SamplingParams,
        seeds: list[int] | None = None,
        **fields: Any,
    ) -> list[list[Completion]]:
        async def once() -> list[list[Completion]]:
            engine = tiny.start(**fields)
            await engine.publish(tiny.params, 0)
            groups = await sample(engine, prefixes, n, settings, seeds)
            await engine.close()
            return groups

        return asyncio.run(once())

    return run


@pytest.fixture
def start(tiny: Tiny, tmp_path: Path) -> Callable[..., Any]:
    """Starts fake servers and a client of them."""
    return partial(running, tiny, tmp_path)


@pytest.fixture
def quick_heart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet looks after its servers twenty times a second."""
    monkeypatch.setattr(fleet, "_HEARTBEAT_S", 0.05)
