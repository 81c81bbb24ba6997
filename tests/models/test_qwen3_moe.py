"""A model with experts computes, differentiates and learns as transformers' does, and replays the experts that were recorded."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from builders import slow_but
from test_against_transformers import EXPERTS, one_device, random_model

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.models import hf_format, hf_weights
from jaxrl_llm.models.policy import Policy

CONFIGS = {
    "normalised": transformers.Qwen3MoeConfig(**EXPERTS, norm_topk_prob=True, tie_word_embeddings=False),
    "plain_tied": transformers.Qwen3MoeConfig(**EXPERTS, norm_topk_prob=False, tie_word_embeddings=True),
    "every_second": transformers.Qwen3MoeConfig(**EXPERTS, norm_topk_prob=True, decoder_sparse_step=2),
    "irregular": transformers.Qwen3MoeConfig(**EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]),
}
SPARSE = {"every_second": [1, 3], "irregular": [0, 2, 3]}
LENGTH, ROWS, CHOSEN, COUNT = 11, 3, 3, 8
RATE, BETAS, EPSILON, DECAY = 3e-3, (0.9, 0.95), 1e-4, 0.1


def loaded(name, folder, partitioner=None, remat="none"):
    theirs = random_model(CONFIGS[name])
    theirs.save_pretrained(folder)
    policy = Policy(hf_weights.architecture(folder), partitioner or one_device(), remat=remat)
    return theirs, policy, hf_weights.load(policy, folder)


@pytest.fixture(scope="module", params=slow_but(("irregular",), CONFIGS))
def pair(request, tmp_path_factory):
    return request.param, *loaded(request.param, tmp_path_factory.mktemp(request.param))


def rows(seed=0, count=ROWS):
    """Tokens, positions and segments of rows of one sequence, the last two tokens of which are padding."""
    tokens = np.random.default_rng(seed).integers(1, 61, (count, LENGTH))
    segments = np.ones_like(tokens)
    segments[:, -2:] = 0
    positions = np.broadcast_to(np.arange(LENGTH), tokens.shape)
    return tuple(jnp.asarray(x, jnp.int32) for x in (tokens, positions, segments))


@partial(jax.jit, static_argnums=0)
def nll(policy, params, places, routes=None):
    """The summed negative log-likelihood of each next token that is no padding, and the report."""
    tokens, _, segments = places
    hidden, report = policy.routed(params, *places, routes=routes)
    logs = jax.nn.log_softmax(hidden @ policy.head(params).T, axis=-1)
    found = jnp.take_along_axis(logs[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    return -jnp.sum(found * (segments[:, 1:] > 0)), report


def their_nll(model, places):
    tokens, mask = (torch.tensor(np.asarray(x), dtype=torch.long) for x in (places[0], places[2]))
    logs = model(input_ids=tokens, attention_mask=mask).logits.log_softmax(-1)
    found = logs[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    return -(found * (mask[:, 1:] > 0)).sum()


def as_theirs(tree):
    """Leaves like the parameters under transformers' names: the tensors of all experts of a layer are fused."""
    found = {name: np.asarray(x) for name, x in hf_format.export(tree).items()}
    for layer in range(EXPERTS["num_hidden_layers"]):
        start = f"model.layers.{layer}.mlp.experts"
        if f"{start}.0.down_proj.weight" not in found:
            continue
        one = lambda expert, part, start=start: found.pop(f"{start}.{expert}.{part}_proj.weight")  # noqa: E731
        both = [np.concatenate([one(e, "gate"), one(e, "up")]) for e in range(COUNT)]
        found[f"{start}.gate_up_proj"] = np.stack(both)
        found[f"{start}.down_proj"] = np.stack([one(e, "down") for e in range(COUNT)])
    return found


