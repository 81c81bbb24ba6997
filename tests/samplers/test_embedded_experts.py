"""The embedded sampler with a model of experts: transformers' greedy tokens, the learner's log-probs, and the experts of each token."""

import asyncio
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from sampler_cases import Letters, sample

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.models import hf_weights
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler

CONFIG = transformers.Qwen3MoeConfig(
    vocab_size=61, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=48, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True,
    mlp_only_layers=[1], initializer_range=0.2, pad_token_id=0,
)  # fmt: skip
LENGTH = 48


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """transformers' model, the policy and its parameters."""
    folder = tmp_path_factory.mktemp("moe")
    torch.manual_seed(1)
    CONFIG._attn_implementation = "eager"
    theirs = transformers.AutoModelForCausalLM.from_config(CONFIG).float().eval()
    theirs.save_pretrained(folder)
    policy = Policy(hf_weights.architecture(folder), Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1]))
    return theirs, policy, hf_weights.load(policy, folder)


def prefixes_of(count):
    rng = np.random.default_rng(3)
    return [rng.integers(1, 61, n).astype(np.int32) for n in rng.integers(2, 14, count)]


def drawn(policy, params, prefixes, n, settings, record=True, **fields):
    async def run():
        sampler = EmbeddedSampler(record_routes=record, **fields)
        engine = sampler.start(policy, Letters(), max_length=LENGTH)
        await engine.publish(params, 0)
        found = await sample(engine, prefixes, n, settings)
        await engine.close()
        return found

    return asyncio.run(run())


def test_24_greedy_tokens_are_those_of_transformers_with_slots_refilled_in_the_midst(models):
    theirs, policy, params = models
    prefixes = prefixes_of(5)
    groups = drawn(policy, params, prefixes, 1, SamplingParams(max_tokens=24, temperature=0), slots=2, decode_chunk=5)
    for prefix, (one,) in zip(prefixes, groups):
        with torch.no_grad():
            ids = torch.tensor(prefix[None]).long()
            want = theirs.generate(
                ids, max_new_tokens=24, do_sample=False, attention_mask=torch.ones_like(ids), eos_token_id=None
            )
        assert one.tokens.tolist() == want[0, len(prefix) :].tolist()


@partial(jax.jit, static_argnames=("policy",))
def judged(params, tokens, lengths, routes, *, policy):
    """Log-probs of a full forward pass [S, T, V], and its report, of right-padded rows."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    hidden, report = policy.routed(params, tokens, positions, segments, routes=routes)
    return jax.nn.log_softmax(hidden @ policy.head(params).T), report


def test_log_probs_and_experts_are_those_of_a_full_forward_pass(models):
    _, policy, params = models
    prefixes = [prefix for prefix in prefixes_of(3) for _ in range(2)]
    settings = SamplingParams(max_tokens=11, stop_token_ids=(5, 6, 7))
    groups = drawn(policy, params, prefixes[::2], 2, settings, slots=2, decode_chunk=4)
    found = [one for group in groups for one in group]
    tokens, lengths = np.zeros((len(found), 32), np.int32), np.zeros(len(found), np.int32)
    routes = np.full((len(found), 32, 3, 3), 255, np.uint8)
    for row, (prefix, one) in enumerate(zip(prefixes, found)):
        lengths[row] = len(prefix) + len(one.tokens) - 1
        tokens[row, : lengths[row]] = np.concatenate([prefix, one.tokens[:-1]])
        assert one.routes.dtype == np.uint8 and one.routes.shape == (lengths[row], 3, 3)
        routes[row, : lengths[row]] = one.routes
    logs, replayed = judged(params, tokens, lengths, routes, policy=policy)
    _, live = judged(params, tokens, lengths, np.full_like(routes, 255), policy=policy)
    chosen = np.moveaxis(np.asarray(live.chosen), 0, 2)
    for row, (prefix, one) in enumerate(zip(prefixes, found)):
        drew = np.asarray(logs)[row, len(prefix) - 1 : lengths[row]]
        np.testing.assert_allclose(one.logprobs, drew[np.arange(len(one.tokens)), one.tokens], atol=1e-4)
        assert np.array_equal(np.sort(one.routes, -1), np.sort(chosen[row, : lengths[row]], -1))
    assert np.asarray(replayed.recorded).tolist() == [int(lengths.sum())] * 3 and int(replayed.differs.sum()) == 0


def test_what_a_stop_string_drops_has_no_record_and_nothing_is_recorded_unasked(models):
    _, policy, params = models
    settings = SamplingParams(max_tokens=20, stop_strings=("b", "c", "d", "e", "f", "g"))
    (group,) = drawn(policy, params, prefixes_of(1), 6, settings, decode_chunk=16)
    assert min(len(one.tokens) for one in group) < 16
    assert all(len(one.routes) == len(prefixes_of(1)[0]) + len(one.tokens) - 1 for one in group)
    (plain,) = drawn(policy, params, prefixes_of(1), 6, settings, record=False, decode_chunk=16)
    assert all(one.routes is None for one in plain)
    assert [one.tokens.tolist() for one in plain] == [one.tokens.tolist() for one in group]


def test_experts_divided_over_devices_draw_the_same_tokens_and_record_the_same_experts(models):
    _, policy, params = models
    spread = replace(policy, partitioner=Partitioner.create(MeshConfig(fsdp=1, expert=2), jax.devices()[:2]))
    placed = jax.tree.map(lambda x, like: jax.device_put(np.asarray(x), like.sharding), params, spread.abstract())
    settings = SamplingParams(max_tokens=12, temperature=0)
    alone, divided = (
        drawn(p, w, prefixes_of(3), 1, settings, slots=2) for p, w in ((policy, params), (spread, placed))
    )
    for (one,), (other,) in zip(alone, divided):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(other.logprobs, one.logprobs, atol=1e-5)
        assert np.array_equal(np.sort(one.routes, -1), np.sort(other.routes, -1))


def test_a_dense_model_records_nothing(models):
    _, policy, _ = models
    from jaxrl_llm.models.qwen3 import Qwen3

    dense = Policy(
        Qwen3(vocabulary_size=61, width=16, layers=2, heads=2, kv_heads=1, head_width=8, mlp_width=32),
        policy.partitioner,
    )
    params = dense.init(jax.random.key(0))
    (group,) = drawn(dense, params, prefixes_of(1), 2, SamplingParams(max_tokens=4))
    assert all(one.routes is None for one in group)


def test_float32_routers_are_served_beside_bfloat16_weights(models):
    _, policy, params = models
    low = replace(policy, compute_dtype="bfloat16")
    from jaxrl_llm.samplers.embedded.sampler import served

    found = served(low, params, share=True, gather=False)
    kinds = {jax.tree_util.keystr(p): str(x.dtype) for p, x in jax.tree_util.tree_leaves_with_path(found)}
    assert {kind for path, kind in kinds.items() if "router" in path or "scale" in path} == {"float32"}
    assert {kind for path, kind in kinds.items() if "router" not in path and "scale" not in path} == {"bfloat16"}
