"""Queries, keys and values of a gated delta rule equal NumPy's token by token, and their gradients its finite differences, by each backend."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.kernels.delta_inputs import triton
from jaxrl_llm.kernels.delta_inputs.api import Call, delta_inputs

ROWS, KEY_HEADS, WIDTH, VALUE_HEADS, TAPS = 2, 2, 4, 3, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * WIDTH
SIZES = {"key_heads": KEY_HEADS, "key_width": WIDTH, "value_width": WIDTH}
# Segments of one and of several tokens, padding (-1), and the boundaries of blocks of 4 and spans of 8 tokens within and between them.
ENDS = (3, 4, 8, 13, 15, 21)


@pytest.fixture(params=["reference", "triton"])
def backend(request, monkeypatch):
    """Each backend by name; the kernels of `triton` interpreted, in spans of two blocks of 4 tokens."""
    if request.param == "triton":
        monkeypatch.setattr(triton, "refusal", lambda call: None)
        monkeypatch.setattr(triton, "RUNS_ON", ("cpu", ""))
        monkeypatch.setattr(triton, "HOW", triton.How(block=4, blocks=2, interpret=True))
    return request.param


def given(length):
    rng = np.random.default_rng(length)
    x, taps = rng.normal(size=(ROWS, length, CHANNELS)), rng.normal(size=(CHANNELS, TAPS))
    x[0, 2:3] = 0
    segments = np.searchsorted(np.array(ENDS), np.arange(length), side="right") + 1
    segments[13:15] = -1
    return x, taps, jnp.asarray(np.tile(segments, (ROWS, 1)), jnp.int32)


def by_numpy(x, taps, segments):
    """Token by token and head by head."""
    segments, total = np.asarray(segments), np.zeros(x.shape)
    for b, t in np.ndindex(*x.shape[:2]):
        for back in range(min(TAPS, t + 1)):
            if segments[b, t - back] == segments[b, t]:
                total[b, t] += taps[:, -1 - back] * x[b, t - back]
    s = total / (1 + np.exp(-total))
    heads = s.reshape(*s.shape[:2], -1, WIDTH)
    q, k, v = np.split(heads, [KEY_HEADS, 2 * KEY_HEADS], axis=2)
    q, k = (y / np.sqrt(np.sum(y * y, axis=-1, keepdims=True) + 1e-6) for y in (q, k))
    return q / np.sqrt(WIDTH), k, v


@pytest.mark.parametrize("length", [1, 8, 23])
def test_backends_equal_numpy_token_by_token(backend, length):
    x, taps, segments = given(length)
    got = delta_inputs(jnp.float32(x), jnp.float32(taps), segments, backend=backend, **SIZES)
    for one, want in zip(got, by_numpy(x, taps, segments)):
        np.testing.assert_allclose(one, want, atol=3e-6)


def test_gradients_equal_finite_differences_in_float64(backend):
    length = 23
    x, taps, segments = given(length)
    rng = np.random.default_rng(0)
    slopes = [rng.normal(size=y.shape) for y in by_numpy(x, taps, segments)]

    def value(x, taps):
        return sum(np.sum(y * slope) for y, slope in zip(by_numpy(x, taps, segments), slopes))

    run = partial(delta_inputs, segments=segments, backend=backend, **SIZES)
    _, back = jax.vjp(lambda x, taps: run(x, taps), jnp.float32(x), jnp.float32(taps))
    of_x, of_taps = back(tuple(jnp.float32(slope) for slope in slopes))
    step = 1e-5
    for array, got, count in ((x, of_x, 60), (taps, of_taps, 40)):
        for place in rng.choice(array.size, count, replace=False):
            at, kept = np.unravel_index(place, array.shape), array.flat[place]
            found = []
            for change in (step, -step):
                array[at] = kept + change
                found.append(value(x, taps))
            array[at] = kept
            want = (found[0] - found[1]) / (2 * step)
            # Where all inputs of a vector are 0 its gradient is a thousand times the slope.
            np.testing.assert_allclose(got[at], want, rtol=2e-4, atol=2e-5)


def test_outputs_and_gradients_have_the_dtype_of_the_projection(backend):
    x, taps, segments = given(9)
    x16, taps16 = jnp.bfloat16(x), jnp.bfloat16(taps)
    got, back = jax.vjp(lambda x, taps: delta_inputs(x, taps, segments, backend=backend, **SIZES), x16, taps16)
    want = by_numpy(*(np.asarray(y, np.float64) for y in (x16, taps16)), segments)
    for one, exact in zip(got, want):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(one, np.float64), exact, rtol=2**-8, atol=1e-6)
    assert [y.dtype for y in back(got)] == [jnp.bfloat16] * 2


def test_earlier_inputs_are_those_of_a_longer_row():
    x, taps, _ = (jnp.float32(y) for y in given(11))
    one = jnp.ones((ROWS, 11), jnp.int32)
    whole = delta_inputs(x, taps, one, **SIZES)
    rest = delta_inputs(x[:, 5:], taps, one[:, 5:], x[:, 2:5], **SIZES)
    for a, b in zip(whole, rest):
        np.testing.assert_allclose(a[:, 5:], b, atol=1e-6)


def test_rows_on_two_devices_give_the_same_gradients(backend):
    x, taps, segments = given(9)
    x, taps = jnp.float32(x), jnp.float32(taps)
    run = partial(delta_inputs, backend=backend, **SIZES)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    rows = PartitionSpec("data")
    apart = jax.shard_map(
        run, mesh=mesh, in_specs=(rows, PartitionSpec(), rows), out_specs=(rows,) * 3, check_vma=False
    )

    def gradients(function):
        def loss(x, taps):
            return sum(jnp.sum(jnp.sin(y)) for y in function(x, taps, segments))

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, taps)

    for a, b in zip(gradients(run), gradients(apart)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"key_width": 24}, "wide"), ({"value_width": 512}, "wide"), ({"continued": True}, "no inputs before")],
)
def test_the_kernels_say_what_they_cannot_take(monkeypatch, change, reason):
    monkeypatch.setattr(triton.dispatch, "capability", lambda: (9, 0))
    sizes = {"platform": "gpu", "key_heads": 2, "key_width": 128, "value_width": 128, "continued": False}
    assert triton.refusal(Call(**sizes)) is None
    assert reason in (triton.refusal(Call(**(sizes | change))) or "")