def assert_close(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        np.testing.assert_allclose(ours[name], x, rtol=tolerance, atol=tolerance, err_msg=name)


def test_the_random_routers_are_not_near_a_tie(pair):
    """Else another rounding would choose other experts, and nothing could be compared."""
    _, theirs, _, _ = pair
    with torch.no_grad():
        found = theirs(input_ids=torch.tensor(np.asarray(rows()[0])).long(), output_router_logits=True)
    for logits in found.router_logits:
        ordered = logits.softmax(-1).sort(-1, descending=True).values
        apart = (ordered[:, CHOSEN - 1] - ordered[:, CHOSEN])[np.asarray(rows()[2]).reshape(-1) == 1]
        assert apart.min() > 1e-5


def test_hidden_states_and_gradients_equal_transformers(pair):
    _, theirs, policy, params = pair
    theirs.zero_grad()
    want = their_nll(theirs, rows())
    want.backward()
    value, gradient = jax.jit(jax.value_and_grad(lambda p: nll(policy, p, rows())[0]))(params)
    np.testing.assert_allclose(float(value), want.item(), rtol=1e-5)
    expected = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    assert sum("mlp.gate.weight" in name and np.abs(x).max() > 1e-3 for name, x in expected.items()) >= 2
    assert_close(as_theirs(gradient), expected, 1e-4)
    with torch.no_grad():
        inputs = {
            "input_ids": torch.tensor(np.asarray(rows()[0])).long(),
            "attention_mask": torch.tensor(np.asarray(rows()[2])),
        }
        hidden = theirs.model(**inputs).last_hidden_state.numpy()
    real = np.asarray(rows()[2]) == 1
    assert np.abs(np.asarray(policy.hidden(params, *rows()))[real] - hidden[real]).max() <= 1e-4


def test_three_adamw_steps_equal_torch(pair):
    name, _, policy, params = pair
    theirs = random_model(CONFIGS[name])
    kinds = {
        decays: [p for n, p in theirs.named_parameters() if ("norm" not in n) == decays] for decays in (True, False)
    }
    groups = [{"params": p, "weight_decay": DECAY if decays else 0.0} for decays, p in kinds.items()]
    torch_adam = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPSILON)
    optimizer = Optimizer(learning_rate=RATE, b1=BETAS[0], b2=BETAS[1], epsilon=EPSILON, weight_decay=DECAY)
    transform = optimizer.transform(10)
    state = transform.init(params)

    @jax.jit
    def step(params, state, places):
        gradient = jax.grad(lambda p: nll(policy, p, places)[0])(params)
        changes, state = transform.update(gradient, state, params)
        return optax.apply_updates(params, changes), state

    for number in range(3):
        torch_adam.zero_grad()
        their_nll(theirs, rows(number)).backward()
        torch_adam.step()
        params, state = step(params, state, rows(number))
    assert_close(as_theirs(params), {n: p.detach().numpy() for n, p in theirs.named_parameters()}, 1e-4)


