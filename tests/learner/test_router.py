"""Routers in an update: the loss that balances loads is transformers', splits change nothing, and what is replayed is used."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from learner_cases import (
    GRPO_CASE,
    PACKING,
    PROMPT,
    RESPONSE,
    batches_of,
    first_gradient,
    leaves,
    make_batch,
    make_learner,
    split,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from jaxrl_llm.distributed.mesh import MeshConfig
from jaxrl_llm.learner import score
from jaxrl_llm.learner.batch import bare, to_device
from jaxrl_llm.learner.optimizer import Optimizer, Trainable, decays
from jaxrl_llm.learner.router import Router, balance, metrics
from jaxrl_llm.models.architecture import Experts
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen3_moe import Qwen3MoE

pytestmark = pytest.mark.slow  # its programs take long to compile

COUNT, CHOSEN, LAYERS = 6, 2, 2
MODEL = Qwen3MoE(
    vocabulary_size=32, width=32, layers=LAYERS, heads=4, kv_heads=2, head_width=8, mlp_width=48, tied=True, init_std=0.2,
    experts=Experts(count=COUNT, chosen=CHOSEN, width=16, normalised=True),
)  # fmt: skip
ALTERNATING = replace(MODEL, layers=4, experts=replace(MODEL.experts, layers=(False, True)))
HALVES = [list(range(0, 16, 2)), list(range(1, 16, 2))]


@cache
def learner_of(algorithm=GRPO_CASE, mesh=None, devices=1, optimizer=None, trainable=None, model=MODEL, **router):
    """The learner of these settings, one for all tests, whose programs are traced and compiled once."""
    base = make_learner(algorithm, mesh or MeshConfig(), devices)
    policy = Policy(model, base.partitioner)
    optimizers = base.optimizers if optimizer is None else {"policy": optimizer}
    return replace(base, models={"policy": policy}, optimizers=optimizers, trainable=trainable, router=Router(**router))


@cache
def created(model):
    """Parameters on the host, which are made once for all meshes."""
    return jax.tree.map(np.asarray, Policy(model, make_learner(GRPO_CASE).partitioner).init(jax.random.key(3)))


def state_of(learner):
    place = lambda x, like: jax.device_put(x.copy(), like.sharding)  # noqa: E731
    return learner.init(
        {"policy": jax.tree.map(place, created(learner.policy.architecture), learner.policy.abstract())}
    )


def stepped(learner, batch):
    """The state after an update, and its metrics."""
    state, metrics = learner.update(state_of(learner), batches_of(learner, batch))
    return state, {name: float(x) for name, x in metrics.items()}


def updated(learner, batch):
    state, metrics = stepped(learner, batch)
    return leaves(state.policy), metrics


@cache
def whole_step(**router):
    """The update of the step in one micro-batch, on one device."""
    return stepped(learner_of(**router), make_batch())


def whole_update(**router):
    state, metrics = whole_step(**router)
    return leaves(state.policy), metrics


def test_the_balancing_loss_and_its_gradient_are_those_of_transformers():
    """On two rows of which one is shorter, with the router's logits as transformers takes them."""
    rng = np.random.default_rng(0)
    inputs, weights = rng.normal(size=(3, 2, 7, 5)), rng.normal(size=(3, 5, COUNT))
    mask = np.array([[1] * 7, [1] * 4 + [0] * 3])
    w = torch.tensor(weights, dtype=torch.float32, requires_grad=True)
    logits = tuple(torch.tensor(x, dtype=torch.float32).reshape(-1, 5) @ w[i] for i, x in enumerate(inputs))
    want = load_balancing_loss_func(logits, COUNT, CHOSEN, torch.tensor(mask))
    want.backward()
    loads, tokens = np.zeros((3, COUNT), np.int32), jnp.float32(mask.sum())
    for layer, x in enumerate(logits):
        for row, counted in zip(x.detach().numpy(), mask.reshape(-1)):
            loads[layer, np.argsort(-row)[:CHOSEN]] += counted

    def ours(w, part):
        p = jax.nn.softmax(jnp.einsum("lbtd,lde->lbte", jnp.asarray(inputs, jnp.float32), w, precision="highest"))
        return balance(
            jnp.einsum("lbte,bt->le", p, jnp.asarray(mask * part, jnp.float32)), jnp.asarray(loads), tokens, "pooled"
        )

    w32 = jnp.asarray(weights, jnp.float32)
    np.testing.assert_allclose(ours(w32, 1), want.item(), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(ours)(w32, 1), w.grad.numpy(), rtol=1e-5, atol=1e-7)
    first = np.array([[1], [0]])
    halves = [jax.grad(ours)(w32, part) for part in (first, 1 - first)]
    np.testing.assert_allclose(halves[0] + halves[1], w.grad.numpy(), rtol=1e-5, atol=1e-7)


