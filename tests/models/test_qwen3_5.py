"""A model with recurrent layers computes, differentiates and learns as transformers' Qwen3.5 and Qwen3-Next."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from builders import slow_but
from test_against_transformers import SIZES, one_device, random_model
from test_qwen3_moe import as_theirs

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.models import hf_weights
from jaxrl_llm.models.architecture import Capture
from jaxrl_llm.models.policy import Policy

HYBRID = {
    **SIZES, "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6, "max_position_embeddings": 512, "initializer_range": 0.1,
}  # fmt: skip
HALF = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
MIXED = ["full_attention", "linear_attention"] * 2
CHOSEN = 3
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
}  # fmt: skip
CONFIGS = {
    "untied": transformers.Qwen3_5TextConfig(**HYBRID, tie_word_embeddings=False),
    "tied_half_rotated": transformers.Qwen3_5TextConfig(**HYBRID, tie_word_embeddings=True, rope_parameters=HALF),
    "every_second": transformers.Qwen3_5TextConfig(**HYBRID, layer_types=MIXED),
    "experts": transformers.Qwen3_5MoeTextConfig(**HYBRID, **EXPERTS, tie_word_embeddings=False),
    "next": transformers.Qwen3NextConfig(**HYBRID, **EXPERTS, tie_word_embeddings=False),
    "next_some_dense": transformers.Qwen3NextConfig(
        **HYBRID, **EXPERTS, norm_topk_prob=False, mlp_only_layers=[1], tie_word_embeddings=True
    ),
}
SPARSE = ("experts", "next", "next_some_dense")
SEEDS = (8, 1, 0)  # of rows whose tokens are far from ties between experts at each of three steps
MARGIN = 2e-6  # of the last chosen expert's probability, which rounding moves by about 1e-7
LENGTHS = (150, 3, 70)  # more than two chunks of 64, less than the convolution sees, and more than one chunk
WIDTH = 153
RATE, BETAS, EPSILON, DECAY = 3e-3, (0.9, 0.95), 1e-2, 0.1
STILL = ("norm", "A_log", "dt_bias", "conv1d")  # parameters that do not decay


def loaded(name, folder, partitioner=None, remat="none"):
    theirs = random_model(CONFIGS[name])
    theirs.save_pretrained(folder)
    policy = Policy(hf_weights.architecture(folder), partitioner or one_device(), remat=remat)
    return theirs, policy, hf_weights.load(policy, folder)


@pytest.fixture(scope="module", params=slow_but(("untied",), CONFIGS))
def pair(request, tmp_path_factory):
    return request.param, *loaded(request.param, tmp_path_factory.mktemp(request.param))


# A dense model and one with experts, for what takes a program of its own to show.
BOTH = pytest.mark.parametrize("pair", ["untied", "next"], indirect=True)


def rows(side="right", seed=0):
    """Tokens, positions and segments of rows of one sequence, padded at a side."""
    rng, shape = np.random.default_rng(seed), (len(LENGTHS), WIDTH)
    tokens, segments = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, length in enumerate(LENGTHS):
        place = slice(0, length) if side == "right" else slice(WIDTH - length, WIDTH)
        tokens[row, place], segments[row, place] = rng.integers(1, 61, length), 1
    positions = np.maximum(np.cumsum(segments, axis=1) - 1, 0)
    return tuple(jnp.asarray(x, jnp.int32) for x in (tokens, positions, segments))


@partial(jax.jit, static_argnums=0)
def logits(policy, params, places):
    return policy.hidden(params, *places) @ policy.head(params).T


@partial(jax.jit, static_argnums=0)
def nll(policy, params, places):
    tokens, _, segments = places
    logs = jax.nn.log_softmax(policy.hidden(params, *places) @ policy.head(params).T, axis=-1)
    found = jnp.take_along_axis(logs[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    counted = segments[:, 1:] * segments[:, :-1] > 0
    return -jnp.sum(jnp.where(counted, found, 0.0)) / jnp.sum(counted)


def their_logits(model, places):
    tokens, positions, mask = (torch.tensor(np.asarray(x), dtype=torch.long) for x in places)
    return model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits


def their_nll(model, places):
    tokens, mask = (torch.tensor(np.asarray(x), dtype=torch.long) for x in (places[0], places[2]))
    logs = their_logits(model, places).log_softmax(-1)
    found = logs[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    counted = mask[:, 1:] * mask[:, :-1] > 0
    return -(found * counted).sum() / counted.sum()


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_and_log_probs_equal_transformers_under_padding(pair, side):
    _, theirs, policy, params = pair
    with torch.no_grad():
        want = their_logits(theirs, rows(side)).numpy()
    real, got = np.asarray(rows(side)[2]) == 1, np.asarray(logits(policy, params, rows(side)))
    assert np.abs(want).max() > 1
    assert np.abs(got - want)[real].max() <= 1e-4
    logs = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (got, want)]
    assert np.abs(logs[0] - logs[1])[real].max() <= 1e-4


def test_loss_and_every_gradient_equal_transformers(pair):
    _, theirs, policy, params = pair
    theirs.zero_grad()
    want = their_nll(theirs, rows())
    want.backward()
    value, gradient = jax.jit(jax.value_and_grad(lambda p: nll(policy, p, rows())))(params)
    np.testing.assert_allclose(float(value), want.item(), rtol=1e-5)
    expected = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    found = as_theirs(gradient)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert np.abs(x).max() > 1e-6, name
        assert np.abs(np.asarray(found[name]) - x).max() <= 1e-6 + 1e-4 * np.abs(x).max(), name


def least_margin(model, places):
    """By how much a chosen expert's probability is above that of the best other one, at the least, over tokens and layers."""
    tokens, positions, mask = (torch.tensor(np.asarray(x), dtype=torch.long) for x in places)
    with torch.no_grad():
        found = model(input_ids=tokens, attention_mask=mask, position_ids=positions, output_router_logits=True)
    every = [logits.softmax(-1).sort(-1, descending=True).values for logits in found.router_logits]
    real = mask.reshape(-1) == 1
    return len(every), min(float((p[real, CHOSEN - 1] - p[real, CHOSEN]).min()) for p in every)


