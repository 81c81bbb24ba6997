"""A tiny random policy, and samplers that serve it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.experience import Completion, SamplingSettings
from jaxrl_llm.mesh import MeshConfig, Partitioner
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen3 import Qwen3
from jaxrl_llm.samplers.embedded import EmbeddedSampler
from jaxrl_llm.samplers.engine import Engine

VOCABULARY = 24
MAX_LENGTH = 32
ROWS = 32


class Letters:
    """Token ids are the letters from "a" on, but for 20, which is "ab"."""

    def decode(self, tokens: list[int]) -> str:
        return "".join("ab" if token == 20 else chr(ord("a") + token) for token in tokens)


@partial(jax.jit, static_argnames=("policy",))
def forward(params: dict[str, Any], tokens: jax.Array, lengths: jax.Array, *, policy: Policy) -> jax.Array:
    """The learner's hidden states of right-padded rows."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return policy.hidden(params, tokens, positions, (positions < lengths[:, None]).astype(jnp.int32))


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A policy with its parameters, and what the tests ask of them."""

    policy: Policy
    params: dict[str, Any]

    def start(self, **fields: Any) -> Engine:
        return EmbeddedSampler(**fields).start(self.policy, Letters(), max_length=MAX_LENGTH)

    def logits(self, sequences: list[np.ndarray]) -> np.ndarray:
        """float64 [S, T, V] logits of at most ROWS sequences, right-padded, by the learner's forward pass."""
        tokens = np.zeros((ROWS, MAX_LENGTH), np.int32)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)] = sequence
        lengths = np.array([len(s) for s in sequences] + [0] * (ROWS - len(sequences)), np.int32)
        hidden = forward(self.params, tokens, lengths, policy=self.policy)
        head = np.asarray(self.policy.head(self.params), np.float64)
        return np.asarray(hidden, np.float64)[: len(sequences)] @ head.T


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


async def sample(
    engine: Engine, prefixes: list[np.ndarray], n: int, settings: SamplingSettings, seeds: list[int] | None = None
) -> list[list[Completion]]:
    """All groups of one call, by prefix."""
    groups: dict[int, list[Completion]] = {}
    async for index, group in engine.sample(
        prefixes, n, settings, list(range(len(prefixes))) if seeds is None else seeds
    ):
        assert index not in groups and len(group) == n
        groups[index] = group
    return [groups[index] for index in range(len(prefixes))]


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
