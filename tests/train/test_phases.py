"""A phase trains its parameters alone, bit for bit, and the schedules of BuPO and TokenBuncher are those of their papers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learner_cases import (
    GRPO_CASE,
    LEARNING_RATE,
    batches_of,
    fresh_state,
    leaves,
    make_batch,
    make_learner,
    padded,
)

from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.algorithms.token_noiser import TokenNoiser
from jaxrl_llm.learner.batch import bare, to_device
from jaxrl_llm.learner.optimizer import Optimizer, Trainable, keep
from jaxrl_llm.models.architecture import Capture
from jaxrl_llm.train.phases import BuPO, TokenBuncher

SCHEDULE = BuPO(layer=0, steps=30)
FIRST = SCHEDULE.phases[0]


def names(schedule, steps, controls=None):
    return [schedule.phase(step, controls or dict(schedule.controls)).name for step in steps]


# -- which parameters learn --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole():
    optimizer = Optimizer(learning_rate=LEARNING_RATE, weight_decay=0.1, max_grad_norm=1.0)
    return replace(make_learner(GRPO_CASE), optimizers={"policy": optimizer})


@pytest.fixture(scope="module")
def inner(whole):
    """The learner of the first phase: layer 0 of 2, without the final norm."""
    return replace(whole, capture=FIRST.view, trainable=FIRST.trainable)


def test_the_first_phase_changes_embedding_and_lower_layers_alone_and_counts_them_alone(whole, inner):
    state = fresh_state(inner)
    before = jax.tree.map(np.array, state.policy)
    for _ in range(2):
        state, metrics = inner.update(state, batches_of(inner, make_batch()))
    assert float(metrics["grad_norm/policy"]) > 0
    after = jax.tree.map(np.array, state.policy)
    adam = optax.tree_utils.tree_get(state.moments["policy"], "ScaleByAdamState")
    assert jax.tree.map(lambda n: np.asarray(n).tolist(), adam.count) == {"embedding": 2, "layers": [2, 0], "norm": 0}
    assert (before["embedding"] != after["embedding"]).any()
    np.testing.assert_array_equal(before["norm"]["scale"], after["norm"]["scale"])
    moments = zip(leaves(adam.mu["layers"]).values(), leaves(adam.nu["layers"]).values())
    for old, new in zip(leaves(before["layers"]).values(), leaves(after["layers"]).values()):
        mu, nu = next(moments)
        assert (old[0] != new[0]).any() and mu[0].any() and nu[0].any()
        np.testing.assert_array_equal(old[1], new[1])
        assert not mu[1].any() and not nu[1].any()
    # At the switch, what was frozen takes the first step of a fresh optimizer: its bias correction starts at 1.
    batches = batches_of(whole, make_batch())
    fresh = whole.init(
        {"policy": jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), after, whole.policy.abstract())}
    )
    (went_on, _), (began, _) = whole.update(state, batches), whole.update(fresh, batches)
    for on, new in zip(leaves(went_on.policy["layers"]).values(), leaves(began.policy["layers"]).values()):
        np.testing.assert_array_equal(on[1], new[1])
        assert (on[0] != new[0]).any()
    count = optax.tree_utils.tree_get(went_on.moments["policy"], "ScaleByAdamState").count
    assert jax.tree.map(lambda n: np.asarray(n).tolist(), count) == {"embedding": 3, "layers": [3, 1], "norm": 1}


def test_the_first_phase_has_the_loss_of_a_model_of_its_layers(inner):
    """Layer 0 without the final norm: embedding, one layer written out in NumPy's way, and the embedding again."""
    from learner_cases import MODEL, TEMPERATURE, host_params, norm, rotated

    params, data = jax.tree.map(lambda x: jnp.asarray(x), host_params()), padded()
    layer = jax.tree.map(lambda x: x[0], params["layers"])

    def logits(tokens):
        x = params["embedding"][tokens]
        at, h = layer["attention"], norm(x, layer["attention_norm"]["scale"])
        q, k, v = (jnp.einsum("td,dhc->thc", h, at[n]["kernel"]) for n in ("query", "key", "value"))
        q, k = rotated(norm(q, at["query_norm"]["scale"])), rotated(norm(k, at["key_norm"]["scale"]))
        k, v = (jnp.repeat(z, MODEL.heads // MODEL.kv_heads, axis=1) for z in (k, v))
        causal = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        scores = jnp.where(causal, jnp.einsum("thc,shc->hts", q, k) / np.sqrt(MODEL.head_width), -jnp.inf)
        x = x + jnp.einsum("hts,shc,hcd->td", jax.nn.softmax(scores, axis=-1), v, at["output"])
        h = norm(x, layer["mlp_norm"]["scale"])
        x = x + (jax.nn.silu(h @ layer["mlp"]["gate"]) * (h @ layer["mlp"]["up"])) @ layer["mlp"]["down"]
        return x @ params["embedding"].T / TEMPERATURE

    logp = np.asarray(jax.nn.log_softmax(jax.vmap(logits)(jnp.asarray(data["tokens"]))))
    place = data["place"]
    chosen = np.take_along_axis(data["tokens"], place, axis=1)
    want = np.take_along_axis(np.take_along_axis(logp, place[:, :, None] - 1, axis=1), chosen[:, :, None], axis=2)[
        ..., 0
    ]
    batch, state = make_batch(), fresh_state(inner)
    scored = [inner.score(state.params, to_device(bare(r), inner.partitioner))["policy"] for r in batch.rows]
    got = batch.unpack([np.asarray(x["logprob"]) for x in scored])[: len(want)]
    np.testing.assert_allclose(got, np.where(data["there"], want, 0), rtol=1e-4, atol=1e-4)


def test_frozen_parts_are_kept_in_any_state_that_lies_by_parts():
    learns = Trainable(layers=1, frozen=("head",)).mask({"embedding": 0, "layers": 0, "head": 0}, 3)
    new = {"embedding": jnp.ones(2), "layers": {"w": jnp.ones((3, 2))}, "head": jnp.ones(2)}
    old = jax.tree.map(jnp.zeros_like, new)
    got, count = keep((new, jnp.int32(5)), (old, jnp.int32(4)), learns)
    assert got["layers"]["w"].tolist() == [[1, 1], [0, 0], [0, 0]]
    assert got["embedding"].tolist() == [1, 1] and got["head"].tolist() == [0, 0] and int(count) == 5
    nothing = {part: jnp.asarray(False) for part in learns}
    kept, count = keep((new, jnp.int32(5)), (old, jnp.int32(4)), nothing)
    assert not any(x.any() for x in jax.tree.leaves(kept)) and int(count) == 4


@pytest.mark.parametrize("fields", [{"frozen": ("layers",)}, {"layers": -1}])
def test_what_cannot_be_frozen_is_refused(fields):
    with pytest.raises(ValueError, match="Trainable"):
        Trainable(**fields)


# -- BuPO's schedule ---------------------------------------------------------------------------------------------------


def test_bupo_takes_the_layer_for_exactly_its_steps_wherever_the_run_resumes():
    assert names(SCHEDULE, range(1, 61)) == ["layer"] * 30 + ["whole"] * 30
    assert FIRST.view == Capture(layer=0, site="layer_out", final_norm=False)
    assert FIRST.trainable == Trainable(layers=1, frozen=("norm",))
    assert BuPO(layer=4, final_norm=True).phases[0].trainable == Trainable(layers=5)


def test_a_guard_ends_the_first_phase_for_good():
    schedule = BuPO(layer=0, steps=10, max_reward_drop=0.2, max_kl=0.5)
    assert schedule.needs == {"reference"}
    controls, seen = dict(schedule.controls), []
    for step, reward in enumerate((0.3, 0.5, 0.35, 0.29, 0.9), 1):
        seen.append(schedule.phase(step, controls).name)
        controls = dict(schedule.adapt(step, controls, {"reward/mean": reward, "drift/kl": 0.1}))
    assert seen == ["layer", "layer", "layer", "layer", "whole"]  # 0.29 is 0.21 below 0.5
    drifted = schedule.adapt(1, schedule.controls, {"reward/mean": 0.3, "drift/kl": 0.6})
    assert names(schedule, [2], drifted) == ["whole"]


@pytest.mark.parametrize("layer", [-1, 3, 4])
def test_a_layer_that_is_the_last_or_not_there_is_refused(layer):
    with pytest.raises(ValueError, match=rf"train.BuPO.layer must be in 0..2.*got {layer}.*BUPO_LAYER"):
        BuPO(layer=layer).check(4)


@pytest.mark.parametrize("field", [{"steps": -1}, {"max_kl": 0.0}, {"max_reward_drop": -0.1}])
def test_limits_that_make_no_sense_are_refused(field):
    with pytest.raises(ValueError, match=f"train.BuPO.{next(iter(field))}"):
        BuPO(layer=1, **field)


# -- TokenBuncher's schedule -------------------------------------------------------------------------------------------


def test_noiser_steps_follow_the_warm_up_at_every_other_step_of_the_stage():
    schedule = TokenBuncher(noiser=TokenNoiser(base=GRPO()), warmup_steps=25)
    noisy = [number for number, name in enumerate(names(schedule, range(1, 41))) if name == "noiser"]
    assert noisy == [26, 28, 30, 32, 34, 36, 38]
    assert names(schedule, range(1, 201)).count("noiser") == 87
    with pytest.raises(ValueError, match="period must be >= 1"):
        TokenBuncher(noiser=TokenNoiser(base=GRPO()), period=0)
