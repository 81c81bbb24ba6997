"""Weights in bfloat16 learn what float32 weights learn: on the average exactly, or bit for bit; gradients in bfloat16 are rounded once."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from learner_cases import (
    GRPO_CASE,
    assert_gradients_agree,
    batches_of,
    fresh_state,
    leaves,
    make_batch,
    make_learner,
    split,
)

from jaxrl_llm.distributed.mesh import MeshConfig
from jaxrl_llm.learner.bfloat16_weights import (
    Beside,
    Compensated,
    Stochastic,
    divided,
    random_bits,
    randomly_rounded,
    whole,
)
from jaxrl_llm.learner.optimizer import Optimizer, Rule, rested
from jaxrl_llm.models.architecture import Capture
from jaxrl_llm.models.linear import looked_up
from jaxrl_llm.models.lora import AdaptedPolicy, LoRA
from jaxrl_llm.train.checkpoint import Checkpointing, Checkpoints, read_model

pytestmark = pytest.mark.slow  # its programs take long to compile

KINDS = ("stochastic", "compensated")
ULP = 2.0**-7  # of a bfloat16 in [1, 2)


def narrow(weights, mesh=MeshConfig(), devices=1, compute="bfloat16", **fields):  # noqa: B008
    learner = make_learner(GRPO_CASE, mesh, devices)
    optimizer = replace(learner.optimizers["policy"], weights=weights, **fields)
    policy = replace(learner.policy, compute_dtype=compute)
    return replace(learner, models={"policy": policy}, optimizers={"policy": optimizer})


def bits_of(x):
    return np.asarray(x).reshape(-1).view(np.dtype(f"u{np.asarray(x).dtype.itemsize}"))


def assert_same_bits(got, want):
    got, want = leaves(got), leaves(want)
    assert got.keys() == want.keys()
    for path, x in want.items():
        assert got[path].dtype == x.dtype, path
        np.testing.assert_array_equal(bits_of(got[path]), bits_of(x), err_msg=path)


def floats(count=2000):
    """Finite float32 of all magnitudes and both signs, subnormal ones among them."""
    bits = np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint32)
    found = bits.view(np.float32)
    found = found[np.isfinite(found) & (np.abs(found) < 3e38)]
    return np.concatenate([found, np.float32([0.0, -0.0, 1.0, -1.0, 1e-40, 1.0 + ULP / 2, 255.99])])


# -- rounding ----------------------------------------------------------------------------------------------------------


def test_the_mean_of_random_rounding_over_all_bits_is_the_number_itself_in_float64():
    bits = jnp.arange(2**16, dtype=jnp.uint16)
    every = jax.jit(lambda x: randomly_rounded(jnp.full(2**16, x), bits))
    for x in floats()[:: len(floats()) // 60]:
        found = np.asarray(every(x)).astype(np.float64)
        assert found.mean() == np.float64(x)  # sums of 2^16 bfloat16 are exact in float64
        assert len(set(found)) <= 2


def test_random_bits_are_even_and_independent_of_their_neighbours_and_of_other_keys():
    shape, keys = (8, 256, 512), [jax.random.key(0), jax.random.key(1)]
    one, other = (np.asarray(random_bits(key, shape)).astype(np.int64) for key in keys)
    count = one.size
    signs = np.float32(2 * ((one.reshape(-1, 1) >> np.arange(16)) & 1) - 1)
    assert np.abs(signs.mean(axis=0)).max() < 5 / np.sqrt(count)  # five deviations, as below
    assert np.abs(signs.T @ signs / count - np.eye(16)).max() < 5 / np.sqrt(count)
    seen = np.bincount(one.ravel() >> 4, minlength=4096)
    expected = count / 4096
    assert abs(np.sum((seen - expected) ** 2 / expected) - 4095) < 5 * np.sqrt(2 * 4095)  # chi-squared
    even = lambda x: (x - 32767.5) / (65536 / np.sqrt(12))  # noqa: E731
    pairs = [(one, other), (one[1:], one[:-1]), (one[:, 1:], one[:, :-1]), (one[..., 1:], one[..., :-1])]
    pairs += [(one[..., 64:], one[..., :-64]), (one[:, 1:, 1:], one[:, :-1, :-1])]
    for a, b in pairs:
        assert abs(np.mean(even(a) * even(b))) < 5 / np.sqrt(a.size)


def test_changes_below_a_bfloat16_add_up_on_the_average_where_rounding_to_the_nearest_loses_them():
    updates, number, change = 64, 4096, 2.0**-12
    rule = Stochastic(transform=Optimizer(learning_rate=1.0).transform(updates), name="m", seed=3)
    w, count = jnp.ones(number, jnp.bfloat16), jnp.int32(0)
    step = jax.jit(lambda w, n: rule_step(rule, w, n, change))
    for _ in range(updates):
        w, count = step(w, count)
    assert int(count) == updates and jnp.bfloat16(1.0) + jnp.bfloat16(change) == 1
    # Each update adds ULP with the probability change / ULP and 0 otherwise: the variance of a sum of `updates` of them.
    share = change / ULP
    deviation = np.sqrt(updates * share * (1 - share) / number) * ULP
    assert abs(np.asarray(w, np.float64).mean() - (1 + updates * change)) < 5 * deviation


def rule_step(rule, w, count, change):
    """An update of one leaf by `change`, with an optimizer that makes it so."""
    params, state = {"w": w}, rule.init({"w": w})._replace(rest=count)
    fixed = replace(rule, transform=fixed_change(change))
    params, state = fixed.updated(params, {"w": jnp.zeros(w.shape)}, state)
    return params["w"], state.rest


def fixed_change(change):
    moved = lambda gradient, state, params=None: (jax.tree.map(lambda g: g + change, gradient), state)  # noqa: E731
    return optax.GradientTransformation(lambda params: (), moved)


def test_a_number_is_the_nearest_bfloat16_and_a_rest_that_makes_it_whole():
    x = floats()
    high, rest = jax.jit(divided)(x)
    assert high.dtype == jnp.bfloat16 and rest.dtype == jnp.int16
    np.testing.assert_array_equal(bits_of(jax.jit(whole)(high, rest)), bits_of(x))
    nearest = x.astype(ml_dtypes.bfloat16)
    ties = (x.view(np.uint32) & 0xFFFF) == 0x8000  # two are nearest
    np.testing.assert_array_equal(bits_of(high)[~ties], bits_of(nearest)[~ties])
    far = np.abs(np.asarray(high, np.float64) - x)
    np.testing.assert_array_equal(far[ties], np.abs(nearest.astype(np.float64) - x)[ties])


# -- updates -----------------------------------------------------------------------------------------------------------


def gradients(params, count=4):
    rng = np.random.default_rng(5)
    return [jax.tree.map(lambda x: rng.normal(0, 1e-2, x.shape).astype(np.float32), params) for _ in range(count)]


def test_compensated_weights_and_their_rests_are_float32_weights_under_the_same_gradients():
    learner = make_learner(GRPO_CASE)
    params = fresh_state(learner).policy
    transform = Optimizer(learning_rate=1e-4, weight_decay=0.1).transform(10)
    rules = [kind(transform=transform, name="policy", seed=0) for kind in (Rule, Compensated)]
    (exact, state), (high, kept) = (rule.begun(params, rule.init(params)) for rule in rules)
    for gradient in gradients(params):
        exact, state = jax.jit(rules[0].updated)(exact, gradient, state)
        high, kept = jax.jit(rules[1].updated)(high, gradient, kept)
        assert_same_bits(kept.optimizer, state)
    joined = jax.tree.map(lambda x, rest: whole(x, rest) if x.dtype == jnp.bfloat16 else x, high, kept.rest)
    assert_same_bits(joined, exact)
    assert high["norm"]["scale"].dtype == jnp.float32 and high["embedding"].dtype == jnp.bfloat16
    changed = leaves(jax.tree.map(lambda old, new: jnp.any(old != new), params, exact))
    assert all(changed.values())


def test_a_run_of_compensated_weights_is_that_of_float32_weights_in_a_model_that_computes_in_bfloat16():
    found = {}
    for weights in ("float32", "compensated"):
        learner = narrow(weights, gradients_dtype="float32")
        state, batches = fresh_state(learner), batches_of(learner, make_batch())
        for _ in range(3):
            state, metrics = learner.update(state, batches)
        found[weights] = state, metrics
    (exact, told), (state, same) = found.values()
    rest = state.moments["policy"].rest
    joined = jax.tree.map(lambda x, r: whole(x, r) if x.dtype == jnp.bfloat16 else x, state.policy, rest)
    for path, x in leaves(exact.policy).items():  # programs differ, and so does the order of their sums
        np.testing.assert_allclose(leaves(joined)[path], x, rtol=0, atol=2e-5, err_msg=path)
    np.testing.assert_allclose(same["loss/total"], told["loss/total"], rtol=1e-4)


@pytest.mark.parametrize("weights", KINDS)
def test_rounding_is_the_same_bit_for_bit_on_1_2_and_4_devices(weights):
    """Of plain gradient descent, whose one difference has the same float32 on any mesh, as Adam's products need not have."""
    found = []
    for devices in (1, 2, 4):
        learner = narrow(weights, MeshConfig(fsdp=devices), devices)
        rule = replace(learner.rules["policy"], transform=optax.scale(-1.0))
        params = fresh_state(learner).policy
        rest = (
            jax.tree.map(lambda x: jnp.zeros_like(x, jnp.int16), params) if weights == "compensated" else jnp.int32(0)
        )
        state, update = Beside((), rest), jax.jit(rule.updated)
        for gradient in gradients(params):
            params, state = update(params, gradient, state)
        assert devices == 1 or not params["embedding"].sharding.is_fully_replicated
        found.append((params, state.rest))
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])


