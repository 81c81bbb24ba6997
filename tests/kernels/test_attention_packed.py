"""The backends of packed rows equal the reference where they run on a CPU; cuDNN is tested by its table and lowering."""

import re
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.attention import blocked, cudnn, cudnn_segments, reference, splash
from jaxrl_llm.kernels.attention.api import BACKENDS, Call, attention
from jaxrl_llm.kernels.attention.specs import SPECS


@dataclass(frozen=True)
class Gpu:
    compute_capability: str
    platform: str = "gpu"


def call_of(**changes):
    given = {"platform": "gpu", "dtype": "bfloat16", "batch": 2, "queries": 256, "keys": 256, "heads": 4, "kv_heads": 2}
    given |= {"width": 64, "window": None, "scale": 0.125, "max_segments": 3}
    return Call(**{**given, **changes})


def rows(*lengths, total=256):
    """int32 [B, total] segments and positions of rows with segments of these lengths, then padding."""
    segments, positions = np.zeros((2, len(lengths), total), np.int32)
    for row, of_row in enumerate(lengths):
        start = 0
        for i, n in enumerate(of_row):
            segments[row, start : start + n], positions[row, start : start + n] = i + 1, np.arange(n)
            start += n
    return jnp.asarray(segments), jnp.asarray(positions)


ATTENDS = {
    "splash": partial(splash.attend, interpret=True),
    "cudnn_segments": partial(cudnn_segments.attend, implementation="xla"),
    "blocked": blocked.attend,
}


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("backend", ATTENDS)
def test_a_packed_backend_equals_the_reference_forward_and_backward(backend, window, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCKS", (32,))
    call = call_of(platform="tpu", dtype="float32", window=window)
    segments, positions = rows((100, 60, 96), (30, 128, 50))
    rng = np.random.default_rng(0)
    q, g = (jnp.asarray(rng.normal(size=(2, 256, 4, 64)), jnp.float32) for _ in range(2))
    k, v = (jnp.asarray(rng.normal(size=(2, 256, 2, 64)), jnp.float32) for _ in range(2))

    def step(attend):
        def total(q, k, v):
            out = attend(q, k, v, (positions, positions), (segments, segments), call)
            return (out * g).sum(), out

        (_, out), gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)
        return out, gradients

    out, gradients = step(ATTENDS[backend])
    want, true = step(reference.attend)
    np.testing.assert_allclose(out, want, atol=2e-5)
    assert (np.asarray(out)[np.asarray(segments) == 0] == 0).all()
    for mine, theirs in zip(gradients, true):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
        assert (np.asarray(mine)[np.asarray(segments) == 0] == 0).all()


def test_blocks_that_no_query_sees_are_skipped():
    """Rows of 256 in blocks of 32: by the table, from the block where the earliest segment or window begins."""
    segments, positions = rows((100, 60, 96), (30, 128, 50))
    places = blocked.Places(positions, positions, segments, segments)
    ranges = lambda call: [tuple(map(int, blocked._keys(call, places, i, 32))) for i in map(jnp.int32, range(8))]  # noqa: E731
    # Segments begin at 0, 100 and 160, and at 0, 30 and 158; block 7 has padding alone in the second row.
    assert ranges(call_of()) == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (4, 6), (4, 7), (5, 8)]
    assert ranges(call_of(window=33)) == [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 7), (6, 8)]
    assert ranges(call_of(max_segments=None)) == [(0, 8)] * 8


def test_long_rows_take_memory_that_grows_with_the_tokens_and_not_with_their_square():
    """4,096 float32 tokens of 4 heads: scores would take 256 MiB, once forward and more than once backward."""
    length, heads, width = 4096, 4, 32
    shape = jax.ShapeDtypeStruct((1, length, heads, width), jnp.float32)
    places = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def total(q, k, v, positions, segments):
        where = {"q_positions": positions, "k_positions": positions, "q_segments": segments, "k_segments": segments}
        return attention(q, k, v, **where, max_segments=4).sum()

    with dispatch.recording() as chosen:
        lowered = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2))).lower(shape, shape, shape, places, places)
    assert [(c.op, c.backend) for c in chosen] == [("attention", "blocked")]
    assert "256 MiB" in chosen[0].refused["reference"]
    array = 4 * length * heads * width  # bytes of q, 2 MiB
    # Some arrays of the size of q, and four blocks of scores at a time, each of 1024 x 1024 x 4 heads.
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 12 * array + 6 * 4 * heads * 1024**2