@BOTH
@pytest.mark.slow
def test_three_adamw_steps_equal_torch(pair):
    """Each from the same parameters and moments: in float32 the gradients of two trajectories part by a factor of ten with each step.

    From one state, transformers' gradients in float32 are up to 5e-4 of a tensor's largest entry from those in float64, so two
    implementations may be 1e-3 apart; a step is no more than 2 RATE / EPSILON times that, the slope of m / (sqrt(v) + EPSILON).
    """
    name, _, policy, params = pair
    theirs = random_model(CONFIGS[name])
    named = dict(theirs.named_parameters())
    kinds = {
        still: [p for n, p in named.items() if any(word in n for word in STILL) == still] for still in (True, False)
    }
    groups = [{"params": p, "weight_decay": 0.0 if still else DECAY} for still, p in kinds.items()]
    torch_adam = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPSILON)
    optimizer = Optimizer(learning_rate=RATE, b1=BETAS[0], b2=BETAS[1], epsilon=EPSILON, weight_decay=DECAY)
    transform = optimizer.transform(10)
    state = transform.init(params)

    @jax.jit
    def step(params, state, places):
        gradient = jax.grad(lambda p: nll(policy, p, places))(params)
        changes, state = transform.update(gradient, state, params)
        return optax.apply_updates(params, changes), state

    for seed in SEEDS:
        assert name not in SPARSE or least_margin(theirs, rows(seed=seed))[1] > MARGIN
        torch_adam.zero_grad()
        their_nll(theirs, rows(seed=seed)).backward()
        torch_adam.step()
        params, state = step(params, state, rows(seed=seed))
        mu, nu = (as_theirs(optax.tree_utils.tree_get(state, moment)) for moment in ("mu", "nu"))
        ours = as_theirs(params)
        assert ours.keys() == named.keys()
        for leaf, p in named.items():
            want, most = p.detach().numpy(), p.grad.abs().max().item()
            apart = np.abs(ours[leaf] - want).max()
            assert apart <= 1e-6 + 2 * RATE / EPSILON * (1e-6 + 1e-3 * most), (leaf, apart, most)
            np.testing.assert_allclose(ours[leaf], want, rtol=1e-4, atol=1e-4, err_msg=leaf)
            own = torch_adam.state[p]
            for x, y in ((p.data, ours), (own["exp_avg"], mu), (own["exp_avg_sq"], nu)):
                x.copy_(torch.tensor(np.asarray(y[leaf])))


