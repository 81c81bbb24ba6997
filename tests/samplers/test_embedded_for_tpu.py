"""The embedded sampler as TPUs run it: the order of their cache and their kernels, which Pallas interprets on a CPU."""

import contextlib
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from sampler_cases import SIZES, Tiny

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.attention import splash
from jaxrl_llm.kernels.decode_attention import mosaic_tpu
from jaxrl_llm.models.policy import Policy

WIDE = replace(SIZES, head_width=128)  # what fills a TPU's tile


@dataclass(frozen=True)
class Chip:
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"


@contextlib.contextmanager
def interpreted_tpu():
    with pytest.MonkeyPatch.context() as patch, dispatch.target(Chip()), dispatch.recording() as choices:
        patch.setattr(splash, "attend", partial(splash.attend, interpret=True))
        patch.setattr(mosaic_tpu, "step", partial(mosaic_tpu.step, interpret=pltpu.InterpretParams()))
        yield choices


def policy_of(devices: int, dtype: str) -> Tiny:
    policy = Policy(WIDE, Partitioner.create(MeshConfig(fsdp=devices), jax.devices()[:devices]), dtype)
    rng = np.random.default_rng(5)
    drawn = lambda leaf: rng.normal(0.1, 0.2, leaf.shape).astype(leaf.dtype)  # noqa: E731
    params = jax.tree.map(lambda leaf: jax.device_put(drawn(leaf), leaf.sharding), policy.abstract())
    return Tiny(policy=policy, params=params)


def learners_logprobs(model: Tiny, prefixes, groups) -> np.ndarray:
    """float64 log-probs of all drawn tokens by the learner's forward pass."""
    found = []
    for prefix, group in zip(prefixes, groups, strict=True):
        for completion, rows in zip(group, model.logits([np.concatenate([prefix, c.tokens]) for c in group])):
            rows = rows[len(prefix) - 1 : len(prefix) - 1 + len(completion.tokens)]
            top = rows.max(-1, keepdims=True)
            logp = rows - top - np.log(np.exp(rows - top).sum(-1, keepdims=True))
            found.append(logp[np.arange(len(logp)), completion.tokens])
    return np.concatenate(found)


# float8 keeps three bits of fraction: an entry is off by 2^-4 of itself at most.
@pytest.mark.parametrize(("devices", "cache", "most"), [(1, None, 0.05), (1, "float8_e4m3fn", 0.3), (2, None, 0.05)])
@pytest.mark.slow
def test_refilled_slots_draw_by_the_learners_log_probs(prefixes, draw, devices, cache, most):
    prompts = prefixes[:4]
    with interpreted_tpu() as choices:
        settings = SamplingParams(max_tokens=5, stop_token_ids=(3, 17, 8))
        groups = draw(policy_of(devices, "bfloat16"), prompts, 2, settings, slots=4, decode_chunk=2, cache=cache)
    used = {(choice.op, choice.backend) for choice in choices}
    # Gradients of a gated MLP, which a sampler does not take, are asked for where a mesh divides the weights.
    divided = {("gated_mlp", "xla")} if devices > 1 else set()
    assert used == {("decode_attention", "mosaic_tpu"), ("attention", "splash")} | divided
    got = np.concatenate([c.logprobs for group in groups for c in group])
    gaps = np.abs(got - learners_logprobs(policy_of(1, "float32"), prompts, groups))
    assert gaps.max() < most
    assert len(got) > 20


def test_what_the_kernel_refuses_is_drawn_from_the_same_order_of_the_cache(prefixes, draw):
    model = policy_of(1, "float32")
    with interpreted_tpu() as choices:
        groups = draw(model, prefixes[:2], 1, SamplingParams(max_tokens=4))
    refused = {choice.backend: choice.refused for choice in choices if choice.op == "decode_attention"}
    assert "bfloat16" in refused["reference"]["mosaic_tpu"]
    got = np.concatenate([c.logprobs for group in groups for c in group])
    np.testing.assert_allclose(got, learners_logprobs(model, prefixes[:2], groups), atol=1e-4)