@pytest.mark.parametrize("remat", slow_but(("full",), ("full", "gate", "attention")))
def test_rematerialisation_changes_no_gradient(remat, tmp_path):
    _, policy, params = loaded("every_second", tmp_path / "m")
    other = Policy(policy.architecture, policy.partitioner, remat=remat)
    want, got = (
        jax.jit(jax.grad(lambda p, model=model: nll(model, p, rows())[0]))(params) for model in (policy, other)
    )
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_the_report_counts_each_token_of_a_segment_once_for_each_expert_it_went_to(pair):
    name, theirs, policy, params = pair
    report = nll(policy, params, rows())[1]
    with torch.no_grad():
        inputs = {
            "input_ids": torch.tensor(np.asarray(rows()[0])).long(),
            "attention_mask": torch.tensor(np.asarray(rows()[2])),
        }
        found = theirs(**inputs, output_router_logits=True).router_logits
    sparse = SPARSE.get(name, list(range(4)))
    assert report.counts.shape == (len(sparse), COUNT) and len(found) == len(sparse)
    real = np.asarray(rows()[2]).reshape(-1) == 1
    for layer, logits in enumerate(found):
        p = logits.softmax(-1).double().numpy()[real]
        top = np.argsort(-p, axis=-1)[:, :CHOSEN]
        assert np.asarray(report.counts[layer]).tolist() == np.bincount(top.reshape(-1), minlength=COUNT).tolist()
        np.testing.assert_allclose(report.mass[layer], p.sum(0), rtol=1e-5)
        np.testing.assert_allclose(report.entropy[layer], -(p * np.log(p)).sum(), rtol=1e-4)
        largest = np.take_along_axis(p, top, 1)
        if CONFIGS[name].norm_topk_prob:
            largest = largest / largest.sum(1, keepdims=True)
        np.testing.assert_allclose(report.top[layer], largest[:, 0].sum(), rtol=1e-5)
        taken = np.asarray(report.chosen[layer]).reshape(-1, CHOSEN)[real]
        assert np.array_equal(np.sort(taken, axis=-1), np.sort(top, axis=-1))
    assert np.asarray(report.tokens).tolist() == [int(real.sum())] * len(sparse)
    assert int(report.counts.sum()) == len(sparse) * int(real.sum()) * CHOSEN


def test_padding_goes_to_no_expert_and_changes_nothing(pair):
    _, _, policy, params = pair
    tokens, positions, segments = rows()
    other = tokens.at[:, -2:].set(7)
    first, second = (nll(policy, params, (x, positions, segments)) for x in (tokens, other))
    assert float(first[0]) == float(second[0])
    assert np.array_equal(first[1].counts, second[1].counts) and np.array_equal(first[1].mass, second[1].mass)


# -- replay ------------------------------------------------------------------------------------------------------------


def routes_of(report):
    """A report's choices as routes, [B, T, layers, k]."""
    return jnp.moveaxis(report.chosen, 0, 2)


def test_replayed_choices_of_the_same_weights_change_no_bit(pair):
    _, _, policy, params = pair
    run = jax.jit(jax.value_and_grad(lambda p, routes: nll(policy, p, rows(), routes), has_aux=True))
    none = jnp.full((ROWS, LENGTH, len(nll(policy, params, rows())[1].tokens), CHOSEN), 255, jnp.uint8)
    live, again = run(params, none), None
    again = run(params, routes_of(live[0][1]))
    assert np.asarray(live[0][1].recorded).sum() == 0
    assert np.asarray(again[0][1].recorded).tolist() == np.asarray(again[0][1].tokens).tolist()
    assert np.asarray(again[0][1].differs).sum() == 0
    np.testing.assert_array_equal(again[0][1].overlap, np.asarray(again[0][1].recorded, np.float32))
    assert float(live[0][0]) == float(again[0][0])
    for x, y in zip(jax.tree.leaves(live[1]), jax.tree.leaves(again[1]), strict=True):
        np.testing.assert_array_equal(x, y)


class Forced(torch.nn.Module):
    """transformers' router with the choice of experts given; the weights are its own."""

    def __init__(self, router, chosen, normalised):
        super().__init__()
        self.weight, self.chosen, self.normalised = router.weight, chosen, normalised

    def forward(self, x):
        logits = x.reshape(-1, x.shape[-1]) @ self.weight.T
        weights = logits.softmax(-1).gather(-1, self.chosen)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, self.chosen


