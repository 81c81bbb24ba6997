"""The gated delta rule in chunks equals its recurrence in float64: outputs, state and gradients, alone and in packed rows."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import slow_but

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.delta_rule import triton
from jaxrl_llm.kernels.delta_rule.api import Call, delta_rule
from jaxrl_llm.kernels.delta_rule.definition import inverse
from jaxrl_llm.kernels.delta_step import triton as triton_step
from jaxrl_llm.kernels.delta_step.api import delta_step
from jaxrl_llm.kernels.delta_step.reference import step
from jaxrl_llm.models.gated_delta import continued

ROWS, KEY_HEADS, TIMES, DK, DV = 2, 2, 2, 16, 8
NAMES = ("q", "k", "v", "g", "beta", "state")


def recurrence(q, k, v, g, beta, state):
    """Token by token in NumPy: outputs [B, T, Hv, dv] and the last state [B, Hv, dk, dv]."""
    q, k = (np.repeat(x, v.shape[2] // k.shape[2], axis=2) for x in (q, k))
    state, out = state.copy(), np.zeros(v.shape)
    for b, t, h in np.ndindex(*v.shape[:3]):
        decayed = np.exp(g[b, t, h]) * state[b, h]
        change = beta[b, t, h] * (v[b, t, h] - decayed.T @ k[b, t, h])
        state[b, h] = decayed + np.outer(k[b, t, h], change)
        out[b, t, h] = state[b, h].T @ q[b, t, h]
    return out, state


def gradients(q, k, v, g, beta, state, on_out, on_state):
    """Gradients of sum(out on_out) + sum(last on_state) by the chain rule, token by token backwards, in NumPy."""
    times = v.shape[2] // k.shape[2]
    qs, ks = (np.repeat(x, times, axis=2) for x in (q, k))
    d = {"q": np.zeros(qs.shape), "k": np.zeros(ks.shape), "state": np.zeros(state.shape)}
    d |= {"v": np.zeros(v.shape), "g": np.zeros(g.shape), "beta": np.zeros(beta.shape)}
    for b, h in np.ndindex(v.shape[0], v.shape[2]):
        before = [state[b, h]]
        for t in range(v.shape[1]):
            one = [x[b : b + 1, t : t + 1, h : h + 1] for x in (qs, ks, v, g, beta)]
            before.append(recurrence(*one, before[-1][None, None])[1][0, 0])
        slope = on_state[b, h].copy()
        for t in reversed(range(v.shape[1])):
            kt, strength, factor = ks[b, t, h], beta[b, t, h], np.exp(g[b, t, h])
            slope += np.outer(qs[b, t, h], on_out[b, t, h])
            d["q"][b, t, h] = before[t + 1] @ on_out[b, t, h]
            decayed = factor * before[t]
            error = v[b, t, h] - decayed.T @ kt
            of_change = slope.T @ kt
            d["beta"][b, t, h] = of_change @ error
            d["v"][b, t, h] = strength * of_change
            d["k"][b, t, h] = slope @ (strength * error) - decayed @ (strength * of_change)
            of_decayed = slope - np.outer(kt, strength * of_change)
            d["g"][b, t, h] = np.sum(of_decayed * decayed)
            slope = factor * of_decayed
        d["state"][b, h] = slope
    for name in ("q", "k"):
        d[name] = d[name].reshape(*d[name].shape[:2], -1, times, DK).sum(3)
    return d


def inputs(length, seed=0):
    rng = np.random.default_rng(seed)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    heads = KEY_HEADS * TIMES
    q, k = (unit(rng.normal(size=(ROWS, length, KEY_HEADS, DK))) for _ in range(2))
    v = rng.normal(size=(ROWS, length, heads, DV))
    g = -np.exp(rng.normal(-2, 2, (ROWS, length, heads)))
    beta = 1 / (1 + np.exp(-rng.normal(size=g.shape)))
    # The values of float32, so that only the arithmetic differs.
    found = (q, k, v, g, beta, rng.normal(size=(ROWS, heads, DK, DV)))
    return tuple(x.astype(np.float32).astype(np.float64) for x in found)


def assert_close(got, want, name, tolerance=1e-5):
    assert np.abs(np.asarray(got) - want).max() <= tolerance * max(np.abs(want).max(), 1e-3), name


def in_float32(*values):
    return tuple(jnp.asarray(x, jnp.float32) for x in values)


INTERPRETED = triton.How(*[triton.Size(4)] * 6, limbs=3, interpret=True)


@pytest.fixture(params=["xla", "triton"])
def backend(request, monkeypatch):
    """Each backend by name; the kernels of `triton` interpreted, in two blocks of the values' columns and in strips."""
    if request.param == "triton":
        monkeypatch.setattr(triton, "refusal", lambda call: None)
        monkeypatch.setattr(triton, "RUNS_ON", ("cpu", ""))
        monkeypatch.setattr(triton, "HOW", INTERPRETED)
    return request.param


