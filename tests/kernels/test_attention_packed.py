"""The backends of packed rows: splash in interpret mode against the reference, cuDNN by its table and its lowering."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.attention import cudnn, reference, splash
from jaxrl_llm.kernels.attention.api import Call, attention
from jaxrl_llm.kernels.attention.specs import SPECS


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


@pytest.mark.parametrize("window", [None, 40])
def test_splash_equals_the_reference_forward_and_backward(window):
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

    out, gradients = step(partial(splash.attend, interpret=True))
    want, true = step(reference.attend)
    np.testing.assert_allclose(out, want, atol=2e-5)
    assert (np.asarray(out)[np.asarray(segments) == 0] == 0).all()
    for mine, theirs in zip(gradients, true):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
        assert (np.asarray(mine)[np.asarray(segments) == 0] == 0).all()


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


REFUSED = {
    ("cudnn", "runs on CUDA GPUs, not on cpu"): {"platform": "cpu"},
    ("cudnn", "takes bfloat16 and float16, not float32"): {"dtype": "float32"},
    ("cudnn", "with max_segments given"): {"max_segments": None},
    ("cudnn", "queries are the keys' tokens"): {"queries": 1},
    ("cudnn", "multiple of 8 and at most 256 wide"): {"width": 36},
    ("splash", "runs on TPUs, not on gpu"): {},
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
        assert dispatch.choose("attention", ("cudnn", "splash", "reference"), call, None) is splash


def test_a_cpu_gets_the_reference_and_a_named_backend_says_why_not():
    x = jnp.ones((1, 4, 1, 8))
    places = jnp.ones((1, 4), jnp.int32)
    where = {f"{a}_{b}": places for a in "qk" for b in ("positions", "segments")}
    assert attention(x, x, x, **where, max_segments=1).shape == x.shape
    with pytest.raises(ValueError, match="cudnn: it runs on CUDA GPUs, not on cpu"):
        attention(x, x, x, **where, backend="cudnn")