def test_forced_experts_give_transformers_loss_and_gradients_with_the_same_experts(pair):
    name, _, policy, params = pair
    theirs = random_model(CONFIGS[name])
    sparse = SPARSE.get(name, list(range(4)))
    rng = np.random.default_rng(5)
    forced = np.stack(
        [[[rng.permutation(COUNT)[:CHOSEN] for _ in sparse] for _ in range(LENGTH)] for _ in range(ROWS)]
    ).astype(np.uint8)
    for number, layer in enumerate(sparse):
        mlp = theirs.model.layers[layer].mlp
        mlp.gate = Forced(
            mlp.gate, torch.tensor(forced[:, :, number].reshape(-1, CHOSEN)).long(), CONFIGS[name].norm_topk_prob
        )
    want = their_nll(theirs, rows())
    want.backward()
    run = jax.value_and_grad(lambda p: nll(policy, p, rows(), jnp.asarray(forced)), has_aux=True)
    (value, report), gradient = jax.jit(run)(params)
    np.testing.assert_allclose(float(value), want.item(), rtol=1e-5)
    assert_close(as_theirs(gradient), {n: p.grad.numpy() for n, p in theirs.named_parameters()}, 1e-4)
    live = np.moveaxis(
        np.asarray(nll(policy, params, rows())[1].chosen), 0, 2
    )  # of the first layer: later ones see other inputs
    same = np.array(
        [[len(set(a) & set(b)) for a, b in zip(x, y)] for x, y in zip(live[:, :, 0].tolist(), forced[:, :, 0].tolist())]
    )
    real = np.asarray(rows()[2]) == 1
    assert int(report.differs[0]) == int((same < CHOSEN)[real].sum()) > 0
    np.testing.assert_allclose(report.overlap[0], (same / CHOSEN)[real].sum(), rtol=1e-5)


def test_a_token_without_a_record_is_routed_live(pair):
    _, _, policy, params = pair
    live = nll(policy, params, rows())
    forced = (routes_of(live[1]) + 1) % COUNT  # other experts everywhere
    some = forced.at[:, 4:].set(255)
    hidden = policy.routed(params, *rows(), routes=some)[1]
    assert np.asarray(hidden.recorded).tolist() == [4 * ROWS] * len(live[1].tokens)
    first = np.asarray(routes_of(hidden))
    assert np.array_equal(first[:, :4], np.asarray(forced)[:, :4])
    assert not np.array_equal(first[:, 4:], np.asarray(forced)[:, 4:])
    # The first layer sees the same input whatever was forced.
    assert np.array_equal(first[:, 4:, 0], np.asarray(routes_of(live[1]))[:, 4:, 0])


# -- meshes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    slow_but(
        ({"fsdp": 2, "tensor": 2},),
        [{"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 1, "context": 2}, {"fsdp": 3}],
    ),
)
def test_a_mesh_changes_neither_loss_nor_gradients_nor_the_report(sizes, tmp_path):
    _, alone, params = loaded("every_second", tmp_path / "m")
    places, devices = tuple(jnp.tile(x, (4, 1))[:, :8] for x in rows()), int(np.prod(list(sizes.values())))
    mesh = Partitioner.create(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[:devices])
    policy = Policy(alone.architecture, mesh)
    spread = hf_weights.load(policy, tmp_path / "m")

    def run(policy, params):
        def objective(p):
            loss, report = nll(policy, p, places)
            return loss + jnp.sum(report.mass * jnp.arange(COUNT)), report

        return jax.jit(jax.value_and_grad(objective, has_aux=True))(params)

    (want, told), slope = run(alone, params)
    (got, report), gradient = run(policy, spread)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for field in ("counts", "tokens", "recorded", "differs", "chosen"):
        np.testing.assert_array_equal(getattr(report, field), getattr(told, field), err_msg=field)
    np.testing.assert_allclose(report.mass, told.mass, rtol=1e-5)
    for path, x in jax.tree_util.tree_leaves_with_path(slope):
        y = gradient
        for key in path:
            y = y[key.key]
        own = np.asarray(y)[tuple(map(slice, x.shape))]  # filled up with zeros where the devices do not divide it
        np.testing.assert_allclose(own, x, rtol=1e-4, atol=1e-4, err_msg=jax.tree_util.keystr(path))
        assert np.count_nonzero(y) == np.count_nonzero(own)