@pytest.mark.parametrize("size", slow_but((64,), (16, 32, 64)))
@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 200])
def test_chunks_equal_the_recurrence_in_float64_with_all_six_gradients(size, length):
    the_rule_equals_the_recurrence("xla", size, length)


@pytest.mark.parametrize(("backend", "length"), [("triton", 40), ("reference", 5)], indirect=["backend"])
def test_the_other_backends_equal_the_recurrence_in_float64_with_all_six_gradients(backend, length):
    the_rule_equals_the_recurrence(backend, 16, length)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernels_limbs_lose_no_more_than_their_last(dtype, monkeypatch):
    """Two limbs of 8 bits each, as on a GPU; q, k and v in bfloat16 are taken as they are, and their gradients rounded to it."""
    monkeypatch.setattr(triton, "refusal", lambda call: None)
    monkeypatch.setattr(triton, "RUNS_ON", ("cpu", ""))
    monkeypatch.setattr(triton, "HOW", triton.How(interpret=True))
    given = tuple(x.astype(dtype) if i < 3 else x for i, x in enumerate(in_float32(*inputs(40))))
    values = tuple(np.asarray(x, np.float64) for x in given)
    out, last = recurrence(*values)
    on_out, on_state = (np.random.default_rng(1).normal(size=x.shape) for x in (out, last))
    segments = jnp.ones((ROWS, 40), jnp.int32)
    run = jax.jit(lambda *x: jax.vjp(lambda *x: delta_rule(*x[:5], segments, x[5], size=16, backend="triton"), *x))
    found, back = run(*given)
    slopes, want = back(in_float32(on_out, on_state)), gradients(*values, on_out, on_state)
    for name, got, exact in zip(("out", "last", *NAMES), (*found, *slopes), (out, last, *(want[n] for n in NAMES))):
        rounded = got.dtype == jnp.bfloat16
        assert rounded == (dtype == jnp.bfloat16 and name in "qkv"), name
        far = np.linalg.norm(np.asarray(got, np.float64) - exact) / np.linalg.norm(exact)
        assert far < (2.0**-8 if rounded else 2.0**-15), name


def the_rule_equals_the_recurrence(backend, size, length):
    values, segments = inputs(length), jnp.ones((ROWS, length), jnp.int32)
    out, last = recurrence(*values)
    rng = np.random.default_rng(1)
    on_out, on_state = rng.normal(size=out.shape), rng.normal(size=last.shape)

    def objective(*x):
        found = delta_rule(*x[:5], segments, x[5], size=size, backend=backend)
        return jnp.sum(found[0] * in_float32(on_out)[0]) + jnp.sum(found[1] * in_float32(on_state)[0]), found

    run = jax.jit(jax.value_and_grad(objective, argnums=range(6), has_aux=True))
    (_, found), slopes = run(*in_float32(*values))
    assert_close(found[0], out, "out")
    assert_close(found[1], last, "state")
    for name, slope in zip(NAMES, slopes, strict=True):
        assert_close(slope, gradients(*values, on_out, on_state)[name], name)


def test_the_recurrent_form_takes_one_token_as_the_recurrence_does():
    *tokens, state = inputs(5)
    want, last = recurrence(*tokens, state)
    held, run = in_float32(state)[0], jax.jit(step)
    for t in range(5):
        out, held = run(*in_float32(*(x[:, t] for x in tokens)), held)
        assert_close(out, want[:, t], t)
    assert_close(held, last, "state")


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_step_advances_the_states_of_its_layer_alone(backend, monkeypatch):
    """By blocks of the values' columns where the kernel is interpreted."""
    *tokens, state = inputs(4)
    want, last = recurrence(*tokens, state)
    others = np.random.default_rng(4).normal(size=(3, *state.shape)).astype(np.float32)
    states = jnp.asarray(others).at[1].set(state)
    if backend == "triton":
        monkeypatch.setattr(triton_step, "advance", partial(triton_step.advance, columns=4, interpret=True))
        monkeypatch.setattr(triton_step, "RUNS_ON", ("cpu", ""))
        monkeypatch.setattr(triton_step, "refusal", lambda call: None)
    run = jax.jit(partial(delta_step, backend=backend))
    for t in range(4):
        out, states = run(*in_float32(*(x[:, t] for x in tokens)), states, jnp.int32(1))
        assert_close(out, want[:, t], t)
    assert_close(states[1], last, "state")
    assert np.array_equal(states[0], others[0]) and np.array_equal(states[2], others[2])