def test_the_random_routers_are_not_near_a_tie(pair):
    """Else another rounding would choose other experts, and nothing could be compared."""
    name, theirs, policy, _ = pair
    assert (policy.architecture.experts is not None) == (name in SPARSE)
    if name in SPARSE:
        layers, margin = least_margin(theirs, rows())
        assert layers == sum(policy.architecture.sparse) and margin > MARGIN


# -- packed rows -------------------------------------------------------------------------------------------------------

PARTS = (21, 2, 41, 70)  # boundaries in a chunk, in the reach of the convolution, and at a chunk's edge
FULL = sum(PARTS) + 5


def packed(order=(0, 1, 2, 3)):
    """A row of all parts in an order, and where each is."""
    rng = np.random.default_rng(7)
    parts = [rng.integers(1, 61, length) for length in PARTS]
    tokens, positions, segments, places, start = *np.zeros((3, 1, FULL), np.int64), {}, 0
    for number, part in enumerate(order, 1):
        place = slice(start, start + PARTS[part])
        tokens[0, place], positions[0, place], segments[0, place] = parts[part], np.arange(PARTS[part]), number
        places[part], start = place, place.stop
    return tuple(jnp.asarray(x, jnp.int32) for x in (tokens, positions, segments)), places, parts


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 1, 0)])
def test_logits_of_packed_sequences_equal_transformers_on_each_alone(pair, order):
    _, theirs, policy, params = pair
    row, places, parts = packed(order)
    got = np.asarray(logits(policy, params, row))[0]
    for part, place in places.items():
        alone = torch.tensor(parts[part][None])
        with torch.no_grad():
            want = theirs(input_ids=alone).logits[0].numpy()
        assert np.abs(got[place] - want).max() <= 1e-4


