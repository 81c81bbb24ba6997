"""The embedded sampler with recurrent layers: transformers' greedy tokens, and the log-probs of a full forward pass, whatever slot is refilled."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from builders import slow_but
from sampler_cases import Letters, sample

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.models import hf_weights
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.samplers.embedded.room import COPIES, Capacity, taken_bytes
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "initializer_range": 0.1, "pad_token_id": 0, "max_position_embeddings": 256,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
}  # fmt: skip
CONFIGS = {
    "dense": transformers.Qwen3_5TextConfig(**SIZES),
    "experts": transformers.Qwen3_5MoeTextConfig(**SIZES, **EXPERTS),
    "next": transformers.Qwen3NextConfig(**SIZES, **EXPERTS),
}
LENGTH, COUNT = 128, 5


@pytest.fixture(scope="module", params=slow_but(("experts",), CONFIGS))
def models(request, tmp_path_factory):
    """transformers' model, the policy and its parameters."""
    folder = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(1)
    config = CONFIGS[request.param]
    config._attn_implementation = "eager"
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    theirs.save_pretrained(folder)
    policy = Policy(hf_weights.architecture(folder), Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1]))
    return theirs, policy, hf_weights.load(policy, folder)


def prefixes():
    """Prompts of one token, of less than the convolution sees, and of more than a chunk."""
    rng = np.random.default_rng(3)
    return [rng.integers(1, 61, n).astype(np.int32) for n in (1, 2, 70, 5, 33)]


def test_layers_given_apart_are_the_stacked_ones(models):
    """Hidden states, what the layers keep, and the experts that tokens go to."""
    _, policy, params = models
    tokens, positions = jnp.array([[3], [5]]), jnp.array([[0], [2]])
    cache = policy.cache(2, 8)
    _, cache, _ = policy.routed_extend(params, cache, tokens, positions)
    stacked = policy.routed_extend(params, cache, tokens, positions + 1)
    apart = policy.routed_extend(params, cache, tokens, positions + 1, apart=policy.apart(params, (2, 1)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), stacked, apart)


def drawn(policy, params, n, settings, **fields):
    async def run():
        engine = EmbeddedSampler(**fields).start(policy, Letters(), max_length=LENGTH)
        await engine.publish(params, 0)
        found = await sample(engine, prefixes(), n, settings)
        await engine.close()
        return found

    return asyncio.run(run())


def test_24_greedy_tokens_are_those_of_transformers_with_slots_refilled_in_the_midst(models):
    theirs, policy, params = models
    groups = drawn(policy, params, 1, SamplingParams(max_tokens=24, temperature=0), slots=2, decode_chunk=5)
    assert len(groups) == COUNT
    for prefix, (one,) in zip(prefixes(), groups):
        with torch.no_grad():
            ids = torch.tensor(prefix[None]).long()
            want = theirs.generate(
                ids, max_new_tokens=24, do_sample=False, attention_mask=torch.ones_like(ids), eos_token_id=None
            )
        assert one.tokens.tolist() == want[0, len(prefix) :].tolist()


@pytest.mark.parametrize("page", [0, 16])
def test_log_probs_of_samples_are_those_of_a_full_forward_pass_and_of_one_at_a_time(models, page):
    _, policy, params = models
    settings = SamplingParams(max_tokens=20)
    groups = drawn(policy, params, 3, settings, slots=4, decode_chunk=7, page=page)
    alone = drawn(policy, params, 3, settings, slots=1, decode_chunk=20)
    rows = [(p, one) for p, group in zip(prefixes(), groups) for one in group]
    tokens, segments = np.zeros((len(rows), LENGTH), np.int32), np.zeros((len(rows), LENGTH), np.int32)
    for row, (prefix, one) in enumerate(rows):
        whole = np.concatenate([prefix, one.tokens])
        tokens[row, : len(whole)], segments[row, : len(whole)] = whole, 1
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), tokens.shape)
    tokens, segments = jnp.asarray(tokens), jnp.asarray(segments)

    @jax.jit
    def judged(params):
        return jax.nn.log_softmax(policy.hidden(params, tokens, positions, segments) @ policy.head(params).T)

    logs = np.asarray(judged(params))
    for row, (prefix, one) in enumerate(rows):
        places = np.arange(len(prefix), len(prefix) + len(one.tokens))
        want = logs[row, places - 1, one.tokens]
        assert np.abs(one.logprobs - want).max() <= 1e-4
    for group, others in zip(groups, alone, strict=True):
        for one, other in zip(group, others, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert np.abs(one.logprobs - other.logprobs).max() <= 1e-4
        assert len({tuple(one.tokens.tolist()) for one in group}) > 1


def test_the_room_of_slots_counts_a_state_for_each_whatever_their_length(models):
    """By hand: one layer of four has keys and values, the others 4 states of 8 x 6 and 3 inputs of 56 channels, all float32."""
    _, policy, _ = models
    for slots, length in ((1, 16), (2, 16), (2, 64)):
        capacity = Capacity(slots=slots, length=length, stop_ids=4, penalised=False)
        keys, held = 2 * length * 2 * 16, 3 * (4 * 8 * 6 + 3 * 56)
        assert taken_bytes(policy, capacity) == 4 * slots * (keys + held + COPIES * 61)


def test_a_narrow_cache_narrows_keys_and_values_alone(models):
    _, policy, _ = models
    kinds = {name: str(x.dtype) for name, x in policy.cache(2, 16, "float8_e4m3fn").items()}
    assert kinds == {"k": "float8_e4m3fn", "v": "float8_e4m3fn", "state": "float32", "conv": "float32"}


def test_tokens_that_come_in_parts_leave_the_state_of_one_whole(models):
    """Prefill of a part, then of another part with padding that does not count, then one token."""
    _, policy, params = models
    tokens = jnp.asarray(np.random.default_rng(5).integers(1, 61, (2, 90)), jnp.int32)
    extend = jax.jit(policy.extend, static_argnames="fresh")
    whole, cache = extend(params, policy.cache(2, 96), tokens, jnp.tile(jnp.arange(90), (2, 1)), fresh=True)
    _, parts = extend(params, policy.cache(2, 96), tokens[:, :70], jnp.tile(jnp.arange(70), (2, 1)), fresh=True)
    some = jnp.pad(tokens[:, 70:89], ((0, 0), (0, 5)))
    _, parts = extend(params, parts, some, jnp.tile(70 + jnp.arange(24), (2, 1)), counts=jnp.array([19, 19]))
    last, parts = extend(params, parts, tokens[:, 89:], jnp.full((2, 1), 89))
    assert np.abs(np.asarray(last[:, 0] - whole[:, 89])).max() <= 1e-4
    for name in ("state", "conv"):
        assert np.abs(np.asarray(parts[name] - cache[name])).max() <= 1e-4 * np.abs(np.asarray(cache[name])).max()
