"""Decode attention against a float64 derivation, for filled lengths, groups, windows and every backend."""

import contextlib
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import slow_but
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.decode_attention import mosaic_tpu, ordered, triton
from jaxrl_llm.kernels.decode_attention.api import Call, decode_attention, decode_step

LAYERS, SLOTS, LENGTH, WIDTH = 2, 3, 100, 32
POSITIONS = np.array([0, 63, 99], np.int32)  # one entry, a full block of 64, and every entry


@dataclass(frozen=True)
class Chip:
    platform: str
    device_kind: str


def arrays(heads, kv_heads, dtype=np.float32):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(SLOTS, heads, WIDTH)) * 3
    k, v = (rng.normal(size=(LAYERS, SLOTS, LENGTH, kv_heads, WIDTH)) for _ in range(2))
    for slot, last in enumerate(POSITIONS):  # what lies beyond the filled entries is never read into a result
        k[:, slot, last + 1 :], v[:, slot, last + 1 :] = 1e4, 1e4
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v))


def expected(q, k, v, layer, window):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for s, last in enumerate(POSITIONS):
        first = 0 if window is None else max(0, last - window + 1)
        for h in range(q.shape[1]):
            own = h // (q.shape[1] // k.shape[3])
            score = k[layer, s, first : last + 1, own] @ q[s, h] / np.sqrt(WIDTH)
            p = np.exp(score - score.max())
            out[s, h] = p @ v[layer, s, first : last + 1, own] / p.sum()
    return out


def interpreted(q, k, v, layer, positions, window, table=None):
    call = Call(
        platform="gpu",
        dtype="",
        cache_dtype="",
        heads=q.shape[1],
        kv_heads=k.shape[3],
        width=WIDTH,
        length=LENGTH,
        window=window,
        page=None if table is None else k.shape[2],
    )
    return triton.attend(q, k, v, layer, positions, call, table, interpret=True)


@pytest.mark.parametrize("backend", ["reference", "triton, interpreted"])
@pytest.mark.parametrize(("heads", "kv_heads", "window"), [(12, 2, None), (4, 4, None), (20, 1, 40)])
def test_each_slot_attends_to_its_filled_entries_alone(backend, heads, kv_heads, window):
    q, k, v = arrays(heads, kv_heads)
    run = interpreted if backend != "reference" else partial(decode_attention, backend=backend)
    for layer in range(LAYERS):
        got = jax.jit(lambda i: run(q, k, v, i, jnp.asarray(POSITIONS), window=window))(layer)
        np.testing.assert_allclose(got, expected(q, k, v, layer, window), rtol=2e-5, atol=2e-5)