@BOTH
@pytest.mark.slow
def test_gradients_of_a_packed_row_are_the_sum_of_those_of_its_sequences(pair):
    _, _, policy, params = pair
    row, _, parts = packed()
    longest = max(map(len, parts))
    alone = jnp.asarray([np.pad(tokens, (0, longest - len(tokens))) for tokens in parts], jnp.int32)
    real = jnp.arange(longest)[None] < jnp.asarray([len(tokens) for tokens in parts])[:, None]
    apart = (alone, jnp.where(real, jnp.arange(longest)[None], 0), real.astype(jnp.int32))

    @jax.jit
    def summed(params, tokens, positions, segments):
        logs = jax.nn.log_softmax(policy.hidden(params, tokens, positions, segments) @ policy.head(params).T, axis=-1)
        found = jnp.take_along_axis(logs[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(jnp.where((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0), found, 0.0))

    (want, one), (got, two) = (jax.value_and_grad(summed)(params, *places) for places in (apart, row))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(two), jax.tree.leaves(one), strict=True):
        assert np.abs(x - y).max() <= 1e-4 * max(np.abs(np.asarray(y)).max(), 1.0)


def test_other_tokens_of_a_neighbour_change_no_bit(pair):
    _, _, policy, params = pair
    (tokens, positions, segments), places, _ = packed()
    other = tokens.at[:, places[1]].set(5)
    one, two = (np.asarray(logits(policy, params, (x, positions, segments)))[0] for x in (tokens, other))
    for part in (0, 2, 3):
        assert np.array_equal(one[places[part]], two[places[part]])
    assert np.abs(one - two)[places[1]].max() > 1e-2


def test_padding_changes_no_bit(pair):
    _, _, policy, params = pair
    tokens, positions, segments = rows()
    other = jnp.where(segments > 0, tokens, 7)
    one, two = (np.asarray(logits(policy, params, (x, positions, segments))) for x in (tokens, other))
    assert np.array_equal(one[np.asarray(segments) > 0], two[np.asarray(segments) > 0])


@BOTH
def test_a_captured_state_is_that_of_its_layer(pair):
    """After 2 of 4 layers, in the middle of a period, it is what a model of these 2 layers ends with."""
    _, theirs, policy, params = pair
    got = policy.hidden(params, *rows(), capture=Capture(layer=1))
    with torch.no_grad():
        tokens, positions, mask = (torch.tensor(np.asarray(x), dtype=torch.long) for x in rows())
        found = theirs.model(input_ids=tokens, attention_mask=mask, position_ids=positions, output_hidden_states=True)
    real = np.asarray(rows()[2]) == 1
    assert np.abs(np.asarray(got)[real] - found.hidden_states[2].numpy()[real]).max() <= 1e-4


@pytest.mark.parametrize(
    ("remat", "name"), [("full", "untied"), ("projections", "untied"), ("dots", "untied"), ("gate", "next")]
)
@pytest.mark.slow
def test_rematerialisation_changes_no_gradient(remat, name, tmp_path):
    """By no more than the rounding that a gradient in float32 has anyway: how far it is from transformers' in float64."""
    theirs, policy, params = loaded(name, tmp_path / "m")
    other = Policy(policy.architecture, policy.partitioner, remat=remat)
    want, got = (jax.jit(jax.grad(lambda p, model=model: nll(model, p, rows())))(params) for model in (policy, other))
    theirs.set_experts_implementation("eager")  # its grouped products are of 32 bits at most
    their_nll(theirs.double(), rows()).backward()
    want, got = as_theirs(want), as_theirs(got)
    for leaf, p in theirs.named_parameters():
        exact = p.grad.numpy()
        rounding = np.abs(np.asarray(want[leaf]) - exact).max()
        assert rounding <= 1e-6 + 5e-4 * np.abs(exact).max(), leaf
        assert np.abs(np.asarray(got[leaf]) - np.asarray(want[leaf])).max() <= rounding + 1e-6, leaf


MESHES = [{"fsdp": 2, "tensor": 2}, {"context": 2, "data": 2}, {"tensor": 4}, {"tensor": 3}]


@pytest.mark.parametrize(
    ("name", "sizes"), [*(("untied", sizes) for sizes in MESHES), *(("next", sizes) for sizes in MESHES[:2])]
)
@pytest.mark.slow
def test_a_mesh_changes_neither_loss_nor_gradients(sizes, name, tmp_path):
    _, alone, params = loaded(name, tmp_path / "m")
    places, devices = tuple(jnp.tile(x, (4, 1))[:4, :150] for x in rows()), int(np.prod(list(sizes.values())))
    mesh = Partitioner.create(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[:devices])
    policy = Policy(alone.architecture, mesh)
    spread = hf_weights.load(policy, tmp_path / "m")
    (want, slope), (got, gradient) = (
        jax.jit(jax.value_and_grad(lambda p, model=model: nll(model, p, places)))(x)
        for model, x in ((alone, params), (policy, spread))
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(slope), strict=True):
        assert np.abs(np.asarray(x) - np.asarray(y)).max() <= 1e-4 * max(np.abs(np.asarray(y)).max(), 1e-2)
