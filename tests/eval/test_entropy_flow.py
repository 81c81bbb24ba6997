"""The entropy flow is that of the softmax at each site, and the proposed layer ends the first rise."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import Words, make_prompt, make_rollout

from jaxrl_llm.data.sorting import Sorting
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.eval import entropy_figures, entropy_flow
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen3 import Qwen3
from jaxrl_llm.models.sources import Opened
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler

MODEL = Qwen3(
    vocabulary_size=23, width=16, layers=3, heads=2, kv_heads=1, head_width=8, mlp_width=24, tied=False, init_std=0.4
)


class Given:
    """A model of which the tokenizer alone is asked."""

    def open(self, partitioner):
        return Opened(policy=None, tokenizer=Words(), params=dict, name="m")


@pytest.fixture(scope="module")
def found():
    """(policy, parameters, rollouts, what was measured)."""
    policy = Policy(MODEL, Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1]))
    params = policy.init(jax.random.key(0))
    random = np.random.default_rng(0)
    rollouts = [make_rollout(make_prompt(f"p{i}", random.integers(3, 23, p)), random.integers(3, 23, n)) for i, (p, n) in enumerate(((3, 4), (2, 1), (4, 3)))]  # fmt: skip
    return policy, params, rollouts, entropy_flow.measure(policy, params, rollouts, rows=2)


def entropies(x, head):
    """Of softmax(x head^T), float64 [..., T]."""
    z = np.asarray(x, np.float64) @ np.asarray(head, np.float64).T
    logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return -(np.exp(logp) * logp).sum(-1)


def test_means_are_over_the_positions_that_predict_the_answers(found):
    policy, params, rollouts, measured = found
    sums = dict.fromkeys(measured["sites"], 0.0)
    own, cosines = [], 0.0
    for r in rollouts:
        tokens = jnp.asarray(np.concatenate([r.prompt.tokens, r.tokens])[None], jnp.int32)
        places = (jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens))
        states = jax.jit(lambda p, row: policy.measured(p, *row, lambda s: s))(params, (tokens, *places))
        at = slice(len(r.prompt.tokens) - 1, tokens.shape[1] - 1)
        for site, x in states.items():
            sums[site] = sums[site] + entropies(x[:, 0, at], policy.head(params)).sum(-1)
        own.append(entropies(policy.hidden(params, tokens, *places)[0, at], policy.head(params)))
        a, x = (np.asarray(states[site][:, 0, at], np.float64) for site in ("attn_out", "layer_in"))
        cosines = cosines + ((a * x).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(x, axis=-1)).sum(-1)
    for site, total in sums.items():
        np.testing.assert_allclose(measured["sites"][site], total / 8, rtol=1e-4, err_msg=site)
    np.testing.assert_allclose(measured["entropy"], np.concatenate(own), rtol=1e-4)
    np.testing.assert_allclose(measured["cosines"]["attn"], cosines / 8, rtol=1e-3, atol=1e-5)


def test_the_result_names_tokens_beside_their_own_entropies_and_is_drawn(found, tmp_path):
    _, _, rollouts, measured = found
    model = Given()
    flow = entropy_flow.EntropyFlow(
        out_dir="x", model=model, sampler=EmbeddedSampler(), data=Sorting(), high_entropy=0.1
    )
    result = flow.result(model.open(None), rollouts, measured)
    assert result["entropy_statistics"]["total_tokens"] == 8
    assert result["internal_module_entropy"]["total_modules_analyzed"] == 6
    first = result["high_entropy_examples"][0]
    place = int(np.argmax(measured["entropy"]))
    row, position = [(i, t) for i, r in enumerate(rollouts) for t in range(len(r.tokens))][place]
    assert (first["prompt"], first["position"], first["token"]) == (
        f"p{row}",
        position,
        int(rollouts[row].tokens[position]),
    )
    change = measured["sites"]["mlp_out"] - measured["sites"]["mlp_in_normed"]
    np.testing.assert_allclose(result["layers"]["ffn"]["change"], change)
    assert json.loads(json.dumps(result)) == result
    pytest.importorskip("matplotlib")
    assert entropy_figures.draw(result, tmp_path)
    names = {"layer_entropy", "attn_entropy", "ffn_entropy", "combined_entropy", "entropy_flow_stacked_narrow"}
    assert {p.name for p in tmp_path.iterdir()} == {f"{n}{s}" for n in names for s in (".png", ".pdf")}


@pytest.mark.parametrize(("change", "layer"), [
    ([0.3] * 6 + [0.0] * 20 + [-0.2] * 10, 5),  # Qwen3-4B in the paper: layers 1 to 6 explore
    ([0.2] * 27 + [-0.1], 26),  # Llama-3.2-3B: 27 of 28
    ([0.2] * 4, 2),  # never the last
    ([0.005, 0.3, 0.3], None),  # no rise at first
])  # fmt: skip
def test_the_proposed_layer_is_the_last_of_the_first_rise(change, layer):
    assert entropy_flow.proposed(np.array(change), 0.01) == layer
