"""The states inside the model are those that hooks find in transformers, and reading one runs no later layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models import hf_weights
from jaxrl_llm.models.architecture import SITES, Capture
from jaxrl_llm.models.policy import Policy

CONFIG = transformers.Qwen3Config(
    vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    head_dim=16, initializer_range=0.2, tie_word_embeddings=False, pad_token_id=0,
)  # fmt: skip
LENGTH = 7


def their_states(model, tokens):
    """{site: [L, T, D]} by forward hooks."""
    found = {site: [] for site in SITES}
    hooks = []
    for block in model.model.layers:
        hooks += [
            block.register_forward_hook(lambda m, given, out: found["layer_in"].append(given[0])),
            block.register_forward_hook(lambda m, given, out: found["layer_out"].append(out)),
            block.input_layernorm.register_forward_hook(lambda m, given, out: found["attn_in_normed"].append(out)),
            block.self_attn.register_forward_hook(lambda m, given, out: found["attn_out"].append(out[0])),
            block.mlp.register_forward_hook(lambda m, given, out: found["mlp_in_normed"].append(given[0])),
            block.mlp.register_forward_hook(lambda m, given, out: found["mlp_out"].append(out)),
        ]
    with torch.no_grad():
        model(input_ids=torch.tensor(tokens))
    for hook in hooks:
        hook.remove()
    return {site: torch.stack([x.reshape(LENGTH, -1) for x in states]).numpy() for site, states in found.items()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(our policy, its parameters, transformers' states, the arguments of `hidden`)."""
    torch.manual_seed(0)
    CONFIG._attn_implementation = "eager"
    theirs = transformers.AutoModelForCausalLM.from_config(CONFIG).float().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    policy = Policy(hf_weights.architecture(folder), Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1]))
    tokens = np.random.default_rng(0).integers(1, 61, (1, LENGTH))
    row = (jnp.asarray(tokens, jnp.int32), jnp.arange(LENGTH)[None], jnp.ones((1, LENGTH), jnp.int32))
    return policy, hf_weights.load(policy, folder), their_states(theirs, tokens), row


def test_every_site_of_every_layer_is_that_of_transformers(pair):
    policy, params, theirs, row = pair
    found = jax.jit(lambda params: policy.measured(params, *row, lambda states: states))(params)
    assert set(found) == set(SITES)
    for site, want in theirs.items():
        assert np.abs(want).max() > 0.1
        np.testing.assert_allclose(found[site][:, 0], want, atol=2e-5, err_msg=site)


@pytest.mark.parametrize("site", SITES)
def test_a_captured_state_is_that_site(pair, site):
    policy, params, theirs, row = pair
    hidden = jax.jit(policy.hidden, static_argnames="capture")
    got = hidden(params, *row, capture=Capture(layer=1, site=site))
    np.testing.assert_allclose(got[0], theirs[site][1], atol=2e-5)


def test_with_the_final_norm_the_last_layer_is_the_whole_model_and_without_it_is_not(pair):
    policy, params, _, row = pair
    hidden = jax.jit(policy.hidden, static_argnames="capture")
    whole = hidden(params, *row)
    np.testing.assert_array_equal(hidden(params, *row, capture=Capture(layer=2, final_norm=True)), whole)
    assert float(jnp.abs(hidden(params, *row, capture=Capture(layer=2)) - whole).max()) > 0.1


def test_layers_above_have_no_influence_and_no_gradient(pair):
    policy, params, _, row = pair

    def f(params):
        return jnp.sum(policy.hidden(params, *row, capture=Capture(layer=0)) ** 2)

    gradient = jax.jit(jax.grad(f))(params)
    for leaf in jax.tree.leaves(gradient["layers"]):
        assert np.abs(leaf[0]).max() > 0 and not np.asarray(leaf[1:]).any()
    assert not np.asarray(gradient["norm"]["scale"]).any()
    assert np.abs(gradient["embedding"]).max() > 0
