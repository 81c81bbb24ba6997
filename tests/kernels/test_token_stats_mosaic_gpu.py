"""The Hopper kernels of token_stats: right in JAX's GPU interpreter, lowered for CUDA, and chosen on Hopper alone."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from token_stats_float64 import statistics

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.token_stats import fused, mosaic_gpu
from jaxrl_llm.kernels.token_stats.api import BACKENDS, call_of, token_stats
from jaxrl_llm.kernels.token_stats.fused import OUTPUTS
from jaxrl_llm.kernels.token_stats.mosaic_gpu import Kernels, Tiles

WORDS = jnp.zeros(2, jnp.uint32)
NEW_INTERPRETER = hasattr(plgpu, "InterpretGPUParams")


def interpreter():
    """A context in which Mosaic GPU kernels run on the CPU; jax before 0.11 has it in a private module."""
    if NEW_INTERPRETER:
        return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams())
    from jax._src.pallas.mosaic_gpu.interpret import params

    return params.force_gpu_interpret_mode(params.InterpretGPUParams())


@pytest.mark.parametrize(("vocabulary", "shares", "cluster", "depth"), [(214, 1, 2, 32), (151, 2, 1, 64)])
@pytest.mark.slow
def test_values_and_gradients_are_right_in_the_interpreter(vocabulary, shares, cluster, depth, monkeypatch):
    # A head of 215 rows that TMA takes in parts: 3 tiles of 64 entries in buffers of 1 and 2, then 22 entries and one of a
    # mesh's padding for xla. A head of 152 rows taken whole, by two shares of the tokens: 2 tiles, each a buffer. The
    # interpreter of jax 0.10 knows neither clusters that share a tile nor a transposed operand.
    tokens, width = 100, 64
    monkeypatch.setattr(fused, "SHARE", fused.Share(tokens=tokens // shares, elements=2**20, unit=1))
    cluster = cluster if NEW_INTERPRETER else 1
    tiles = Tiles(
        rows=64,
        columns=64,
        depth=depth,
        stages=2,
        cluster=cluster,
        multiprocessors=2 * cluster,
        buffer=(3 - shares) * 128 * cluster * 64 * 2,
        head_columns=not NEW_INTERPRETER,
    )
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16)
    head = jnp.asarray(rng.normal(size=(vocabulary + 1, width)) * 2 * width**-0.5, jnp.bfloat16)
    bias = np.append(np.zeros(vocabulary, np.float32), -np.inf)
    targets = rng.integers(0, vocabulary, tokens).astype(np.int32)
    targets[:6] = -1, 0, 127, 128, min(192, vocabulary - 1), vocabulary - 1
    g = {name: rng.normal(size=tokens).astype(np.float32) for name in OUTPUTS}
    call = replace(call_of(hidden, head, outputs=OUTPUTS, temperature=0.7), shards=2)

    def total(hidden, head):
        arrays = (hidden, head, jnp.asarray(targets))
        out = fused.compute(Kernels(tiles=tiles), arrays, jnp.asarray(bias), WORDS, call, None)
        return sum((out[name] * g[name]).sum() for name in OUTPUTS), out

    with interpreter():
        (_, out), gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(hidden, head)
        jax.block_until_ready(gradients)
    want, derived = statistics(
        hidden, head, targets, bias=bias, outputs=OUTPUTS, noise=np.zeros((tokens, 1)), cotangents=g, temperature=0.7
    )
    for name in OUTPUTS:
        np.testing.assert_allclose(out[name], want[name], atol=1e-5, rtol=1e-5, err_msg=name)
    for got, right in zip(gradients, derived):
        # The kernel's gradients of logits and the results are rounded to 8 bits.
        assert np.linalg.norm(np.asarray(got, np.float64) - right) < 4e-3 * np.linalg.norm(right)
        np.testing.assert_allclose(np.asarray(got, np.float64), right, atol=0.02 * np.abs(right).max())


@pytest.mark.parametrize(
    ("tiles", "tokens", "width", "vocabulary"),
    [
        (Tiles(multiprocessors=132), 8191, 1024, 151669),
        pytest.param(
            Tiles(multiprocessors=132, rows=128, columns=128, slice=16), 1024, 896, 151936, marks=pytest.mark.slow
        ),
    ],
)
def test_both_passes_lower_for_cuda_without_whole_logits(tiles, tokens, width, vocabulary):
    hidden, head = (jax.ShapeDtypeStruct((n, width), jnp.bfloat16) for n in (tokens, vocabulary))
    call = call_of(jnp.zeros((1, width), jnp.bfloat16), jnp.zeros((1, width), jnp.bfloat16), outputs=OUTPUTS)
    call = replace(call, platform="gpu", tokens=tokens, vocabulary=vocabulary)

    def total(hidden, head, targets):
        out = fused.compute(Kernels(tiles=tiles), (hidden, head, targets), None, WORDS, call, None)
        return sum(x.sum() for x in out.values())

    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    traced = jax.jit(jax.grad(total, argnums=(0, 1))).trace(hidden, head, targets)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # The forward's kernel, and the backward's for whole buffers and for the rest.
    assert text.count("custom_call @mosaic_gpu") == 3
    padded = -(-tokens // (4 * tiles.rows)) * 4 * tiles.rows
    covered = vocabulary // tiles.columns * tiles.columns
    assert not [n for n in (tokens, padded) for v in (vocabulary, covered) if f"tensor<{n}x{v}x" in text]
    assert f"tensor<{padded}x{width}x" in text


@pytest.mark.parametrize("outputs", [("logprob",), ("entropy",), ("uniform_logprob", "sum_p2")])
def test_every_choice_of_outputs_has_both_passes_with_a_ragged_vocabulary(outputs):
    hidden, head = (jax.ShapeDtypeStruct((n, 64), jnp.bfloat16) for n in (100, 1000))
    call = replace(call_of(jnp.zeros((100, 64), jnp.bfloat16), jnp.zeros((1000, 64), jnp.bfloat16)), outputs=outputs)

    def total(hidden, head, targets):
        out = fused.compute(Kernels(tiles=Tiles(multiprocessors=132)), (hidden, head, targets), None, WORDS, call, None)
        assert set(out) == set(outputs)
        return sum(x.sum() for x in out.values())

    targets = jax.ShapeDtypeStruct((100,), jnp.int32)
    traced = jax.jit(jax.grad(total, argnums=(0, 1))).trace(hidden, head, targets)
    assert "custom_call @mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_items_cover_every_block_and_tile_once_and_neighbours_share_the_cache():
    for tokens, width, count, chip in [(8192, 2048, 593, 132), (512, 64, 3, 8), (16384, 3584, 1187, 132)]:
        work = mosaic_gpu.plan(Tiles(multiprocessors=chip), tokens, width, count)
        block, _, first, end = map(np.asarray, jax.vmap(work.item)(jnp.arange(work.blocks * work.splits)))
        seen = np.zeros((tokens // 256, count), int)
        for b, lo, hi in zip(block, first, end):
            seen[b, lo:hi] += 1
        assert (seen == 1).all()
        assert (end > first).all() and work.clusters <= chip // 2
        of_group = work.group * work.splits
        together = [len(np.unique(block[i : i + of_group])) for i in range(0, len(block), of_group)]
        assert max(together) * 256 * width * 2 <= Tiles().cached


@dataclass(frozen=True)
class Gpu:
    compute_capability: str
    platform: str = "gpu"
    core_count: int = 132


def test_hopper_takes_bfloat16_and_every_other_device_and_call_is_refused():
    call = replace(call_of(jnp.zeros((4, 128), jnp.bfloat16), jnp.zeros((1000, 128), jnp.bfloat16)), platform="gpu")
    with dispatch.target(Gpu("9.0")):
        assert dispatch.choose("token_stats", BACKENDS, call, None) is mosaic_gpu
    refused = {
        "float32": {"dtype": "float32"},
        "soft_cap": {"soft_cap": 30.0},
        "bias": {"biased": True},
        "chunk": {"chunk": 512},
        "noise_logprob": {"outputs": ("noise_logprob",)},
        "multiple of 64": {"width": 100},
        "257 or more": {"vocabulary": 256},
        "tpu": {"platform": "tpu"},
        "cpu": {"platform": "cpu"},
    }
    with dispatch.target(Gpu("9.0")):
        for reason, change in refused.items():
            assert reason in dispatch.refusal("token_stats", "mosaic_gpu", replace(call, **change))
    for capability in ("8.0", "8.9", "10.0", "12.0"):
        with dispatch.target(Gpu(capability)):
            assert capability in mosaic_gpu.refusal(call)
            assert dispatch.choose("token_stats", BACKENDS, call, None).__name__.endswith("xla")


def test_naming_it_on_a_cpu_is_an_error():
    with pytest.raises(ValueError, match=r"mosaic_gpu: it runs on NVIDIA Hopper GPUs \(got cpu\)"):
        token_stats(jnp.ones((2, 64)), jnp.ones((300, 64)), jnp.zeros(2, jnp.int32), backend="mosaic_gpu")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rows": 96}, "multiple of 64"),
        ({"rows": 128, "columns": 256}, "16384"),
        ({"cluster": 4}, "1 or 2"),
        ({"stages": 6}, "fewer stages"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Tiles(**sizes)