def paged(k, v, size, rng):
    """The entries of each slot in pages of a pool, in a random order, among others that hold what must not be read; and the table."""
    each = -(-LENGTH // size)
    table = rng.permutation(SLOTS * each + 5)[: SLOTS * each].reshape(SLOTS, each).astype(np.int32)
    pools = []
    for x in (np.asarray(k), np.asarray(v)):
        pool = np.full((LAYERS, SLOTS * each + 5, size, *x.shape[3:]), 1e4, x.dtype)
        whole = np.pad(x, ((0, 0), (0, 0), (0, each * size - LENGTH), (0, 0), (0, 0)), constant_values=1e4)
        pool[:, table] = whole.reshape(LAYERS, SLOTS, each, size, *x.shape[3:])
        pools.append(jnp.asarray(pool))
    return *pools, jnp.asarray(table)


@pytest.mark.parametrize(
    ("backend", "size"), [("reference", 8), ("triton, interpreted", 64), ("triton, interpreted", 128)]
)
@pytest.mark.parametrize(("heads", "kv_heads", "window"), [(12, 2, None), (20, 1, 40)])
def test_pages_are_read_as_the_slots_that_they_are_of(backend, size, heads, kv_heads, window):
    q, k, v = arrays(heads, kv_heads)
    keys, values, table = paged(k, v, size, np.random.default_rng(1))
    run = interpreted if backend != "reference" else partial(decode_attention, backend=backend)
    got = jax.jit(lambda i: run(q, keys, values, i, jnp.asarray(POSITIONS), window=window, table=table))(1)
    np.testing.assert_allclose(got, expected(q, k, v, 1, window), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_step_writes_the_entry_of_its_page_alone(platform):
    rng, size = np.random.default_rng(2), 8
    q, k, v = arrays(4, 2)
    keys, values, table = paged(k, v, size, rng)
    new = tuple(jnp.asarray(rng.normal(size=(SLOTS, 2, WIDTH)), jnp.float32) for _ in range(2))
    positions = np.array([0, 63, 104], np.int32)  # 13 pages have 104 entries: the last slot's is beyond them
    with dispatch.target(Chip(platform, platform)):
        turned = (lambda x: x.swapaxes(2, 3)) if platform == "tpu" else lambda x: x
        run = partial(decode_step, table=table, backend="reference")
        out, written = run(q, new, (turned(keys), turned(values)), jnp.int32(1), jnp.asarray(positions))
    want = [np.array(keys), np.array(values)]
    for x, entry in zip(want, new):
        for slot in (0, 1):
            x[1, table[slot, positions[slot] // size], positions[slot] % size] = entry[slot]
    for x, found in zip(want, written):
        np.testing.assert_array_equal(turned(np.asarray(found)), x)
    whole = [x[:, np.asarray(table)].reshape(LAYERS, SLOTS, -1, 2, WIDTH) for x in want]
    np.testing.assert_allclose(out[:2], expected(q, *whole, 1, None)[:2], rtol=2e-5, atol=2e-5)


def test_kernels_that_read_whole_slots_refuse_pages():
    call = {
        "dtype": "bfloat16",
        "cache_dtype": "bfloat16",
        "heads": 4,
        "kv_heads": 2,
        "width": 128,
        "length": 128,
        "window": None,
    }
    for module, platform in ((mosaic_tpu, "tpu"), (ordered, "cpu")):
        assert module.refusal(Call(platform=platform, page=64, **call)) == "its cache holds whole slots, not pages"


def test_bfloat16_keeps_float32_sums():
    q, k, v = arrays(8, 2, jnp.bfloat16)
    for run in (interpreted, partial(decode_attention, backend="reference")):
        got = run(q, k, v, jnp.int32(1), jnp.asarray(POSITIONS), window=None)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float64), expected(q, k, v, 1, None), rtol=2e-2, atol=2e-2)


def test_a_position_beyond_the_cache_sees_all_of_it():
    q, k, v = arrays(4, 2)
    past, last = (decode_attention(q, k, v, jnp.int32(0), jnp.full(SLOTS, n)) for n in (LENGTH + 5, LENGTH - 1))
    np.testing.assert_array_equal(past, last)


@pytest.mark.parametrize("backend", ["reference", "triton, interpreted"])
def test_a_cache_of_8_bits_is_read_as_the_numbers_that_it_holds(backend):
    q, k, v = arrays(4, 2)
    k, v = (jnp.clip(x, -448, 448).astype(jnp.float8_e4m3fn) for x in (k, v))
    run = interpreted if backend != "reference" else partial(decode_attention, backend=backend)
    got = run(q, k, v, jnp.int32(1), jnp.asarray(POSITIONS), window=None)
    assert got.dtype == q.dtype
    np.testing.assert_allclose(got, expected(q, k, v, 1, None), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cache", slow_but((jnp.bfloat16,), (jnp.bfloat16, jnp.float8_e4m3fn)))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "window", "own", "entries"),
    [(12, 2, None, 2, 128), (4, 4, None, 1, 384), (20, 1, 130, 4, 128), (8, 1, 20, 2, 384)],
)
def test_the_tpu_kernel_writes_and_attends_to_filled_entries_alone(
    heads, kv_heads, window, own, entries, cache, monkeypatch
):
    # Groups of slots and blocks of entries, of which some have nothing that a slot or any slot sees; one position is beyond the end.
    slots, length, width = 4, 384, 128
    positions = np.array([0, 127, 400, 140], np.int32)
    last = np.minimum(positions, length - 1)
    sizes = {"heads": heads, "kv_heads": kv_heads, "width": width, "length": length, "window": window}
    call = Call(platform="tpu", dtype="bfloat16", cache_dtype=jnp.dtype(cache).name, **sizes)
    assert mosaic_tpu.refusal(call) is None
    monkeypatch.setattr(mosaic_tpu, "BYTES", 4 * own * kv_heads * entries * width * jnp.dtype(cache).itemsize)
    monkeypatch.setattr(mosaic_tpu, "ENTRIES", entries)
    assert mosaic_tpu.Sizes.of(slots, call, jnp.dtype(cache).itemsize)[:2] == (own, entries)
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.normal(size=(slots, heads, width)) * 3, jnp.bfloat16)
    k, v = (rng.normal(size=(LAYERS, slots, kv_heads, length, width)) for _ in range(2))
    for slot, n in enumerate(last):
        k[:, slot, :, n + 1 :], v[:, slot, :, n + 1 :] = 400, 400
    k, v = (jnp.asarray(x, cache) for x in (k, v))
    new = tuple(jnp.asarray(rng.normal(size=(slots, kv_heads, width)), cache) for _ in range(2))
    run = jax.jit(partial(mosaic_tpu.step, call=call, interpret=pltpu.InterpretParams(detect_races=True)))
    for layer in range(LAYERS):
        got, written = run(q, new, (k, v), jnp.int32(layer), jnp.asarray(positions))
        assert not interpret_pallas_call.races.races_found
        expected_cache = [np.asarray(x, np.float64).copy() for x in (k, v)]
        want = np.zeros(q.shape)
        for s, n in enumerate(last):
            first = 0 if window is None else max(0, n - window + 1)
            if positions[s] < length:
                for x, entry in zip(expected_cache, new):
                    x[layer, s, :, n] = np.asarray(entry[s], np.float64)
            for h in range(heads):
                mine = h // (heads // kv_heads)
                k64, v64 = (x[layer, s, mine, first : n + 1] for x in expected_cache)
                score = k64 @ np.asarray(q[s, h], np.float64) / np.sqrt(width)
                p = np.exp(score - score.max())
                want[s, h] = p @ v64 / p.sum()
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-2, atol=2e-2)
        for x, expected_x in zip(written, expected_cache):
            np.testing.assert_array_equal(np.asarray(x, np.float64), expected_x)