@pytest.mark.parametrize("weights", KINDS)
def test_learning_on_several_devices_is_that_on_one(weights):
    found = []
    for devices in (1, 4):
        learner = narrow(weights, MeshConfig(fsdp=devices), devices, compute="float32")
        state, batches = fresh_state(learner), batches_of(learner, make_batch())
        state, metrics = learner.update(state, batches)
        found.append((leaves(state.policy), metrics))
        for x, like in zip(jax.tree.leaves(state), jax.tree.leaves(learner.abstract), strict=True):
            assert (x.shape, x.dtype, x.sharding) == (like.shape, like.dtype, like.sharding)
    (one, told), (four, same) = found
    np.testing.assert_allclose(same["loss/total"], told["loss/total"], rtol=1e-5)
    for path, x in one.items():  # a sum in another order may fall to the other side of one rounding
        ulp = np.spacing(np.abs(x)) if x.dtype == np.float32 else np.abs(x.astype(np.float32)) * ULP + 2.0**-20
        off = np.abs(four[path].astype(np.float64) - x.astype(np.float64))
        assert (off <= 4 * ulp + 1e-5 * (x.dtype == np.float32)).all(), path
        assert (off > 0).mean() < 0.02 or x.dtype == np.float32, path


@pytest.mark.parametrize("weights", KINDS)
def test_a_resumed_run_goes_on_bit_for_bit(weights, tmp_path):
    learner = narrow(weights)
    state, batches = fresh_state(learner), batches_of(learner, make_batch())
    state, _ = learner.update(state, batches)
    checkpoints = Checkpoints(tmp_path, Checkpointing())
    checkpoints.save(1, {"state": state}, {"step": 1})
    checkpoints.wait()
    unbroken, _ = learner.update(state, batches)
    other = narrow(weights)
    restored = checkpoints.restore(1, {"state": other.abstract})["state"]
    checkpoints.close()
    alone = read_model(tmp_path / "checkpoints", 1, other.policy.abstract())  # as tools read it, in float32
    assert_same_bits(alone, jax.tree.map(lambda x: x.astype(jnp.float32), restored.policy))
    resumed, _ = other.update(restored, batches_of(other, make_batch()))
    assert_same_bits(resumed, unbroken)


