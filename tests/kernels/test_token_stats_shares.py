"""token_stats of many tokens, taken a share at a time: the same numbers, and memory that does not grow with the tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from token_stats_float64 import statistics

from jaxrl_llm.kernels.token_stats import definition, fused, xla
from jaxrl_llm.kernels.token_stats.api import token_stats
from jaxrl_llm.kernels.token_stats.definition import OUTPUTS

KEY = jax.random.key(3)


def gradients_of(g, **options):
    """A function (hidden, head, bias, targets) -> ((loss, outputs), gradients of hidden and head, and of a bias)."""

    def total(hidden, head, bias, targets):
        out = token_stats(hidden, head, targets, bias=bias, backend="xla", **options)
        return sum((out[name] * g[name]).sum() for name in g), out

    return lambda *a: jax.value_and_grad(total, argnums=(0, 1) if a[2] is None else (0, 1, 2), has_aux=True)(*a)


def test_shares_give_the_float64_values_and_gradients(monkeypatch):
    # 13 tokens in shares of 5, of which the last begins at 8, these in blocks of at most 3 tokens and in tiles of 16 entries; the width bounds a
    # share as much as the tokens do.
    monkeypatch.setattr(fused, "SHARE", fused.Share(tokens=100, elements=5 * 8, unit=1))
    monkeypatch.setitem(xla.BUDGETS, "cpu", xla.Budget(tokens=3, elements=2**20, kept=2**21))
    tokens, width, vocabulary = 13, 8, 37
    rng = np.random.default_rng(0)
    hidden, head = (rng.normal(size=(n, width)).astype(np.float32) for n in (tokens, vocabulary))
    bias = rng.normal(size=vocabulary).astype(np.float32)
    bias[[0, 3, 35]] = -np.inf
    targets = np.array([1, 2, -1, 10, 36, 1, 5, -1, 7, 8, 9, 20, -1], np.int32)
    g = {name: rng.normal(size=tokens).astype(np.float32) for name in OUTPUTS}
    options = {"temperature": 0.7, "soft_cap": 3.0}
    step = jax.jit(gradients_of(g, outputs=OUTPUTS, noise_key=KEY, chunk=16, **options))
    dirty = np.where((targets == -1)[:, None], np.float32(np.nan), hidden)
    (_, out), gradients = step(dirty, head, bias, targets)
    words = jax.random.bits(KEY, (2,), jnp.uint32)
    noise = np.asarray(definition.noise(words, jnp.arange(tokens), jnp.arange(vocabulary)), np.float64)
    want, derived = statistics(hidden, head, targets, bias=bias, outputs=OUTPUTS, noise=noise, cotangents=g, **options)
    for name in OUTPUTS:
        np.testing.assert_allclose(out[name], want[name], atol=2e-5, rtol=2e-5, err_msg=name)
    for got, right in zip(gradients, derived, strict=True):
        assert np.linalg.norm(np.asarray(got, np.float64) - right) <= 1e-5 * np.linalg.norm(right)
    assert (np.asarray(gradients[0])[targets == -1] == 0).all()


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 4.5e-3), ("float32", 2e-3)])
def test_eight_shares_round_the_gradient_of_the_head_little_in_bfloat16_and_not_in_float32(dtype, bound, monkeypatch):
    # A rounding to 8 bits has a relative norm of about 1.6e-3: that of the logits' gradient, and one a share of a sum
    # that grows as the root of the shares: 1.6e-3 * sqrt(1 + 9 / 2) = 3.7e-3.
    tokens, width, vocabulary = 512, 32, 32
    monkeypatch.setattr(fused, "SHARE", fused.Share(tokens=tokens // 8, elements=2**20, unit=1))
    rng = np.random.default_rng(0)
    hidden, head = (jnp.asarray(rng.normal(size=(n, width)) / 4, jnp.bfloat16) for n in (tokens, vocabulary))
    targets = rng.integers(0, vocabulary, tokens).astype(np.int32)
    g = {name: rng.normal(size=tokens).astype(np.float32) for name in ("logprob", "entropy")}
    _, (dhidden, dhead) = jax.jit(gradients_of(g))(hidden, head.astype(dtype), None, targets)
    _, derived = statistics(hidden, head, targets, outputs=tuple(g), noise=np.zeros((tokens, 1)), cotangents=g)
    assert dhead.dtype == dtype
    for got, right, most in zip((dhidden, dhead), derived, (4e-3, bound)):
        assert np.linalg.norm(np.asarray(got, np.float64) - right) < most * np.linalg.norm(right)


def test_temporary_memory_does_not_grow_with_the_tokens_and_holds_no_second_gradient_of_the_head(monkeypatch):
    share, width, vocabulary = 64, 64, 8192

    def needed(shares, size):
        monkeypatch.setattr(fused, "SHARE", fused.Share(tokens=size, elements=2**20, unit=1))
        rows, targets = (jax.ShapeDtypeStruct((shares * share,), dtype) for dtype in (jnp.float32, jnp.int32))
        hidden, head = (jax.ShapeDtypeStruct((n, width), jnp.float32) for n in (shares * share, vocabulary))
        step = jax.jit(lambda g, h, w, t: gradients_of({"logprob": g, "entropy": g}, chunk=256)(h, w, None, t))
        return step.lower(rows, hidden, head, targets).compile().memory_analysis().temp_size_in_bytes

    few, many, whole = needed(4, share), needed(32, share), needed(32, 32 * share)
    more_tokens = 28 * share
    assert many - few < 32 * more_tokens  # a few numbers a token
    assert whole - few > 4 * width * more_tokens  # what the sum of all tokens would take
    assert many < 4 * vocabulary * width / 4
