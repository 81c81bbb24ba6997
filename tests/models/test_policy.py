"""A policy's own laws: causality, packing, the cache, truncation, rematerialisation."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import slow_but

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models.architecture import Capture
from jaxrl_llm.models.llama3 import Llama3
from jaxrl_llm.models.mistral import Mistral
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen2 import Qwen2
from jaxrl_llm.models.qwen3 import Qwen3
from jaxrl_llm.samplers.embedded import decode

SIZES = {
    "vocabulary_size": 61,
    "width": 32,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_width": 8,
    "mlp_width": 48,
    "init_std": 0.2,
}
ARCHITECTURES = {
    "qwen2": Qwen2(**SIZES),
    "qwen3": Qwen3(**SIZES, tied=True),
    "llama3": Llama3(**SIZES),
    "mistral": Mistral(**SIZES, window=3),
    "ministral": Mistral(**SIZES, window=3, sliding=(False, True)),
}


def policy_of(architecture, **fields):
    return Policy(architecture, Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1]), **fields)


@pytest.fixture(scope="module", params=slow_but(("qwen2", "qwen3", "ministral"), ARCHITECTURES))
def model(request):
    policy = policy_of(ARCHITECTURES[request.param])
    return policy, policy.init(jax.random.key(0))


def row(length, seed=1):
    tokens = jax.random.randint(jax.random.key(seed), (1, length), 0, 61)
    return tokens, jnp.arange(length)[None], jnp.ones((1, length), jnp.int32)


def largest_gap(a, b):
    return float(jnp.max(jnp.abs(a - b)))


def test_a_later_token_never_changes_an_earlier_hidden_state(model):
    policy, params = model
    tokens, positions, segments = row(8)
    other = tokens.at[0, 5].set((tokens[0, 5] + 1) % 61)
    hidden = jax.jit(policy.hidden)
    before, after = hidden(params, tokens, positions, segments), hidden(params, other, positions, segments)
    assert largest_gap(before[:, :5], after[:, :5]) == 0
    assert largest_gap(before[:, 5], after[:, 5]) > 1e-3


def test_sequences_packed_in_one_row_equal_rows_of_their_own(model):
    policy, params = model
    first, second = row(5, seed=2), row(4, seed=3)
    pad = jnp.zeros((1, 2), jnp.int32)
    tokens = jnp.concatenate([first[0], second[0], pad], axis=1)
    positions = jnp.concatenate([first[1], second[1], pad], axis=1)
    segments = jnp.concatenate([first[2], 2 * second[2], pad], axis=1)
    hidden = jax.jit(policy.hidden, static_argnames="max_segments")
    packed = hidden(params, tokens, positions, segments, max_segments=2)
    assert largest_gap(packed[:, :5], hidden(params, *first)) < 1e-5
    assert largest_gap(packed[:, 5:9], hidden(params, *second)) < 1e-5


def test_a_cached_token_by_token_run_equals_the_whole_run(model):
    policy, params = model
    lengths, total, prompt = (6, 3), 10, 6
    tokens = jax.random.randint(jax.random.key(4), (2, total), 0, 61)
    positions = jnp.broadcast_to(jnp.arange(total), (2, total))
    whole = jax.jit(policy.hidden)(params, tokens, positions, jnp.ones_like(tokens))
    extend = jax.jit(policy.extend, donate_argnums=1)
    # The second prompt is right-padded with garbage, which later tokens overwrite before anything attends to it.
    padded = tokens.at[1, lengths[1] : prompt].set(0)
    hidden, cache = extend(params, policy.cache(2, total), padded[:, :prompt], positions[:, :prompt])
    assert largest_gap(hidden[0], whole[0, :prompt]) < 1e-5
    assert largest_gap(hidden[1, : lengths[1]], whole[1, : lengths[1]]) < 1e-5
    for step in range(total - prompt):
        at = np.array(lengths)[:, None] + step
        hidden, cache = extend(params, cache, jnp.take_along_axis(tokens, at, axis=1), at)
        for slot in range(2):
            assert largest_gap(hidden[slot, 0], whole[slot, at[slot, 0]]) < 1e-5


def test_layers_given_apart_are_the_stacked_ones(model):
    policy, params = model
    tokens, positions = jnp.array([[3], [5]]), jnp.array([[0], [2]])
    for cache in (policy.cache(2, 4), policy.extend(params, policy.cache(2, 4), tokens, positions)[1]):
        stacked = policy.routed_extend(params, cache, tokens, positions)
        apart = policy.routed_extend(params, cache, tokens, positions, apart=policy.apart(params, (2, 1)))
        assert jax.tree.all(jax.tree.map(lambda a, b: largest_gap(a, b) < 1e-6, stacked[:2], apart[:2]))


def test_a_token_beyond_the_cache_is_not_written():
    policy = policy_of(ARCHITECTURES["qwen3"])
    params, cache = policy.init(jax.random.key(0)), policy.cache(2, 4)
    _, cache = policy.extend(params, cache, jnp.ones((2, 1), jnp.int32), jnp.array([[4], [1]]))
    written = np.abs(np.asarray(cache["k"])).sum(axis=(0, 3, 4)) > 0
    assert written.tolist() == [[False] * 4, [False, True, False, False]]


def test_a_truncated_run_equals_a_model_of_only_these_layers(model):
    policy, params = model
    short = policy_of(replace(policy.architecture, layers=2))
    kept = {**params, "layers": jax.tree.map(lambda x: x[:2], params["layers"])}
    got = jax.jit(policy.hidden, static_argnames="capture")(params, *row(8), capture=Capture(layer=1, final_norm=True))
    assert largest_gap(got, jax.jit(short.hidden)(kept, *row(8))) == 0


def test_a_truncated_run_needs_a_depth_of_the_model():
    policy = policy_of(ARCHITECTURES["qwen3"])
    for layer in (3, -1):
        with pytest.raises(ValueError, match=rf"Capture.layer must be in 0..2, a layer of the model \(got {layer}\)"):
            policy.hidden(policy.init(jax.random.key(0)), *row(2), capture=Capture(layer=layer))


@pytest.mark.parametrize(
    ("remat", "unroll"), [("full", 1), ("offload", 1), ("projections", 2), ("gate", 1), ("dots", 3)]
)
def test_rematerialisation_and_unrolling_change_neither_values_nor_gradients(remat, unroll):
    plain = policy_of(ARCHITECTURES["ministral"])
    saved = policy_of(ARCHITECTURES["ministral"], remat=remat, unroll=unroll)
    params = plain.init(jax.random.key(0))
    tokens, positions, segments = row(8)

    def loss(policy, params):
        return jnp.sum(policy.hidden(params, tokens, positions, segments) ** 3)

    a, b = (jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)(p, params) for p in (plain, saved))
    assert float(a[0]) == pytest.approx(float(b[0]), rel=1e-5)
    for x, y in zip(jax.tree.leaves(a[1]), jax.tree.leaves(b[1])):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_prompts_are_prefilled_by_a_loop_over_layers_however_updates_unroll_them():
    one, whole = (policy_of(ARCHITECTURES["qwen3"], unroll=unroll) for unroll in (1, SIZES["layers"]))
    params, tokens = one.init(jax.random.key(0)), jnp.ones((2, 5), jnp.int32)
    texts = [str(jax.make_jaxpr(partial(decode.prefill, policy=policy))(params, tokens)) for policy in (one, whole)]
    assert all(re.findall(r"\bunroll=(\d+)", text) == ["1"] for text in texts)
    assert whole.looped == one and one.looped is one


def test_each_remat_policy_keeps_what_it_says_for_the_backward_pass():
    """Kept activations a layer and token, float32 numbers, of the (3, 1, 8, ...) stacked over 3 layers and 8 tokens."""
    kept = {}
    for remat in ("full", "projections", "gate", "dots"):
        policy = policy_of(ARCHITECTURES["qwen3"], remat=remat)
        params = policy.init(jax.random.key(0))
        _, backward = jax.vjp(lambda p, policy=policy: policy.hidden(p, *row(8)), params)
        kept[remat] = sum(x.size for x in jax.tree.leaves(backward) if x.shape[:3] == (3, 1, 8)) // (3 * 8)
    heads = 4 * 8 + 2 * 2 * 8  # queries, keys, values
    # The layer's input alone; with it rotated queries, keys, values and the stream after attention; or every product that
    # something nonlinear follows (down's output is only added).
    assert kept == {
        "full": 32,
        "projections": 32 + heads + 32,
        "gate": 32 + heads + 32 + 48,
        "dots": 32 + heads + 32 + 2 * 48,
    }


def test_bfloat16_compute_keeps_float32_parameters_and_gradients():
    policy, exact = policy_of(ARCHITECTURES["qwen3"], compute_dtype="bfloat16"), policy_of(ARCHITECTURES["qwen3"])
    params = policy.init(jax.random.key(0))
    hidden = policy.hidden(params, *row(8))
    assert hidden.dtype == jnp.bfloat16
    assert policy.cache(1, 4)["k"].dtype == jnp.bfloat16
    assert largest_gap(hidden.astype(jnp.float32), exact.hidden(params, *row(8))) < 0.1
    grads = jax.grad(lambda p: policy.hidden(p, *row(8)).astype(jnp.float32).sum())(params)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_random_parameters_have_the_asked_for_spread():
    policy = policy_of(Qwen3(**{**SIZES, "width": 64, "init_std": 0.05}))
    params = policy.init(jax.random.key(3))
    for weight in (params["embedding"], params["head"], params["layers"]["mlp"]["down"]):
        assert float(weight.std()) == pytest.approx(0.05, rel=0.05)
        assert abs(float(weight.mean())) < 0.003
    layers = params["layers"]["mlp"]["gate"]
    assert largest_gap(layers[0], layers[1]) > 0.05


def test_a_policy_is_hashed_by_what_it_is():
    a, b = policy_of(ARCHITECTURES["qwen3"]), policy_of(ARCHITECTURES["qwen3"])
    assert a == b and hash(a) == hash(b)
    assert a != policy_of(ARCHITECTURES["qwen3"], remat="full")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compute_dtype": "float8"}, r"compute_dtype must be one of .*got 'float8'.*PolicySource.compute_dtype"),
        ({"remat": "some"}, r"remat must be one of .*got 'some'.*PolicySource.remat"),
    ],
)
def test_an_unknown_name_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        policy_of(ARCHITECTURES["qwen3"], **fields)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kv_heads": 3}, r"Qwen3.kv_heads must divide Qwen3.heads \(got 3 and 4\)"),
        ({"head_width": 7}, r"Qwen3.head_width must be even"),
        ({"layers": 0}, r"Qwen3.layers must be >= 1 \(got 0\)"),
        ({"window": 0}, r"Qwen3.window must be >= 1"),
        ({"window": 2, "sliding": ()}, r"Qwen3.sliding must not be empty"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Qwen3(**{**SIZES, **sizes})