@pytest.mark.parametrize("weights", KINDS)
def test_moments_and_rests_on_the_host_learn_as_those_on_the_device_do(weights, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.learner.offload.GROUP", 12_000)  # bytes: several groups of the tiny model
    found = []
    for away in (False, True):
        learner = narrow(weights, offload=away, compute="float32")
        state, batches = fresh_state(learner), batches_of(learner, make_batch())
        state, _ = learner.update(state, batches)
        found.append(state)
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.moments)}
        assert kinds == {"pinned_host" if away else "device"}
    here, there = (leaves((state.policy, state.moments["policy"].rest)) for state in found)
    for path, x in here.items():
        differs = (there[path] != x).mean() if x.size else 0.0
        assert differs < 0.02 or x.dtype in (np.float32, np.int16), path


def test_a_gradient_that_is_not_finite_changes_no_bit_and_draws_nothing():
    for weights in KINDS:
        learner = narrow(weights)
        state, (batch,) = fresh_state(learner), batches_of(learner, make_batch())
        before = leaves(jax.tree.map(np.array, (state.params, state.moments)))
        state, metrics = learner.update(state, [batch.replace(advantages=batch.advantages * np.float32("inf"))])
        assert float(metrics["update/skipped"]) == 1
        assert_same_bits(
            (state.params, state.moments),
            jax.tree.unflatten(jax.tree.structure((state.params, state.moments)), list(before.values())),
        )


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_gradients_of_micro_batches_are_rounded_once_and_summed_in_float32():
    halves = [list(range(8)), list(range(8, 16))]
    learner = narrow("float32", gradients_dtype="bfloat16")
    state, batches = fresh_state(learner), batches_of(learner, split(halves))
    place = lambda i: (state.step, np.uint32(i))  # noqa: E731
    each = [jax.jit(learner._slopes)(state.params, batch, {}, place(i))[0]["policy"] for i, batch in enumerate(batches)]
    assert {x.dtype for x in jax.tree.leaves(each)} == {jnp.dtype("bfloat16"), jnp.dtype("float32")}  # norms' scales
    total = learner._zeros()
    for i, batch in enumerate(batches):
        total, _ = learner._accumulate(total, state.params, batch, {}, place(i))
    total = total["policy"]
    for path, x in leaves(total).items():
        assert x.dtype == np.float32
        parts = [leaves(slopes)[path].astype(np.float32) for slopes in each]
        room = ULP * sum(map(np.abs, parts)) + 1e-6  # another program may round each part to the other side
        assert (np.abs(x - sum(parts)) <= room).all(), path
    plain = narrow("float32")
    exact = plain._only(state.params, batches[0], {}, place(0))[0]["policy"]
    for path, x in leaves(
        exact
    ).items():  # half of the distance of two bfloat16, for each of the three that a tied matrix sums
        off = np.linalg.norm(leaves(each[0])[path].astype(np.float64) - x)
        assert off <= 3 * ULP / 2 * np.linalg.norm(x), path


