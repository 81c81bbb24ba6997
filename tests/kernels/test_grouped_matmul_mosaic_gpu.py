"""The Hopper kernels of grouped_matmul: right in JAX's GPU interpreter, lowered for CUDA, and chosen on Hopper alone."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_matmul_float64 import grouped, mlp, wide
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.grouped_matmul import api, definition, expert_mlp, mosaic_gpu, triton_rows
from jaxrl_llm.kernels.grouped_matmul.mosaic_gpu import Tiles

NEW_INTERPRETER = hasattr(plgpu, "InterpretGPUParams")


def interpreter():
    """A context in which Mosaic GPU kernels run on the CPU; jax before 0.11 has it in a private module."""
    if NEW_INTERPRETER:
        return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams())
    from jax._src.pallas.mosaic_gpu.interpret import params

    return params.force_gpu_interpret_mode(params.InterpretGPUParams())


@pytest.fixture(autouse=True)
def rows_are_gathered_in_the_interpreter(request, monkeypatch):
    # It takes every Pallas kernel, and knows no Triton.
    if "interpreter" in request.node.name:
        monkeypatch.setattr(mosaic_gpu, "spread", lambda x, plan, call: definition.spread(x, plan))


def close(got, want):
    """Two roundings of bfloat16 of the largest term of a row, and float32 sums."""
    ulp = 2.0 ** (np.floor(np.log2(np.abs(want).max(axis=-1, keepdims=True).clip(1e-30))) - 7)
    assert (np.abs(wide(got) - want) <= 2 * ulp).all()


@pytest.mark.parametrize(("cluster", "warpgroups"), [(1, 2), (1, 1), (2, 2)] if NEW_INTERPRETER else [(1, 2), (1, 1)])
@pytest.mark.parametrize("sizes", [[130, 0, 1], pytest.param([0, 0, 90], marks=pytest.mark.slow), [0, 0, 0]])
def test_products_and_gradients_are_right_in_the_interpreter(sizes, cluster, warpgroups, monkeypatch):
    # The interpreter of jax 0.10 knows neither clusters that share a tile nor transposed operands: products alone.
    tiles = Tiles(columns=128, stages=2, cluster=cluster, warpgroups=warpgroups, multiprocessors=2 * cluster)
    monkeypatch.setattr(mosaic_gpu, "tiles_of", lambda call: tiles)
    rng, rows = np.random.default_rng(0), 140
    x, dy = (jnp.asarray(rng.normal(size=(rows, n)), jnp.bfloat16) for n in (128, 256))
    w = jnp.asarray(rng.normal(size=(3, 128, 256)), jnp.bfloat16)
    x, dy = (a.at[sum(sizes) :].set(jnp.nan) for a in (x, dy))
    call = replace(api.call_of(x, rows, 3, 256, gated=False), platform="gpu")
    with interpreter():
        y, back = jax.vjp(lambda x, w: api._multiply(mosaic_gpu, call, x, w, jnp.array(sizes)), x, w)
        got = (y, *back(dy)) if NEW_INTERPRETER else (y,)
        jax.block_until_ready(got)
    used = sum(sizes)
    for found, want in zip(got, grouped(x[:used], w, sizes, dy[:used])):
        close(found[:used] if found.ndim == 2 else found, want)
        if found.ndim == 2:
            assert not np.asarray(found[used:]).any()


@pytest.mark.parametrize("width", [128, 384])
def test_rows_are_spread_as_a_gather_gives_them(width):
    rng = np.random.default_rng(0)
    experts, x = rng.integers(-1, 5, size=(20, 3)), rng.normal(size=(20, width))
    x = jnp.asarray(x, jnp.bfloat16)
    plan = definition.plan_of_experts(jnp.asarray(experts.reshape(-1), jnp.int32), 5, 16)
    got = np.asarray(triton_rows.spread(x, plan, interpret=True).astype(jnp.float32))
    used = int(plan.blocks.used) * 16
    want = np.zeros((used, width))
    begin = 0
    for expert in range(5):
        tokens = [t for t, j in np.argwhere(experts == expert)]
        want[begin : begin + len(tokens)] = wide(x)[tokens]
        begin += -(-len(tokens) // 16) * 16
    assert begin == used
    np.testing.assert_array_equal(got[:used], want)


@pytest.mark.skipif(not NEW_INTERPRETER, reason="the interpreter of jax 0.10 knows no transposed operands")
@pytest.mark.parametrize(("cluster", "warpgroups"), [(1, 2), (1, 1), (2, 2)])
def test_the_experts_mlp_is_right_in_the_interpreter(cluster, warpgroups, monkeypatch):
    tiles = Tiles(columns=128, stages=2, cluster=cluster, warpgroups=warpgroups, multiprocessors=2 * cluster)
    monkeypatch.setattr(mosaic_gpu, "tiles_of", lambda call: tiles)
    rng, (tokens, chosen, experts, width, inner) = np.random.default_rng(1), (40, 2, 3, 128, 128)
    ids = np.stack([rng.choice(experts, chosen, replace=False) for _ in range(tokens)]).astype(np.int32)
    weights = rng.uniform(0.1, 1, size=(tokens, chosen)).astype(np.float32)
    x, dy = (jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16) for _ in range(2))
    gate_up = jnp.asarray(rng.normal(size=(experts, width, 2, inner)) * width**-0.5, jnp.bfloat16)
    down = jnp.asarray(rng.normal(size=(experts, inner, width)) * inner**-0.5, jnp.bfloat16)
    call = replace(api.call_of(x, ids.size, experts, inner, gated=True), platform="gpu")

    def function(x, gate_up, down, weights):
        return expert_mlp.compute(mosaic_gpu, call, (x, gate_up, down, jnp.asarray(ids), weights))

    with interpreter():
        y, back = jax.vjp(function, x, gate_up, down, jnp.asarray(weights))
        got = jax.block_until_ready((y, *back(dy)))
    for found, want in zip(got, mlp(x, gate_up, down, ids, weights, dy)):
        # h, its gradient and the products are rounded to 8 bits on the way.
        assert np.linalg.norm(wide(found) - want) < 6e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("rows", [2048, 8192, 262144])
def test_both_passes_of_the_experts_mlp_lower_for_cuda(rows, monkeypatch):
    for name in ("MANY", "FEW", "LEAST"):
        monkeypatch.setattr(mosaic_gpu, name, replace(getattr(mosaic_gpu, name), multiprocessors=132))
    tokens, chosen, experts, width, inner = rows // 8, 8, 128, 2048, 768
    x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    gate_up = jax.ShapeDtypeStruct((experts, width, 2, inner), jnp.float32)
    down = jax.ShapeDtypeStruct((experts, inner, width), jnp.float32)
    ids, weights = (jax.ShapeDtypeStruct((tokens, chosen), dtype) for dtype in (jnp.int32, jnp.float32))
    call = replace(api.call_of(jnp.zeros((1, width), jnp.bfloat16), rows, experts, inner, gated=True), platform="gpu")

    def total(x, gate_up, down, weights, ids):
        return expert_mlp.compute(mosaic_gpu, call, (x, gate_up, down, ids, weights)).astype(jnp.float32).sum()

    traced = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3))).trace(x, gate_up, down, weights, ids)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # Two products forward; dh, dx and two gradients of weights.
    assert text.count("custom_call @mosaic_gpu") == 6
    # The buffer: every row's products, and less than a block for each expert.
    block = mosaic_gpu.block_rows(call)
    assert f"tensor<{definition.most_blocks(rows, experts, block) * block}x{width}xbf16>" in text


def test_calls_of_many_rows_an_expert_share_weights_between_blocks():
    call = api.call_of(jnp.zeros((1, 128), jnp.bfloat16), 262144, 128, 128, gated=False)
    assert mosaic_gpu.block_rows(call) == 256
    assert mosaic_gpu.block_rows(replace(call, rows=8192)) == 128


@dataclass(frozen=True)
class Gpu:
    compute_capability: str
    platform: str = "gpu"
    core_count: int = 132


def test_hopper_takes_bfloat16_and_every_other_device_and_call_is_refused():
    with dispatch.target(Gpu("9.0")):
        call = api.call_of(jnp.zeros((1, 2048), jnp.bfloat16), 64, 8, 768, gated=True)
        assert mosaic_gpu.refusal(call) is None
        assert "it takes bfloat16 (got float32)" in mosaic_gpu.refusal(replace(call, dtype="float32"))
        assert "multiples of 128 (got 2048 and 96)" in mosaic_gpu.refusal(replace(call, inner=96))
        assert "NVIDIA Hopper GPUs (got cpu)" in dispatch.refusal(
            "grouped_matmul", "mosaic_gpu", replace(call, platform="cpu")
        )
    with dispatch.target(Gpu("8.9")):
        assert "compute capability 9.0, Hopper (got 8.9)" in mosaic_gpu.refusal(call)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"columns": 192}, "128 or 256"), ({"cluster": 4}, "1 or 2"), ({"stages": 5}, "use fewer stages")],
)
def test_tiles_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Tiles(**sizes)