def test_a_balanced_load_costs_as_much_as_experts_are_chosen_and_layers_are_averaged():
    even = jnp.full((2, COUNT), 10.0)
    for over in ("pooled", "per_layer"):
        assert float(balance(even / CHOSEN, even, jnp.float32(10 * COUNT / CHOSEN), over)) == pytest.approx(CHOSEN)
    skewed = jnp.asarray([[30.0, 30, 0, 0, 0, 0], [0, 0, 0, 0, 30, 30]])  # each layer has its own two experts
    pooled, alone = (float(balance(skewed / CHOSEN, skewed, jnp.float32(30), over)) for over in ("pooled", "per_layer"))
    assert alone == pytest.approx(COUNT * 2 * 1 * 0.5) and pooled == pytest.approx(alone / 2)


@pytest.mark.parametrize("over", ["pooled", "per_layer"])
def test_an_update_with_balance_does_not_depend_on_micro_batches_or_packing(over):
    learner = learner_of(balance=0.5, balance_over=over)
    halves, told = updated(learner, split(HALVES))
    quarters, again = updated(learner, split([list(range(i, 16, 4))[::-1] for i in range(4)]))
    # One micro-batch is a program of its own, which sums nothing: that of one way to take the loads is enough.
    whole, third = whole_update(balance=0.5, balance_over=over) if over == "pooled" else (halves, told)
    for other in (quarters, whole):
        for path, x in halves.items():
            np.testing.assert_allclose(other[path], x, rtol=1e-4, atol=2e-6, err_msg=path)
    for name in (
        "router/loss",
        "router/load_max",
        "router/entropy",
        "router/unused",
        "router/weight_top1",
        "loss/total",
    ):
        assert again[name] == pytest.approx(told[name], rel=1e-5) == third[name]
    assert told["router/loss"] > CHOSEN


def test_balance_acts_on_routers_alone_among_the_weights_of_the_last_experts():
    """The last layer's experts feel only the loss of the tokens; its router feels both."""
    steps = whole_step(), whole_step(balance=0.5, balance_over="pooled")
    off, on = (first_gradient(state)["layers"]["mlp"] for state, _ in steps)
    assert np.array_equal(off["down"][-1], on["down"][-1])
    assert np.abs(off["router"][-1] - on["router"][-1]).max() > 1e-3


def test_metrics_of_known_counts():
    counts = np.array([[4, 4, 4, 0], [3, 3, 3, 3]], np.int32)
    total = {
        "counts": jnp.asarray(counts), "tokens": jnp.asarray([6, 6]), "entropy": jnp.asarray([6.0, 12.0]),
        "top": jnp.asarray([3.0, 4.5]), "recorded": jnp.asarray([4, 4]), "differs": jnp.asarray([1, 3]),
        "overlap": jnp.asarray([3.5, 2.5]),
    }  # fmt: skip
    found = {name: float(x) for name, x in metrics(total, True).items()}
    want = {
        "router/load_max": (1 / 3 + 0) / 2, "router/load_max_worst": 1 / 3, "router/load_min": -0.5, "router/load_min_worst": -1,
        "router/unused": 1 / 8, "router/unused_worst": 1 / 4, "router/entropy": 1.5, "router/weight_top1": 0.625,
        "router/load_entropy": (np.log(3) + np.log(4)) / 2, "router/differs": 0.5, "router/differs_worst": 0.75,
        "router/overlap": 0.75, "router/recorded": 2 / 3,
    }  # fmt: skip
    assert found == pytest.approx(want, rel=1e-5, abs=1e-6)
    assert not {"router/differs", "router/overlap"} & metrics(total, False).keys()


# -- replay ------------------------------------------------------------------------------------------------------------


def scored(learner, params, batch):
    return score.with_routes(batch, score.token_stats(learner, {"policy": params}, batch, {}))


def test_scoring_records_the_experts_of_each_token_and_packing_puts_them_back():
    learner = learner_of(replay="R2")
    state = state_of(learner)
    batch, stats = scored(learner, state.policy, make_batch())
    assert "routes" not in stats and stats["old_logprobs"].shape == (18, RESPONSE)
    lengths = [len(r.prompt.tokens) + len(r.tokens) - 1 for r in batch.rollouts]
    assert [x.shape for x in batch.routes] == [(n, LAYERS, CHOSEN) for n in lengths]
    routed = jax.jit(learner.policy.routed)
    for number in (0, 5, 15):
        one, n = batch.rollouts[number], lengths[number]
        tokens = np.zeros((1, max(lengths)), np.int32)
        tokens[0, :n] = np.concatenate([one.prompt.tokens, one.tokens])[:-1]
        places = np.arange(max(lengths))[None]
        report = routed(state.policy, tokens, places, (places < n).astype(np.int32))[1]
        assert np.array_equal(np.moveaxis(np.asarray(report.chosen), 0, 2)[0, :n], batch.routes[number])
    for rows in (*batch.rows, *split(HALVES).rows):
        packed = rows.scatter_routes(batch.routes)
        assert np.all(packed[rows.segments == 0] == 255) and np.all(packed[rows.segments > 0] < COUNT)
        back = [None] * len(lengths)
        rows.gather_routes(packed, back)
        assert all(x is None or np.array_equal(x, y) for x, y in zip(back, batch.routes))