def rounded_shapes(jaxpr):
    """The shapes of the float32 arrays that a program rounds to bfloat16, in loops and calls too."""
    for one in jaxpr.eqns:
        if one.primitive.name == "convert_element_type" and one.outvars[0].aval.dtype == jnp.bfloat16:
            yield one.invars[0].aval.shape
        for inner in jax.core.jaxprs_in_params(one.params):
            yield from rounded_shapes(inner)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_float32_weights_are_rounded_a_layer_at_a_time_where_their_gradient_is_in_bfloat16(remat):
    learner = narrow("float32", gradients_dtype="bfloat16")
    learner = replace(learner, models={"policy": replace(learner.policy, remat=remat)})
    params, batch = learner.abstract.params, batches_of(learner, make_batch())[0]
    found = set(rounded_shapes(jax.make_jaxpr(learner._slopes)(params, batch, {}, (0, np.uint32(0))).jaxpr))
    stacks = {x.shape for x in jax.tree.leaves(params["policy"]["layers"]) if x.ndim > 2}
    assert len(stacks) > 3 and not found & stacks, "a copy of all layers would be as large as their gradient"
    assert found >= {shape[1:] for shape in stacks}
    assert params["policy"]["embedding"].shape in found


@pytest.mark.parametrize(
    ("mesh", "devices", "more"),
    [
        (MeshConfig(), 1, {}),
        (MeshConfig(fsdp=3), 3, {}),  # where the mesh stores the width filled up
        (MeshConfig(fsdp=1, tensor=2), 2, {}),
        (MeshConfig(), 1, {"capture": Capture(layer=1, site="mlp_in_normed", final_norm=True)}),
    ],
    ids=["one device", "filled up", "tensor", "inside a layer"],
)
def test_the_gradient_in_bfloat16_is_that_of_weights_rounded_beforehand(mesh, devices, more):
    learner = replace(narrow("float32", mesh, devices, gradients_dtype="bfloat16"), **more)
    state, (batch,), place = fresh_state(learner), batches_of(learner, make_batch()), (0, np.uint32(0))
    got = jax.jit(learner._slopes)(state.params, batch, {}, place)[0]
    whole = jax.jit(jax.grad(lambda policy: learner._objective({"policy": policy}, batch, {}, place)[0]))
    want = {"policy": whole(rested(state.params["policy"], "bfloat16"))}
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, want)
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)  # noqa: E731
    assert_gradients_agree(wide(got), wide(want), relative=ULP)


def test_gradients_of_a_frequent_token_are_summed_in_float32_whatever_the_tables_dtype_is():
    table, tokens = jnp.zeros((4, 2), jnp.bfloat16), jnp.full((8, 500), 3, jnp.int32)
    found = jax.grad(lambda t: looked_up(t, tokens).astype(jnp.float32).sum())(table)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(found, np.float32), [[0, 0]] * 3 + [[4000, 4000]]
    )  # bfloat16 would stop at 256


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_gradients_in_bfloat16_are_refused_where_float32_weights_compute_in_float32():
    with pytest.raises(ValueError, match=re.escape("set sources.PolicySource.compute_dtype = 'bfloat16'")):
        narrow("float32", compute="float32", gradients_dtype="bfloat16")
    narrow("stochastic", compute="float32")  # these are rounded already


def test_adapters_stay_in_float32():
    learner = make_learner(GRPO_CASE)
    adapted = AdaptedPolicy(learner.policy.architecture, learner.partitioner, lora=LoRA(rank=2))
    with pytest.raises(ValueError, match="the policy trains adapters, which are small"):
        replace(learner, models={"policy": adapted}, optimizers={"policy": Optimizer(weights="compensated")})


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match=re.escape("train.Optimizer.gradients_dtype must be one of")):
        Optimizer(gradients_dtype="float16")
