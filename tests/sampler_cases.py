"""A tiny random policy, the learner's view of it, and the distribution of a token in float64."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import Completion, SamplingParams
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen3 import Qwen3
from jaxrl_llm.samplers.embedded.engine import Engine
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler

VOCABULARY = 24
MAX_LENGTH = 32
ROWS = 32
SIZES = Qwen3(vocabulary_size=VOCABULARY, width=16, layers=2, heads=4, kv_heads=2, head_width=8, mlp_width=32)


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


def built(devices: int = 1, *, seed: int = 0, compute_dtype: str = "float32", **mesh: int) -> Tiny:
    """The tiny policy on `devices` devices of a mesh; a seed gives the same parameters on each."""
    partitioner = Partitioner.create(MeshConfig(**mesh), jax.devices()[:devices])
    policy = Policy(SIZES, partitioner, compute_dtype)
    rng = np.random.default_rng(seed)
    drawn = lambda leaf: rng.normal(0.1, 0.5, leaf.shape).astype(leaf.dtype)  # noqa: E731
    params = jax.tree.map(lambda leaf: jax.device_put(drawn(leaf), leaf.sharding), policy.abstract())
    return Tiny(policy=policy, params=params)


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def distribution(logits, seen, settings):
    """Probabilities [V] in float64, token by token from the definitions."""
    x = logits.astype(np.float64)
    for token in np.flatnonzero(seen):
        x[token] = x[token] / settings.repetition_penalty if x[token] > 0 else x[token] * settings.repetition_penalty
    p = softmax(x / settings.temperature)
    order = np.argsort(-p)
    kept = list(order[: settings.top_k] if settings.top_k else order)
    p = np.where(np.isin(np.arange(len(p)), kept), p, 0) / p[kept].sum()
    nucleus, mass = [], 0.0
    for token in kept:
        if mass >= settings.top_p and settings.top_p < 1:
            break
        nucleus.append(token)
        mass += p[token]
    nucleus = [token for token in nucleus if p[token] >= settings.min_p * p.max()]
    return np.where(np.isin(np.arange(len(p)), nucleus), p, 0) / p[nucleus].sum()


async def sample(
    engine: Engine, prefixes: list[np.ndarray], n: int, settings: SamplingParams, seeds: list[int] | None = None
) -> list[list[Completion]]:
    """All groups of one call, by prefix."""
    groups: dict[int, list[Completion]] = {}
    async for index, group in engine.sample(
        prefixes, n, settings, list(range(len(prefixes))) if seeds is None else seeds
    ):
        assert index not in groups and len(group) == n
        groups[index] = group
    return [groups[index] for index in range(len(prefixes))]
