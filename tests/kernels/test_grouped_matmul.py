"""grouped_matmul and expert_mlp: values and gradients against float64 loops, for every way that rows may be spread over experts."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_matmul_float64 import SIZES, grouped, mlp, wide

from jaxrl_llm.kernels.grouped_matmul import api, xla
from jaxrl_llm.kernels.grouped_matmul.api import call_of, expert_mlp, grouped_matmul


def run(function, *args):
    """The value, and a function from its cotangent to the gradients, of one compiled program."""

    @jax.jit
    def both(dy, *args):
        out, back = jax.vjp(function, *args)
        return out, back(dy)

    return lambda dy: both(dy, *args)


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("name", SIZES)
def test_products_and_gradients_are_those_of_a_loop_over_experts(name, backend):
    sizes = np.array(SIZES[name], np.int32)
    rows, rng = max(sizes.sum(), 130), np.random.default_rng(0)
    x, dy = rng.normal(size=(rows, 24)).astype(np.float32), rng.normal(size=(rows, 40)).astype(np.float32)
    w = rng.normal(size=(8, 24, 40)).astype(np.float32)
    x[sizes.sum() :] = dy[sizes.sum() :] = np.nan  # rows that are nobody's are not read
    function = lambda x, w: grouped_matmul(x, w, jnp.asarray(sizes), backend=backend)  # noqa: E731
    y, (dx, dw) = run(function, x, w)(dy)
    used = sizes.sum()
    for got, want in zip((y, dx, dw), grouped(x[:used], w, sizes, dy[:used])):
        want = np.pad(want, [(0, rows - used), (0, 0)]) if want.ndim == 2 else want
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert not np.asarray(y[used:]).any() and not np.asarray(dx[used:]).any()
    assert not np.asarray(dw)[sizes == 0].any()


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_bfloat16_products_are_within_one_rounding_of_the_largest_term(backend):
    sizes = np.array(SIZES["edges of tiles"], np.int32)
    rng = np.random.default_rng(1)
    x, dy = (jnp.asarray(rng.normal(size=(sizes.sum(), n)), jnp.bfloat16) for n in (96, 64))
    w = jnp.asarray(rng.normal(size=(8, 96, 64)), jnp.bfloat16)
    y, (dx, dw) = run(lambda x, w: grouped_matmul(x, w, jnp.asarray(sizes), backend=backend), x, w)(dy)
    assert y.dtype == dx.dtype == dw.dtype == jnp.bfloat16
    for got, want in zip((y, dx, dw), grouped(x, w, sizes, dy)):
        ulp = 2.0 ** (np.floor(np.log2(np.abs(want).max(axis=-1, keepdims=True).clip(1e-30))) - 7)
        assert (np.abs(wide(got) - want) <= ulp).all()


def test_float32_weights_of_bfloat16_rows_get_float32_gradients():
    rng = np.random.default_rng(2)
    sizes, dy = jnp.array([2000, 48]), jnp.ones((2048, 8), jnp.bfloat16)
    x = jnp.asarray(1 + rng.uniform(size=(2048, 16)), jnp.bfloat16)
    _, (_, dw) = run(lambda x, w: grouped_matmul(x, w, sizes, backend="xla"), x, jnp.ones((2, 16, 8)))(dy)
    assert dw.dtype == jnp.float32
    want = [wide(x)[:2000].sum(axis=0), wide(x)[2000:].sum(axis=0)]
    # Sums of 2000 terms near 1.5: bfloat16 would be off by up to 8.
    np.testing.assert_allclose(dw, np.repeat(np.array(want)[:, :, None], 8, axis=2), rtol=1e-6)


def arrays(tokens=37, chosen=3, count=6, width=16, inner=12, dtype=np.float32, seed=0):
    """x, gate_up, down, experts, weights and a cotangent; expert 0 has no token and expert 5 many."""
    rng = np.random.default_rng(seed)
    experts = np.stack([rng.choice(np.arange(1, count), chosen, replace=False) for _ in range(tokens)])
    experts[:, 0] = np.where((experts == count - 1).any(axis=1), experts[:, 0], count - 1)
    weights = rng.uniform(0.1, 1, size=(tokens, chosen)).astype(np.float32)
    x, dy = (rng.normal(size=(tokens, width)).astype(dtype) for _ in range(2))
    gate_up = (rng.normal(size=(count, width, 2, inner)) * width**-0.5).astype(dtype)
    down = (rng.normal(size=(count, inner, width)) * inner**-0.5).astype(dtype)
    return (*map(jnp.asarray, (x, gate_up, down, experts.astype(np.int32), weights, dy)),)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_the_experts_mlp_and_its_gradients_are_those_of_a_loop_over_tokens(backend):
    x, gate_up, down, experts, weights, dy = arrays()
    function = lambda *a: expert_mlp(*a[:3], experts, a[3], backend=backend)  # noqa: E731
    got, gradients = run(function, x, gate_up, down, weights)(dy)
    for found, want in zip((got, *gradients), mlp(x, gate_up, down, experts, weights, dy)):
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5)
    assert not np.asarray(gradients[1][0]).any() and not np.asarray(gradients[2][0]).any()


def test_the_experts_mlp_in_float64_is_exact():
    with jax.enable_x64(True):
        x, gate_up, down, experts, weights, dy = arrays(dtype=np.float64)
        weights = weights.astype(jnp.float64)
        function = lambda *a: expert_mlp(*a[:3], experts, a[3], backend="xla")  # noqa: E731
        got, gradients = run(function, x, gate_up, down, weights)(dy)
        for found, want in zip((got, *gradients), mlp(x, gate_up, down, experts, weights, dy)):
            np.testing.assert_allclose(found, want, rtol=1e-11, atol=1e-12)


def test_an_expert_that_is_not_here_adds_nothing_and_gets_no_gradient():
    x, gate_up, down, experts, weights, dy = arrays(seed=3)
    experts = experts.at[::2, 1].set(6).at[5].set(-1)
    function = lambda *a: expert_mlp(*a[:3], experts, a[3], backend="xla")  # noqa: E731
    got, gradients = run(function, x, gate_up, down, weights)(dy)
    for found, want in zip((got, *gradients), mlp(x, gate_up, down, experts, weights, dy)):
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5)
    assert not np.asarray(got[5]).any() and not np.asarray(gradients[3])[::2, 1].any()


def test_a_kept_expert_gate_spares_the_first_product_of_the_backward_pass():
    x, gate_up, down, experts, weights, _ = arrays(tokens=64)

    def products(policy):
        layer = jax.checkpoint(lambda *a: expert_mlp(*a[:3], experts, a[3], backend="xla").sum(), policy=policy)
        both = jax.jit(jax.value_and_grad(layer, argnums=(0, 1, 2, 3)))
        return len(re.findall(r" dot\(", both.lower(x, gate_up, down, weights).compile().as_text()))

    # Two forward; backward dh, dx and two gradients of weights; and the first again where its result is not kept.
    assert products(jax.checkpoint_policies.nothing_saveable) == 7
    assert products(jax.checkpoint_policies.save_only_these_names("expert_gate")) == 6


def flops(jaxpr, trips):
    """FLOPs of the products of a program whose loops take `trips` trips."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            ((contracted, _), _), left = equation.params["dimension_numbers"], equation.invars[0].aval.shape
            total += 2 * np.prod([left[i] for i in contracted]) * np.prod(equation.outvars[0].aval.shape)
        inner = [v for name, v in equation.params.items() if name not in ("cond_jaxpr", "branches")]
        each = trips if equation.primitive.name == "while" else 1
        total += each * sum(flops(j.jaxpr if hasattr(j, "jaxpr") else j, trips) for j in inner if hasattr(j, "eqns"))
    return int(total)