def test_replay_of_what_scoring_recorded_changes_no_bit_of_the_first_update_whatever_the_packing():
    on = learner_of(replay="R2")
    batch, _ = scored(on, state_of(on).policy, make_batch())
    plain, _ = whole_update()
    replayed, told = updated(on, batch)
    assert all(np.array_equal(replayed[path], x) for path, x in plain.items())
    assert told["router/differs"] == 0 and told["router/overlap"] == 1 and told["router/recorded"] == 1
    elsewhere, again = updated(on, replace(split([list(range(16))[::-1]]), routes=batch.routes))
    for path, x in plain.items():
        np.testing.assert_allclose(elsewhere[path], x, rtol=1e-4, atol=2e-6, err_msg=path)
    assert again["router/differs"] == 0


def test_a_sampler_s_record_is_compared_where_nothing_is_replayed_and_taken_where_it_is():
    rng = np.random.default_rng(8)
    length = lambda r: len(r.prompt.tokens) + len(r.tokens) - 1  # noqa: E731

    def forced(r):
        return np.stack([[rng.permutation(COUNT)[:CHOSEN] for _ in range(LAYERS)] for _ in range(length(r))]).astype(
            np.uint8
        )

    batch = make_batch()
    groups = [replace(g, rollouts=[replace(r, routes=forced(r)) for r in g.rollouts]) for g in batch.groups]
    recorded = replace(batch, groups=groups)
    (plain, _), (compared, told) = whole_update(), updated(learner_of(), recorded)
    assert all(np.array_equal(compared[path], x) for path, x in plain.items())
    assert told["router/differs"] > 0.5 and told["router/overlap"] < 0.6
    replaying = learner_of(replay="R3")
    changed, told = updated(replaying, recorded)
    assert any(not np.array_equal(changed[path], x) for path, x in plain.items())
    _, stats = scored(replaying, state_of(replaying).policy, recorded)
    _, live = scored(learner_of(replay="R2"), state_of(replaying).policy, batch)
    assert np.abs(stats["old_logprobs"] - live["old_logprobs"]).max() > 1e-2
    rows = to_device(bare(recorded.rows[0], recorded.recorded), replaying.partitioner)
    frozen = batch.unpack([np.asarray(replaying.score_frozen(state_of(replaying).policy, rows))])
    np.testing.assert_allclose(frozen, live["old_logprobs"], atol=1e-6)  # a reference chooses its own


# -- state -------------------------------------------------------------------------------------------------------------


def test_routers_keep_float32_moments_and_decay_as_matrices():
    optimizer = Optimizer(moments_dtype="bfloat16", second_moment_dtype="bfloat16", weight_decay=0.1)
    learner = learner_of(optimizer=optimizer)
    moments = learner.init({"policy": learner.policy.init(jax.random.key(0))}).moments["policy"][0]
    for tree in (moments.mu, moments.nu):
        found = {path: str(x.dtype) for path, x in leaves(tree).items()}
        assert found.pop("['layers']['mlp']['router']") == "float32" and set(found.values()) == {"bfloat16"}
    decayed = {
        jax.tree_util.keystr(p) for p, x in jax.tree_util.tree_leaves_with_path(decays(learner.policy.abstract())) if x
    }
    assert {f"['layers']['mlp']['{n}']" for n in ("router", "gate_up", "down")} <= decayed


def test_the_first_layers_alone_learn_where_kinds_of_layers_take_turns():
    learner = learner_of(model=ALTERNATING, trainable=Trainable(layers=3, frozen=("embedding", "norm")))
    before = leaves(created(ALTERNATING))
    state, _ = learner.update(state_of(learner), batches_of(learner, make_batch()))
    changed = {
        path: [bool(np.any(x[i] != before[path][i])) for i in range(2)]
        for path, x in leaves(state.policy).items()
        if "layers" in path
    }
    assert all(both == [True, "layers_0" in path] for path, both in changed.items() if "query']" not in path)
    assert [x.tolist() for x in state.moments["policy"][0].count.values()] == [0, [1, 1], [1, 0], 0]


@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 2}, {"fsdp": 2, "expert": 2}])
def test_an_update_on_a_mesh_is_the_update_on_one_device(mesh):
    router = {"balance": 0.5, "balance_over": "pooled"}
    alone, _ = whole_update(**router)
    spread, told = updated(learner_of(mesh=MeshConfig(**mesh), devices=4, **router), make_batch())
    for path, x in alone.items():
        np.testing.assert_allclose(spread[path], x, rtol=1e-4, atol=2e-6, err_msg=path)
    assert PACKING.rows % 4 == 0 and PROMPT and told["router/unused"] <= 1
