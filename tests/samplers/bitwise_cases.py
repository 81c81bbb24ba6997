"""Random policies of the bitwise mode, what the embedded sampler draws of them, and what the learner says of the drawn tokens."""

import asyncio
import math
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
import pytest
from sampler_cases import Letters, sample

from jaxrl_llm.distributed import padding
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.kernels.token_stats.api import token_stats
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen3 import Qwen3
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler

MAX_LENGTH = 48
QWEN3 = Qwen3(vocabulary_size=50, width=24, layers=2, heads=4, kv_heads=2, head_width=8, mlp_width=40)


@pytest.fixture(scope="module", autouse=True)
def compiled_as_users_compile():
    """Programs have all optimisations: it is these that fuse and reorder."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()


def devices(**sizes):
    """The partitioner of a mesh of these sizes."""
    return Partitioner.create(MeshConfig(**{"fsdp": 1} | sizes), jax.devices()[: math.prod(sizes.values())])


@dataclass(frozen=True, eq=False)
class Case:
    """A random policy and how it is sampled."""

    policy: Policy
    seed: int
    slots: int
    chunk: int
    temperature: float = 1.0
    shrink: int = 0
    prefill: int = 8192

    @cached_property
    def params(self):
        rng = np.random.default_rng(self.seed)
        own = jax.tree.map(lambda x: rng.normal(0.05, 0.4, x.shape).astype(x.dtype), self.policy.sizes())
        stored = lambda x, like: jax.device_put(padding.filled(x, like.shape), like.sharding)  # noqa: E731
        return jax.tree.map(stored, own, self.policy.abstract())

    @cached_property
    def prompts(self):
        rng = np.random.default_rng(self.seed + 1)
        return [
            rng.integers(0, self.policy.architecture.vocabulary_size, n, dtype=np.int32)
            for n in (5, 19, 1, 7, 8, 2, 13, 16)
        ]

    def drawn(self):
        """[(sequence, length of its prompt, recorded log-probs)] of sequences that end at different lengths."""
        settings = SamplingParams(max_tokens=MAX_LENGTH - 20, temperature=self.temperature, stop_token_ids=(3, 5))

        async def once():
            sampler = EmbeddedSampler(
                slots=self.slots, decode_chunk=self.chunk, shrink=self.shrink, prefill_tokens=self.prefill
            )
            engine = sampler.start(self.policy, Letters(), max_length=MAX_LENGTH)
            await engine.publish(self.params, 0)
            try:
                return await sample(engine, self.prompts, 6, settings)
            finally:
                await engine.close()

        groups = asyncio.run(once())
        return [
            (np.concatenate([p, c.tokens]), len(p), np.asarray(c.logprobs)) for p, g in zip(self.prompts, groups) for c in g
        ]  # fmt: skip


def learners(case, drawn, *, policy=None, row=64, most=4, seed=0, gradient=False):
    """The learner's log-probs of the drawn tokens, where sequences are packed in a random order; with `gradient`, the gradients of two calls too.

    Rows without sequences are added where the mesh would not divide the rows otherwise.
    """
    policy, rows, places = policy or case.policy, [], {}
    for i in np.random.default_rng(seed).permutation(len(drawn)):
        n = len(drawn[i][0]) - 1
        if not rows or len(rows[-1]) == most or sum(len(drawn[j][0]) - 1 for j in rows[-1]) + n > row:
            rows.append([])
        places[i] = len(rows) - 1, sum(len(drawn[j][0]) - 1 for j in rows[-1])
        rows[-1].append(i)
    count = len(rows) + -len(rows) % policy.partitioner.batch_shards
    tokens, positions, segments, targets = (np.zeros((count, row), np.int32) for _ in range(4))
    targets -= 1
    for i, (b, at) in places.items():
        n, cut = len(drawn[i][0]) - 1, np.s_[b, at : at + len(drawn[i][0]) - 1]
        tokens[cut], targets[cut], positions[cut] = drawn[i][0][:-1], drawn[i][0][1:], np.arange(n)
        segments[cut] = rows[b].index(i) + 1

    def read(params, tokens, positions, segments, targets):
        hidden = policy.hidden(params, tokens, positions, segments, max_segments=most)
        stats = token_stats(
            hidden.reshape(-1, hidden.shape[-1]), policy.head(params), targets.reshape(-1), temperature=case.temperature,
            outputs=("logprob", "entropy"), backend="ordered" if policy.bitwise else None, mesh=policy.partitioner.mesh,
        )  # fmt: skip
        return stats["logprob"].sum() / 100 + stats["entropy"].sum() / 300, stats["logprob"].reshape(tokens.shape)

    run = jax.jit(jax.value_and_grad(read, has_aux=True) if gradient else lambda *arrays: (read(*arrays), None))
    rows_of = policy.partitioner.sharding(("batch", "length"), tokens.shape)
    placed = jax.device_put((tokens, positions, segments, targets), rows_of)
    (_, found), gradients = run(case.params, *placed)
    if gradient:
        gradients = gradients, run(case.params, *placed)[1]
    found = np.asarray(found)
    by_token = [found[b, at + p - 1 : at + len(s) - 1] for i, (s, p, _) in enumerate(drawn) for b, at in [places[i]]]
    return (np.concatenate(by_token), gradients) if gradient else np.concatenate(by_token)


def recorded(drawn):
    return np.concatenate([logprobs for _, _, logprobs in drawn])


def policy_of(architecture, dtype="float32", **fields):
    return Policy(architecture, devices(), dtype, bitwise=True, **fields)
