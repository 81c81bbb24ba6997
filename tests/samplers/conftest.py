"""A tiny random policy, and samplers that serve it."""

import asyncio
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from sampler_cases import VOCABULARY, Tiny, sample

from jaxrl_llm.experience import Completion, SamplingSettings
from jaxrl_llm.mesh import MeshConfig, Partitioner
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen3 import Qwen3


@pytest.fixture(scope="session")
def make() -> Callable[..., Tiny]:
    """Builds the tiny policy on `devices` devices of a mesh; the same random parameters on each."""

    def build(devices: int = 1, *, seed: int = 0, compute_dtype: str = "float32", **mesh: int) -> Tiny:
        sizes = Qwen3(
            vocabulary_size=VOCABULARY,
            width=16,
            layers=2,
            heads=4,
            kv_heads=2,
            head_width=8,
            mlp_width=32,
            init_std=0.5,
        )
        partitioner = Partitioner.create(MeshConfig(**mesh), jax.devices()[:devices])
        policy = Policy(sizes, partitioner, compute_dtype)
        return Tiny(policy=policy, params=policy.init(jax.random.key(seed)))

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
        settings: SamplingSettings,
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
