"""The tiny policy with adapters, and the learner's log-probs of what is drawn with them."""

import asyncio
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from sampler_cases import MAX_LENGTH, Letters, Tiny, sample

from jaxrl_llm.experience import Completion, SamplingParams
from jaxrl_llm.models.lora import AdaptedPolicy, LoRA
from jaxrl_llm.samplers.embedded.engine import Engine
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler

PLAIN = SamplingParams(max_tokens=6)
LOW = LoRA(rank=3, alpha=6.0)


def adapted(tiny: Tiny, size: float = 0.3, seed: int = 3) -> tuple[AdaptedPolicy, Any]:
    """The tiny policy with adapters, and these away from 0, the same on every mesh."""
    plain = tiny.policy
    policy = AdaptedPolicy(plain.architecture, plain.partitioner, plain.compute_dtype, plain.remat, LOW)
    random = np.random.default_rng(seed)
    draw = lambda like: jax.device_put(random.normal(0, size, like.shape).astype(np.float32), like.sharding)  # noqa: E731
    return policy, jax.tree.map(draw, policy.abstract())


def start(policy: AdaptedPolicy, **fields: Any) -> Engine:
    return EmbeddedSampler(adapters=True, **fields).start(policy, Letters(), max_length=MAX_LENGTH)


def drawn(engine: Engine, params: Any, prefixes: list[np.ndarray], settings: SamplingParams) -> list[list[Completion]]:
    async def once() -> list[list[Completion]]:
        await engine.publish(params, 0)
        groups = await sample(engine, prefixes, 2, settings)
        await engine.close()
        return groups

    return asyncio.run(once())


def gaps(tiny: Tiny, params: Any, prefixes: list[np.ndarray], groups: list[list[Completion]]) -> np.ndarray:
    """Log-probs of drawn tokens less those of the learner, by its own forward pass with `params`."""
    learner, found = replace(tiny, params=params), []
    for prefix, group in zip(prefixes, groups, strict=True):
        whole = [np.concatenate([prefix, one.tokens]) for one in group]
        for one, sequence, logits in zip(group, whole, learner.logits(whole)):
            rows = logits[len(prefix) - 1 : len(sequence) - 1]
            stats = (
                rows
                - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True))
                - rows.max(1, keepdims=True)
            )
            found.append(one.logprobs - stats[np.arange(len(rows)), one.tokens])
    return np.concatenate(found)