@pytest.mark.parametrize("rows", [2048, 8192])
def test_work_and_memory_do_not_grow_with_the_number_of_experts(rows):
    width, inner = 64, 96

    def cost(experts):
        x, w = jnp.zeros((rows, width)), jnp.zeros((experts, width, inner))
        sizes = np.random.default_rng(0).multinomial(rows, np.full(experts, 1 / experts)).astype(np.int32)

        @jax.jit
        def both(x, w, dy):
            out, back = jax.vjp(lambda x, w: grouped_matmul(x, w, jnp.asarray(sizes), backend="xla"), x, w)
            return out, back(dy)

        traced = both.trace(x, w, jnp.zeros((rows, inner)))
        block = xla.block_rows(call_of(x, rows, experts, inner, gated=False))
        # The loops go over the blocks in use: every expert's rows in whole blocks.
        work = flops(traced.jaxpr.jaxpr, int((-(-sizes // block)).sum()))
        assert work >= 3 * 2 * rows * width * inner
        compiled = traced.lower().compile()
        # The rest of a program, a loop's body once: rows, and the weights' own size.
        small = compiled.cost_analysis()["flops"] - 5 * w.size
        return work, small, compiled.memory_analysis().temp_size_in_bytes

    few, many = cost(8), cost(128)
    assert many[0] < 1.3 * few[0]
    assert many[1] < 1.3 * few[1]
    # Beside the float32 sums of the weights' gradients, which are as large as the result.
    weights = 4 * 128 * width * inner
    assert many[2] - weights < 1.3 * (few[2] - weights / 16)


def test_what_does_not_fit_is_refused_in_words():
    x, gate_up, down, experts, weights, _ = arrays()
    # The functions below the checker of annotations, as users run them.
    grouped_matmul, expert_mlp = map(inspect.unwrap, (api.grouped_matmul, api.expert_mlp))
    with pytest.raises(ValueError, match="must share A"):
        grouped_matmul(x, down, jnp.zeros(6, jnp.int32))
    with pytest.raises(ValueError, match=r"sizes must be integers \[E\]"):
        grouped_matmul(x, jnp.zeros((6, 16, 3)), jnp.zeros(5, jnp.int32))
    with pytest.raises(ValueError, match="do not fit"):
        expert_mlp(x, gate_up, down[:, :3], experts, weights)
    with pytest.raises(ValueError, match="experts must be integers"):
        expert_mlp(x, gate_up, down, experts[:3], weights)
    with pytest.raises(ValueError, match="weights must be float"):
        expert_mlp(x, gate_up, down, experts, weights[:, :2])
    with pytest.raises(ValueError, match=r"no grouped_matmul backend takes this call \(mosaic_gpu: it runs on NVIDIA"):
        expert_mlp(x, gate_up, down, experts, weights, backend="mosaic_gpu")