def test_the_tpu_kernel_refuses_what_tiles_cannot_hold():
    good = {"platform": "tpu", "dtype": "bfloat16", "cache_dtype": "bfloat16", "heads": 8, "kv_heads": 2}
    good |= {"width": 128, "length": 640, "window": None}
    for reason, change in {
        "runs on TPUs": {"platform": "gpu"},
        "bfloat16": {"dtype": "float32"},
        "128 wide": {"width": 64},
        "128 tokens": {"length": 100},
    }.items():
        assert reason in dispatch.refusal("decode_attention", "mosaic_tpu", Call(**(good | change)))


def for_hopper():
    """Says which GPU is lowered for where there is none; jax 0.10 does not ask."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(12, 2, 128), (14, 2, 64), (32, 8, 128)])
def test_the_triton_kernel_lowers_for_cuda_at_the_shapes_of_real_models(heads, kv_heads, width, dtype):
    cache = jax.ShapeDtypeStruct((28, 1024, 640, kv_heads, width), dtype)  # more than 2**31 entries
    sizes = {"heads": heads, "kv_heads": kv_heads, "width": width, "length": 640}
    call = Call(platform="gpu", dtype="bfloat16", cache_dtype=jnp.dtype(dtype).name, window=None, **sizes)
    q = jax.ShapeDtypeStruct((1024, heads, width), jnp.bfloat16)
    ints = (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((1024,), jnp.int32))
    with for_hopper():
        traced = jax.jit(partial(triton.attend, call=call)).trace(q, cache, cache, *ints)
        assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_shapes_and_backends_that_do_not_fit_are_refused_by_name():
    q, k, v = arrays(4, 2)
    at = (jnp.int32(0), jnp.asarray(POSITIONS))
    with pytest.raises(ValueError, match="triton: it runs on NVIDIA GPUs"):
        decode_attention(q, k, v, *at, backend="triton")
    with pytest.raises(ValueError, match="one dtype, or the cache be of"):
        decode_attention(q.astype(jnp.bfloat16), k, v, *at)
    with pytest.raises(ValueError, match="3 query heads cannot share 2 kv heads"):
        decode_attention(q[:, :3], k, v, *at)
    with pytest.raises(ValueError, match="window must be at least 1"):
        decode_attention(q, k, v, *at, window=0)
