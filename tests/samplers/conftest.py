"""A tiny random policy, and samplers that serve it."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_cases import running
from sampler_cases import VOCABULARY, Tiny, built, sample

from jaxrl_llm.experience import Completion, SamplingParams
from jaxrl_llm.samplers.servers import fleet


@pytest.fixture(scope="session")
def make() -> Callable[..., Tiny]:
    return built


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return built()


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
