"""Log-prob and entropy of given logits, and their gradients, against a float64 derivation."""

import inspect
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from token_stats_float64 import of_token

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.log_softmax_entropy import triton
from jaxrl_llm.kernels.log_softmax_entropy.api import BACKENDS, Call, log_softmax_entropy
from jaxrl_llm.kernels.log_softmax_entropy.specs import SPECS

T, V = 7, 23
TARGETS = np.array([1, -1, 22, 0, 5, -1, 9], np.int32)
G = np.random.default_rng(3).normal(size=(2, T)).astype(np.float32)


def logits_of(name):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(T, V)) * 3
    if name == "one entry takes all":
        z = np.eye(T, V, 1) * 500
    elif name == "logits of 1e4 and -1e4":
        z = np.where(z > 0, 1e4, -1e4)
    elif name == "equal":
        z = np.full((T, V), 7.0)
    elif name == "entries of -inf":
        z[:, [2, 7, 20]] = -np.inf
    return z.astype(np.float32)


CPU_BACKENDS = [*(name for name in BACKENDS if name != "triton"), "triton, interpreted"]


@partial(jax.jit, static_argnames=("backend", "temperature"))
def step(z, targets, *, backend, temperature=1.0):
    def total(z):
        if backend == "triton, interpreted":
            call = Call(platform="gpu", dtype="", tokens=T, vocabulary=V, temperature=temperature)
            out = triton._compute(call, True, triton.TILES, z, targets)
        else:
            out = log_softmax_entropy(z, targets, temperature=temperature, backend=backend)
        return (out[0] * G[0] + out[1] * G[1]).sum(), out

    (_, out), gradient = jax.value_and_grad(total, has_aux=True)(z)
    return out, gradient


NAMES = ["random", "one entry takes all", "logits of 1e4 and -1e4", "equal", "entries of -inf"]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_those_of_the_float64_derivation(name, backend, temperature):
    z = logits_of(name)
    (logprob, entropy), gradient = step(z, TARGETS, backend=backend, temperature=temperature)
    for t, target in enumerate(TARGETS):
        if target == -1:
            assert logprob[t] == entropy[t] == 0 and (np.asarray(gradient[t]) == 0).all()
            continue
        value, slope = of_token(np.float64(z[t]) / temperature, target, None, ["logprob", "entropy"])
        np.testing.assert_allclose(logprob[t], value["logprob"], rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(entropy[t], value["entropy"], rtol=1e-6, atol=1e-5)
        want = (G[0, t] * slope["logprob"] + G[1, t] * slope["entropy"]) / temperature
        np.testing.assert_allclose(gradient[t], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_the_same_call_gives_the_same_bits_and_bfloat16_gradients_are_bfloat16(backend):
    z = jnp.asarray(logits_of("random"), jnp.bfloat16)
    first, second = step(z, TARGETS, backend=backend), step(z, TARGETS, backend=backend)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert (first[0][0].dtype, first[1].dtype) == (jnp.float32, jnp.bfloat16)
    exact = step(z.astype(jnp.float32), TARGETS, backend=backend)
    np.testing.assert_allclose(first[0][0], exact[0][0], atol=1e-6)
    np.testing.assert_allclose(np.float32(first[1]), exact[1], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_targets_that_cannot_be_drawn(backend):
    z = logits_of("entries of -inf")
    targets = np.array([2, -1, 23, -100, 5, -1, 9], np.int32)
    (logprob, _), _ = step(z, targets, backend=backend)
    assert logprob[0] == -np.inf and np.isnan(logprob[2:4]).all() and np.isfinite(logprob[4:]).all()


def test_the_backward_keeps_no_array_of_the_size_of_the_logits_but_them():
    spec = SPECS["qwen2.5-3b"]
    z = jax.ShapeDtypeStruct((spec.tokens, spec.vocabulary), jnp.bfloat16)
    targets = jax.ShapeDtypeStruct((spec.tokens,), jnp.int32)

    def kept(z, targets):
        return jax.vjp(lambda z: log_softmax_entropy(z, targets, backend="xla"), z)[1]

    sizes = [leaf.size for leaf in jax.tree.leaves(jax.eval_shape(kept, z, targets))]
    assert sorted(n for n in sizes if n > spec.tokens) == [spec.tokens * spec.vocabulary]


@pytest.mark.parametrize("tiles", [triton.Tiles(width=4), triton.Tiles(depth=2, width=2, ahead=2)])
def test_triton_reads_rows_of_several_blocks_and_runs_on_nvidia_alone(tiles):
    call = Call(platform="gpu", dtype="float32", tokens=3, vocabulary=37, temperature=0.5)
    z = np.random.default_rng(1).normal(size=(3, 37)).astype(np.float32) * 4
    z[0, :16], z[1, 16:] = -np.inf, -1e4
    z = np.sort(z, axis=1)  # the maximum grows from block to block
    logprob, entropy = triton._compute(call, True, tiles, jnp.asarray(z), jnp.array([36, 0, 17]))
    for t, target in enumerate([36, 0, 17]):
        value, _ = of_token(np.float64(z[t]) / 0.5, target, None, ["logprob", "entropy"])
        np.testing.assert_allclose([logprob[t], entropy[t]], [value["logprob"], value["entropy"]], rtol=1e-6, atol=1e-5)
    assert "NVIDIA" in dispatch.refusal("log_softmax_entropy", "triton", replace(call, platform="cpu"))
    with pytest.raises(ValueError, match=r"triton: it runs on NVIDIA GPUs \(got cpu\)"):
        log_softmax_entropy(jnp.zeros((2, 3)), jnp.zeros(2, jnp.int32), backend="triton")


BAD = {
    r"targets must be \[T\]": (jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32), {}),
    "T and V of at least 1": (jnp.zeros((0, 3)), jnp.zeros(0, jnp.int32), {}),
    "logits must be one of": (jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32), {}),
    "targets must be integers": (jnp.zeros((2, 3)), jnp.zeros(2), {}),
    "temperature must be positive": (jnp.zeros((2, 3)), jnp.zeros(2, jnp.int32), {"temperature": -1.0}),
    "unknown log_softmax_entropy backend": (jnp.zeros((2, 3)), jnp.zeros(2, jnp.int32), {"backend": "liger"}),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused(message):
    logits, targets, options = BAD[message]
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(log_softmax_entropy)(logits, targets, **options)