def test_splash_lowers_for_tpu():
    call = call_of(platform="tpu", queries=1024, keys=1024, width=128)
    q, kv = (jax.ShapeDtypeStruct((2, 1024, heads, 128), jnp.bfloat16) for heads in (4, 2))
    places = jax.ShapeDtypeStruct((2, 1024), jnp.int32)

    def total(q, k, v, positions, segments):
        out = splash.attend(q, k, v, (positions, positions), (segments, segments), call)
        return out.astype(jnp.float32).sum()

    step = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))
    text = step.trace(q, kv, kv, places, places).lower(lowering_platforms=("tpu",)).as_text()
    # One kernel forward, two backward: for the queries, and for keys and values.
    assert len(re.findall(r"custom_call @tpu_custom_call", text)) == 3


def test_the_table_of_segments_is_that_of_the_rows():
    segments = jnp.array(
        [
            [1, 1, 1, 2, 2, 3, 0, 0],
            [7, 7, 7, 7, 7, 7, 7, 7],
            [0, 0, 4, 4, 0, 9, 9, 9],
            [0, 0, 0, 0, 0, 0, 0, 0],
        ]
    )
    offsets, lengths = cudnn.segment_table(segments, 3)
    np.testing.assert_array_equal(offsets, [[0, 3, 5, -1], [0, -1, -1, -1], [2, 5, -1, -1], [-1, -1, -1, -1]])
    np.testing.assert_array_equal(lengths, [[3, 2, 1], [8, -1, -1], [2, 3, -1], [-1, -1, -1]])
    assert offsets.dtype == lengths.dtype == jnp.int32
    offsets, lengths = cudnn.segment_table(segments[1:2], 1)
    assert (offsets.tolist(), lengths.tolist()) == ([[0, -1, -1]], [[8, -1]])


def test_cudnn_lowers_to_its_packed_causal_kernels(monkeypatch):
    """The private interface takes the call and asks cuDNN for padding with causality; nothing runs here."""
    from jax._src.cudnn import fused_attention_stablehlo as private

    monkeypatch.setattr(private, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(private, "check_compute_capability", lambda capability: True)
    q, kv = (jax.ShapeDtypeStruct((2, 256, heads, 64), jnp.bfloat16) for heads in (4, 2))
    places = jax.ShapeDtypeStruct((2, 256), jnp.int32)

    def total(q, k, v, positions, segments):
        out = cudnn.attend(q, k, v, (positions, positions), (segments, segments), call_of(window=40))
        return out.astype(jnp.float32).sum()

    step = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))
    text = step.trace(q, kv, kv, places, places).lower(lowering_platforms=("cuda",)).as_text().replace("\\22", '"')
    assert len(re.findall(r"__cudnn\$fmhaSoftmax[\"(]", text)) == 1
    assert len(re.findall(r"__cudnn\$fmhaSoftmaxBackward[\"(]", text)) == 1
    assert re.findall(r'"mask_type": "(\w+)"', text) == ["PADDING_CAUSAL"] * 2
    assert re.findall(r'"sliding_window_length": (\d+)', text) == ["40"] * 2
    assert re.findall(r'"max_seg_per_batch": "?(\d+)', text) == ["3"] * 2


def test_ampere_takes_cudnn_one_segment_at_a_time(monkeypatch):
    """The public interface takes the call and asks cuDNN for causality within lengths; nothing runs here."""
    from jax._src.cudnn import fused_attention_stablehlo as private

    monkeypatch.setattr(private, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(private, "check_compute_capability", lambda capability: capability == "8.0")
    q, kv = (jax.ShapeDtypeStruct((2, 512, heads, 64), jnp.bfloat16) for heads in (4, 2))
    places = jax.ShapeDtypeStruct((2, 512), jnp.int32)

    def total(q, k, v, positions, segments):
        where = {"q_positions": positions, "k_positions": positions, "q_segments": segments, "k_segments": segments}
        return attention(q, k, v, **where, window=40, max_segments=3).astype(jnp.float32).sum()

    with dispatch.target(Gpu("8.0")), dispatch.recording() as chosen:
        step = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))
        text = step.trace(q, kv, kv, places, places).lower(lowering_platforms=("cuda",)).as_text().replace("\\22", '"')
    assert [c.backend for c in chosen] == ["cudnn_segments"]
    assert "9.0 or later (got 8.0)" in chosen[0].refused["cudnn"]
    # Forward, and in the backward pass forward again.
    assert len(re.findall(r"__cudnn\$fmhaSoftmax[\"(]", text)) == 2
    assert len(re.findall(r"__cudnn\$fmhaSoftmaxBackward[\"(]", text)) == 1
    assert re.findall(r'"mask_type": "(\w+)"', text) == ["PADDING_CAUSAL"] * 3
    assert re.findall(r'"sliding_window_length": (\d+)', text) == ["40"] * 3