def test_gates_at_their_ends_stay_finite_and_right(backend):
    """Decays of e^-40 among others near 1, and updates that are left out or whole."""
    q, k, v, g, beta, state = inputs(150)
    rng = np.random.default_rng(2)
    g = np.where(rng.random(g.shape) < 0.3, -40.0, -1e-3).astype(np.float32).astype(np.float64)
    beta = rng.integers(0, 2, beta.shape).astype(np.float64)
    values, segments = (q, k, v, g, beta, state), jnp.ones((ROWS, 150), jnp.int32)
    out, last = recurrence(*values)

    def objective(*x):
        found = delta_rule(*x[:5], segments, x[5], backend=backend)
        return jnp.sum(found[0]) + jnp.sum(found[1]), found

    (_, found), slopes = jax.jit(jax.value_and_grad(objective, argnums=range(6), has_aux=True))(*in_float32(*values))
    assert_close(found[0], out, "out")
    assert_close(found[1], last, "state")
    want = gradients(*values, np.ones(out.shape), np.ones(last.shape))
    for name, slope in zip(NAMES, slopes, strict=True):
        assert np.isfinite(slope).all(), name
        assert_close(slope, want[name], name)


# -- packed rows -------------------------------------------------------------------------------------------------------

# Boundaries inside a chunk of 16, inside the reach of the convolution after another, and at a chunk's edge.
PARTS = [(0, 21), (21, 23), (23, 48), (48, 70)]
PACKED = 75  # with padding at the end


def packed_segments():
    segments = np.zeros(PACKED, np.int32)
    for number, (start, stop) in enumerate(PARTS, 1):
        segments[start:stop] = number
    return jnp.asarray(np.tile(segments, (ROWS, 1)))


def packed(*tokens, backend):
    """Outputs with padding masked as callers do, from a state of 0; q, k, v, g, beta."""
    segments = packed_segments()
    q, k, v, g, beta = tokens
    g, beta = (jnp.where((segments > 0)[..., None], x, 0.0) for x in (g, beta))
    state = jnp.zeros((ROWS, KEY_HEADS * TIMES, DK, DV))
    return delta_rule(q, k, v, g, beta, continued(segments), state, size=16, backend=backend)


def test_packed_segments_equal_each_alone_with_their_gradients(backend):
    *tokens, _ = inputs(PACKED)
    on_out = np.random.default_rng(3).normal(size=(ROWS, PACKED, KEY_HEADS * TIMES, DV))
    on_out[:, PARTS[-1][1] :] = 0
    run = jax.value_and_grad(
        lambda *x: (lambda found: (jnp.sum(found[0] * in_float32(on_out)[0]), found))(packed(*x, backend=backend)),
        argnums=range(5),
        has_aux=True,
    )
    (_, (out, last)), slopes = jax.jit(run)(*in_float32(*tokens))
    zero = np.zeros((ROWS, KEY_HEADS * TIMES, DK, DV))
    for start, stop in PARTS:
        part = [x[:, start:stop] for x in tokens]
        alone, state = recurrence(*part, zero)
        assert_close(out[:, start:stop], alone, (start, stop))
        want = gradients(*part, zero, on_out[:, start:stop], zero)
        for name, slope in zip(NAMES, slopes):
            assert_close(slope[:, start:stop], want[name], (name, start))
    assert_close(last, state, "the state after padding is that of the last token")


def test_a_neighbour_changes_no_bit_of_another_segment(backend):
    *tokens, _ = in_float32(*inputs(PACKED))
    other = [x.at[:, slice(*PARTS[1])].set(0.7 if i == 4 else -7.0) for i, x in enumerate(tokens)]
    one, two = (np.asarray(jax.jit(partial(packed, backend=backend))(*x)[0]) for x in (tokens, other))
    for number in (0, 2, 3):
        where = slice(*PARTS[number])
        assert np.array_equal(one[:, where], two[:, where])
    assert np.abs(one - two)[:, slice(*PARTS[1])].max() > 1e-2


def test_the_inverse_of_chunks_whose_keys_are_alike_is_exact():
    """Every entry below the diagonal 1: the inverse is two diagonals, and powers of the matrix reach 1e18."""
    links = jnp.tril(jnp.ones((64, 64)), -1)
    np.testing.assert_array_equal(inverse(links, jnp.matmul), np.eye(64) - np.eye(64, k=-1))


def test_what_does_not_fit_is_refused_with_what_would():
    q, k, v, g, beta, state = in_float32(*inputs(3))
    one = jnp.ones((ROWS, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"power of 2.*got 24"):
        delta_rule(q, k, v, g, beta, one, state, size=24)
    with pytest.raises(ValueError, match="4 value heads cannot share 3 key heads"):
        delta_rule(q[:, :, [0, 1, 1]], k[:, :, [0, 1, 1]], v, g, beta, one, state)
    with pytest.raises(ValueError, match="NVIDIA GPUs"):
        delta_rule(q, k, v, g, beta, one, state, backend="triton")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"key_width": 96}, "128 wide .got 96, 128"),
        ({"size": 128}, "16, 32 or 64 tokens .got 128"),
    ],
)
def test_the_kernels_say_what_they_do_not_take(change, reason, monkeypatch):
    monkeypatch.setattr(dispatch, "capability", lambda: (9, 0))
    sizes = {"tokens": 4096, "size": 64, "key_heads": 16, "value_heads": 16, "key_width": 128, "value_width": 128}
    found = triton.refusal(Call(**({"platform": "gpu", "rows": 8} | sizes | change)))
    assert found is None if reason is None else re.search(reason, found)
