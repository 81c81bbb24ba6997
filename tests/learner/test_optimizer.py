"""Learning rates in closed form, AdamW's steps by NumPy, and what is decayed."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.learner.optimizer import decays, state_shardings
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen2 import Qwen2
from jaxrl_llm.models.qwen3 import Qwen3
from jaxrl_llm.train import Optimizer

UPDATES, PEAK, FINAL = 20, 0.3, 0.1
DECAYED = {
    "constant": lambda x: PEAK,
    "linear": lambda x: PEAK * (1 - (1 - FINAL) * x),
    "cosine": lambda x: PEAK * (FINAL + (1 - FINAL) * (1 + math.cos(math.pi * x)) / 2),
}


@pytest.mark.parametrize("schedule", DECAYED)
@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("stable", [0.0, 0.4, 1.0])
def test_the_rate_rises_linearly_stays_and_then_decays(schedule, warmup, stable):
    stable = 0.0 if schedule == "constant" else stable
    config = Optimizer(learning_rate=PEAK, schedule=schedule, final_fraction=FINAL, warmup_steps=warmup, stable=stable)
    rate, end = config.rate(UPDATES), warmup + round(stable * (UPDATES - warmup))
    for step in range(UPDATES + (3 if stable < 1 else 0)):
        done = min(max(step - end, 0) / max(UPDATES - end, 1), 1.0)
        want = PEAK * (step + 1) / warmup if step < warmup else DECAYED[schedule](done)
        np.testing.assert_allclose(rate(jnp.int32(step)), want, rtol=1e-6)


def test_a_rate_of_zero_stays_zero_and_a_run_within_its_warm_up_never_decays():
    assert float(Optimizer(learning_rate=0.0, schedule="cosine").rate(5)(jnp.int32(2))) == 0.0
    short = Optimizer(learning_rate=1.0, schedule="linear", warmup_steps=10).rate(4)
    np.testing.assert_allclose([short(jnp.int32(s)) for s in range(4)], [0.1, 0.2, 0.3, 0.4], rtol=1e-6)
    with pytest.raises(ValueError, match=r"train.Optimizer.stable must be in \[0, 1\] \(got 1.5\)"):
        Optimizer(schedule="linear", stable=1.5)
    with pytest.raises(
        ValueError, match=r"stable must be 0 with the constant schedule, which never decays \(got 0.5\)"
    ):
        Optimizer(stable=0.5)


def test_three_steps_are_those_of_adamw():
    rng = np.random.default_rng(0)
    config = Optimizer(learning_rate=0.1, schedule="linear", b1=0.8, b2=0.9, epsilon=1e-3, weight_decay=0.5)
    transform = config.transform(10)
    want = {"kernel": rng.normal(size=(3, 2)), "norm": {"scale": rng.normal(size=2)}}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), want)
    state = transform.init(params)
    m, v = jax.tree.map(np.zeros_like, want), jax.tree.map(np.zeros_like, want)
    for t in range(1, 4):
        g = jax.tree.map(lambda x: rng.normal(size=x.shape), want)
        changes, state = transform.update(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), g), state, params)
        params = optax.apply_updates(params, changes)
        rate = 0.1 * (1 - (t - 1) / 10)
        m = jax.tree.map(lambda m, g: 0.8 * m + 0.2 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g**2, v, g)
        step = jax.tree.map(lambda m, v: m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3), m, v)  # noqa: B023
        want = {
            "kernel": want["kernel"] - rate * (step["kernel"] + 0.5 * want["kernel"]),
            "norm": {"scale": want["norm"]["scale"] - rate * step["norm"]["scale"]},  # never decayed
        }
        jax.tree.map(lambda got, x: np.testing.assert_allclose(got, x, rtol=1e-5, atol=1e-6), params, want)


def policy(kind=Qwen3, mesh=MeshConfig(fsdp=1), devices=1):  # noqa: B008
    sizes = {"vocabulary_size": 32, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_width": 8}
    return Policy(kind(**sizes, mlp_width=48), Partitioner.create(mesh, jax.devices()[:devices]))


@pytest.mark.parametrize("kind", [Qwen2, Qwen3])  # with biases, with norms of queries and keys
def test_matrices_are_decayed_and_norms_and_biases_are_not(kind):
    decayed = {
        jax.tree_util.keystr(p): d for p, d in jax.tree_util.tree_leaves_with_path(decays(policy(kind).abstract()))
    }
    matrices = {"['embedding']", "['head']", "['layers']['attention']['output']"}
    matrices |= {f"['layers']['attention']['{n}']['kernel']" for n in ("query", "key", "value")}
    matrices |= {f"['layers']['mlp']['{n}']" for n in ("gate", "up", "down")}
    assert {path for path, d in decayed.items() if d} == matrices
    others = 3 + (2 if kind is Qwen3 else 3)  # three norms, and two more norms or three biases
    assert len(decayed) == len(matrices) + others


def test_moments_lie_as_their_parameters_do_in_the_dtype_asked_for():
    split = policy(mesh=MeshConfig(fsdp=2, tensor=2), devices=4)
    transform = Optimizer(moments_dtype="bfloat16").transform(10)
    shardings = state_shardings(transform.init, split.abstract(), split.partitioner.replicated)
    want = jax.tree.map(lambda x: x.sharding, split.abstract())
    adam = shardings[0]
    assert adam.mu == want and adam.nu == want
    assert adam.count == dict.fromkeys(want, split.partitioner.replicated)
    state = jax.eval_shape(transform.init, split.abstract())[0]
    assert {x.dtype for x in jax.tree.leaves(state.mu)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(state.nu)} == {jnp.dtype("float32")}


def test_moments_of_16_bits_are_rounded_where_they_rest_and_summed_in_float32():
    fields = {"moments_dtype": "bfloat16", "second_moment_dtype": "bfloat16", "b1": 0.9, "b2": 0.95, "epsilon": 1e-8}
    transform = Optimizer(learning_rate=1.0, **fields).transform(10)
    rng = np.random.default_rng(0)
    params, m, v = {"w": jnp.zeros(50)}, np.zeros(50), np.zeros(50)
    state = transform.init(params)
    for step in range(1, 4):
        g = rng.normal(size=50).astype(np.float32)
        changes, state = transform.update({"w": jnp.asarray(g)}, state, params)
        m, v = 0.9 * m + 0.1 * np.float64(g), 0.95 * v + 0.05 * np.float64(g) ** 2
        want = -(m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
        np.testing.assert_allclose(changes["w"], want, rtol=1e-5, atol=1e-6)
        m, v = (np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16), np.float64) for x in (m, v))
        np.testing.assert_array_equal(np.asarray(state[0].nu["w"], np.float64), v)
        assert state[0].mu["w"].dtype == state[0].nu["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("field", ["learning_rate", "max_grad_norm", "warmup_steps"])
def test_a_negative_field_is_refused(field):
    with pytest.raises(ValueError, match=re.escape(f"train.Optimizer.{field} must be >= 0 (got -1)")):
        Optimizer(**{field: -1})


@pytest.mark.parametrize("stacks", [1, 2])
def test_late_layers_and_the_final_norm_learn_at_a_share_of_the_rate(stacks):
    # Four layers, stacked as one stack or as two that take turns: layers 2 and 3 are slow.
    rng = np.random.default_rng(0)
    parts = {"layers": [0, 1, 2, 3]} if stacks == 1 else {"layers": [0, 2], "layers_1": [1, 3]}
    shapes = {"embedding": (5, 3), "norm": (3,)} | {part: (len(own), 3, 2) for part, own in parts.items()}
    draw = lambda: {part: {"kernel": jnp.asarray(rng.normal(size=s), jnp.float32)} for part, s in shapes.items()}  # noqa: E731
    params, gradient = draw(), draw()
    fields = {"learning_rate": 0.1, "weight_decay": 0.5, "schedule": "linear"}
    plain = Optimizer(**fields).transform(10)
    slowed = Optimizer(**fields, slow_above=1, slow_factor=0.25).transform(10)
    want, _ = plain.update(gradient, plain.init(params), params)
    got, _ = slowed.update(gradient, slowed.init(params), params)
    factor = {part: np.where(np.array(own) > 1, 0.25, 1.0)[:, None, None] for part, own in parts.items()}
    for part in shapes:
        share = factor.get(part, 0.25 if part == "norm" else 1.0)
        np.testing.assert_allclose(got[part]["kernel"], share * want[part]["kernel"], rtol=1e-6)


def test_a_share_of_the_rate_for_layers_that_are_not_there_is_refused():
    params = {"layers": {"kernel": jnp.zeros((4, 3, 2))}, "norm": {"scale": jnp.zeros(3)}}
    with pytest.raises(ValueError, match="slow_above must be below 3, the last of the model's 4 layers"):
        Optimizer(slow_above=3).transform(10).init(params)
    with pytest.raises(ValueError, match=r"train.Optimizer.slow_above must be None with train.Optimizer.offload"):
        Optimizer(slow_above=1, offload=True)