LONG = {"queries": 16384, "keys": 16384}
PATHS = {
    "Hopper": (Gpu("9.0"), {}, "cudnn"),
    "Blackwell": (Gpu("12.0"), LONG, "cudnn"),
    "A100": (Gpu("8.0"), LONG, "cudnn_segments"),
    "RTX 4090": (Gpu("8.9"), LONG, "cudnn_segments"),
    "A100 in float32": (Gpu("8.0"), {"dtype": "float32"} | LONG, "blocked"),
    "A100, heads of 256": (Gpu("8.0"), {"width": 256} | LONG, "blocked"),
    "A100, short segments": (Gpu("8.0"), {"max_segments": 200} | LONG, "blocked"),
    "V100": (Gpu("7.0"), LONG, "blocked"),
    "another GPU": (Gpu("gfx90a"), LONG, "blocked"),
    "another GPU, short rows": (Gpu("gfx90a"), {}, "reference"),
    "CPU": (None, {"platform": "cpu", "dtype": "float32"}, "reference"),
    "CPU, long rows": (None, {"platform": "cpu", "dtype": "float32"} | LONG, "blocked"),
}


@pytest.mark.parametrize("device", PATHS)
def test_every_device_has_a_path_of_bounded_memory(device):
    target, changes, want = PATHS[device]
    with dispatch.target(target) if target else nullcontext():
        module = dispatch.choose("attention", BACKENDS, call_of(**changes), None)
    assert module.__name__.endswith(f".{want}")


REFUSED = {
    ("reference", "scores would take 8192 MiB, more than 64"): LONG,
    ("cudnn_segments", "takes one turn a segment, at most 2 of them"): {},
    ("cudnn", "runs on CUDA GPUs .got cpu"): {"platform": "cpu"},
    ("cudnn", "takes bfloat16 and float16, not float32"): {"dtype": "float32"},
    ("cudnn", "with max_segments given"): {"max_segments": None},
    ("cudnn", "queries are the keys' tokens"): {"queries": 1},
    ("cudnn", "multiple of 8 and at most 256 wide"): {"width": 36},
    ("splash", "runs on TPUs .got gpu"): {},
    ("splash", "multiple of 128 tokens"): {"platform": "tpu", "queries": 250, "keys": 250},
    ("splash", "multiple of 64 wide"): {"platform": "tpu", "width": 80},
    ("splash", "with max_segments given"): {"platform": "tpu", "max_segments": None},
}


@pytest.mark.parametrize("backend,reason", REFUSED)
def test_calls_that_do_not_fit_are_refused_with_the_reason(backend, reason):
    call = call_of(**REFUSED[backend, reason])
    assert not dispatch.supports("attention", backend, call)
    with pytest.raises(ValueError, match=reason):
        dispatch.choose("attention", (backend,), call, backend)


def test_an_untested_version_of_jax_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    assert "relies on internals" in cudnn.refusal(call_of())


def test_real_shapes_fit_the_packed_backends():
    for spec in (SPECS[name] for name in SPECS if name != "quickstart"):
        sizes = {"batch": spec.batch, "queries": spec.length, "keys": spec.length, "heads": spec.heads}
        call = call_of(platform="tpu", **sizes, kv_heads=spec.kv_heads, width=spec.width, window=spec.window)
        assert dispatch.choose("attention", BACKENDS, call, None) is splash


def test_a_cpu_gets_the_reference_and_a_named_backend_says_why_not():
    x = jnp.ones((1, 4, 1, 8))
    places = jnp.ones((1, 4), jnp.int32)
    where = {f"{a}_{b}": places for a in "qk" for b in ("positions", "segments")}
    assert attention(x, x, x, **where, max_segments=1).shape == x.shape
    with pytest.raises(ValueError, match=r"cudnn: it runs on CUDA GPUs \(got cpu\)"):
        attention(x, x, x, **where, backend="cudnn")
