"""Every backend of token_stats that runs on a CPU against a float64 derivation, on friendly and hostile inputs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from token_stats_float64 import of_token, statistics

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.token_stats import definition, xla
from jaxrl_llm.kernels.token_stats.api import token_stats
from jaxrl_llm.kernels.token_stats.definition import OUTPUTS

T, D, V = 13, 8, 37
KEY = jax.random.key(3)
TARGETS = np.array([1, 2, -1, 10, 36, 0, 5, -1, 7, 8, 9, 20, 30], np.int32)
TOKENS = jnp.asarray(TARGETS)
VARIANTS = {
    "reference": {"backend": "reference"},
    "xla, one tile": {"backend": "xla"},
    "xla, ragged tiles": {"backend": "xla", "chunk": 7},
    "xla, ragged tiles and blocks of tokens": {"backend": "xla", "chunk": 16, "blocks": True},
}
OPTIONS = {
    "temperature": {},
    "bias": {"bias": True, "temperature": 1.0},
    "soft cap": {"soft_cap": 3.0, "bias": True, "temperature": 1.3},
}


@pytest.fixture(params=VARIANTS)
def variant(request, monkeypatch):
    """Arguments that choose a backend; token blocks of 5 where the variant says so."""
    if VARIANTS[request.param].get("blocks"):
        monkeypatch.setitem(xla.BUDGETS, "cpu", xla.Budget(tokens=5, elements=2**20, kept=2**21))
    return request.param


def noise_of(key, tokens=T, entries=V):
    words = jax.random.bits(key, (2,), jnp.uint32)
    return np.asarray(definition.noise(words, jnp.arange(tokens), jnp.arange(entries)), np.float64)


def cotangents(tokens=T):
    return {name: np.random.default_rng(i).normal(size=tokens).astype(np.float32) for i, name in enumerate(OUTPUTS)}


@partial(jax.jit, static_argnames=("variant", "soft_cap", "temperature"))
def values_and_gradients(hidden, head, bias, targets, g, *, variant, soft_cap=None, temperature=0.7):
    def total(hidden, head, bias):
        out = token_stats(
            hidden,
            head,
            targets,
            outputs=OUTPUTS,
            noise_key=KEY,
            bias=bias,
            soft_cap=soft_cap,
            temperature=temperature,
            backend=VARIANTS[variant]["backend"],
            chunk=VARIANTS[variant].get("chunk"),
        )
        return sum((out[name] * g[name]).sum() for name in OUTPUTS), out

    arguments = (0, 1) if bias is None else (0, 1, 2)
    (_, out), gradients = jax.value_and_grad(total, argnums=arguments, has_aux=True)(hidden, head, bias)
    return out, gradients


def check(hidden, head, variant, *, bias=None, targets=TARGETS, value=2e-5, gradient=1e-5, **options):
    g = cotangents(len(targets))
    options = {"temperature": 0.7, **options}
    got, gradients = values_and_gradients(hidden, head, bias, targets, g, variant=variant, **options)
    noise = noise_of(KEY, len(targets), head.shape[0])
    want, derived = statistics(hidden, head, targets, bias=bias, outputs=OUTPUTS, noise=noise, cotangents=g, **options)
    for name in OUTPUTS:
        np.testing.assert_allclose(got[name], want[name], atol=value, rtol=value, err_msg=name)
        assert (np.asarray(got[name])[targets == -1] == 0).all()
    for name, mine, true in zip(("hidden", "head", "bias"), gradients, derived):
        error = np.linalg.norm(np.asarray(mine, np.float64) - true)
        assert error <= gradient * (np.linalg.norm(true) + 1), f"{name}: {error} of {np.linalg.norm(true)}"
    assert (np.asarray(gradients[0])[targets == -1] == 0).all()
    return got, gradients


def arrays(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(T, D)), dtype), jnp.asarray(rng.normal(size=(V, D)), dtype)


def bias_with_holes():
    bias = np.random.default_rng(5).normal(size=V).astype(np.float32)
    bias[[0, 3, 35]] = -np.inf
    return bias


@pytest.mark.parametrize("options", OPTIONS)
def test_values_and_gradients_are_those_of_the_float64_derivation(variant, options):
    options = dict(OPTIONS[options])
    bias = bias_with_holes() if options.pop("bias", False) else None
    targets = np.where(TARGETS == 0, 1, TARGETS) if bias is not None else TARGETS  # entry 0 has probability 0
    check(*arrays(), variant, bias=bias, targets=targets, **options)


def hostile():
    rng = np.random.default_rng(1)
    signs = rng.integers(0, 2, size=(V, D)) * 2.0 - 1
    head = np.zeros((V, D))
    head[np.arange(V), np.arange(V) % D] = 1 + np.arange(V)
    return {
        "one entry takes all": (np.eye(T, D) * 50 + 1, head),
        "uniform": (rng.normal(size=(T, D)), np.zeros((V, D))),
        "logits of 1e4 and -1e4": (np.full((T, D), 1250.0), np.where(rng.random((V, 1)) < 0.5, signs, signs[:, :1])),
        "equal rows": (np.tile(rng.normal(size=(1, D)), (T, 1)), np.tile(rng.normal(size=(1, D)), (V, 1))),
    }


@pytest.mark.parametrize("name", hostile())
def test_hostile_logits_lose_no_accuracy(variant, name):
    hidden, head = (jnp.asarray(x, jnp.float32) for x in hostile()[name])
    got, _ = check(hidden, head, variant)
    if name in ("uniform", "equal rows"):
        kept = TARGETS != -1
        np.testing.assert_allclose(got["entropy"][kept], np.log(V), rtol=1e-6)
        np.testing.assert_allclose(got["sum_p2"][kept], 1 / V, rtol=1e-6)


def test_bfloat16_inputs_meet_the_bounds_of_the_readme(variant):
    check(*arrays(dtype=jnp.bfloat16), variant, value=1e-3, gradient=1e-2)


def test_skipped_rows_may_hold_nan(variant):
    hidden, head = arrays()
    g = cotangents()
    _, clean = values_and_gradients(hidden, head, None, TARGETS, g, variant=variant)
    dirty = jnp.where((TARGETS == -1)[:, None], jnp.nan, hidden)
    out, gradients = values_and_gradients(dirty, head, None, TARGETS, g, variant=variant)
    assert all((np.asarray(out[name])[TARGETS == -1] == 0).all() for name in OUTPUTS)
    np.testing.assert_array_equal(gradients[0], clean[0])
    np.testing.assert_array_equal(gradients[1], clean[1])


def test_the_same_call_gives_the_same_bits(variant):
    hidden, head = arrays()
    first = values_and_gradients(hidden, head, None, TARGETS, cotangents(), variant=variant)
    second = values_and_gradients(hidden, head, None, TARGETS, cotangents(), variant=variant)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_a_target_out_of_the_softmax_has_log_prob_minus_infinity_and_a_finite_gradient(variant):
    hidden, head = arrays()
    bias = bias_with_holes()
    targets = np.where(TARGETS == 1, 3, TARGETS)  # entry 3 has a bias of -inf
    out, gradients = values_and_gradients(hidden, head, bias, targets, cotangents(), variant=variant, temperature=1.0)
    np.testing.assert_array_equal(np.isneginf(out["logprob"]), (targets != -1) & np.isin(targets, [0, 3, 35]))
    assert not np.isnan(out["logprob"]).any()
    assert all(np.isfinite(np.asarray(g)).all() for g in gradients)


def test_a_target_outside_the_vocabulary_has_a_nan_log_prob(variant):
    hidden, head = arrays()
    for wrong in (V, -100):
        out, _ = values_and_gradients(
            hidden, head, None, np.where(TARGETS == 1, wrong, TARGETS), cotangents(), variant=variant
        )
        np.testing.assert_array_equal(np.isnan(out["logprob"]), np.arange(T) == 0)


def test_one_token_and_one_entry(variant):
    hidden, head = jnp.ones((1, 1)), jnp.ones((1, 1))
    targets = np.zeros(1, np.int32)
    got, _ = check(hidden, head, variant, targets=targets)
    assert {name: float(x[0]) for name, x in got.items()} == {**dict.fromkeys(OUTPUTS, 0.0), "sum_p2": 1.0}


def test_the_entropy_gradient_is_that_of_finite_differences():
    rng = np.random.default_rng(2)
    hidden, head = rng.normal(size=(1, D)), rng.normal(size=(V, D))

    def entropy(h):
        return of_token((head @ h[0]), 0, np.zeros(V), ["entropy"])[0]["entropy"]

    step = 1e-5
    want = [(entropy(hidden + step * e) - entropy(hidden - step * e)) / (2 * step) for e in np.eye(D)[:, None]]
    for name in ("reference", "xla"):
        got = jax.grad(
            lambda h, name=name: token_stats(h, jnp.float32(head), jnp.zeros(1, jnp.int32), backend=name)["entropy"][0]
        )(jnp.float32(hidden))
        np.testing.assert_allclose(got[0], want, atol=2e-6)


def test_gradients_come_in_the_dtypes_of_their_inputs():
    hidden, head = arrays()
    for hidden_dtype, head_dtype in ((jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)):
        for chunk in (None, 16):
            h, w = hidden.astype(hidden_dtype), head.astype(head_dtype)
            got = jax.grad(lambda h, w, c=chunk: token_stats(h, w, TOKENS, chunk=c)["logprob"].sum(), (0, 1))(h, w)
            assert (got[0].dtype, got[1].dtype) == (hidden_dtype, head_dtype)


def test_noise_is_threefry_of_token_and_entry():
    # Random123's known answer: Threefry2x32-20 of counter (0, 0) and key (0, 0) begins with 6b200159.
    got = definition.noise(jnp.zeros(2, jnp.uint32), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
    assert float(got[0, 0]) == ((0x6B200159 >> 9) + 0.5) / 2**23
    whole = noise_of(KEY, 40, 50)
    part = definition.noise(jax.random.bits(KEY, (2,), jnp.uint32), jnp.arange(30, 40), jnp.arange(20, 50))
    np.testing.assert_array_equal(whole[30:, 20:], part)
    assert len(np.unique(noise_of(KEY, 100, 100))) > 9990  # of 2^23 values
    many = noise_of(jax.random.key(9), 300, 300)
    assert abs(many.mean() - 0.5) < 0.005 and abs(many.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(many[:-1].ravel(), many[1:].ravel())[0, 1]) < 0.02


def test_noise_has_the_expectation_of_the_uniform_log_prob_without_the_target():
    hidden, head = arrays()
    keys = jax.random.split(jax.random.key(1), 400)
    draw = jax.jit(
        jax.vmap(lambda k: token_stats(hidden, head, TOKENS, outputs=("noise_logprob",), noise_key=k)["noise_logprob"])
    )
    plain = token_stats(hidden, head, TOKENS, outputs=("logprob", "uniform_logprob"))
    others = (plain["uniform_logprob"] * V - plain["logprob"]) / (V - 1)
    drawn = np.asarray(draw(keys))
    error = drawn.std(axis=0) / np.sqrt(len(keys))
    assert (np.abs(drawn.mean(axis=0) - others) <= 5 * error).all()
    assert not np.allclose(drawn[0], drawn[1])


def test_checked_mode_reports_a_target_outside_the_vocabulary():
    hidden, head = arrays()
    stats = jax.jit(lambda t: token_stats(hidden, head, t, checked=True)["logprob"])
    checked = checkify.checkify(stats, errors=checkify.user_checks)
    error, _ = checked(jnp.asarray(TARGETS))
    assert error.get() is None
    error, _ = checked(jnp.full(T, V))
    assert f"outside [0, {V})" in error.get()


def test_a_program_is_the_same_whatever_was_traced_before_it():
    """So that a resumed run, which traces fewer programs, finds those that are kept."""
    hidden, head = arrays()
    text = lambda: jax.jit(lambda t: token_stats(hidden, head, t)["logprob"]).lower(jnp.asarray(TARGETS)).as_text()  # noqa: E731
    assert text() == text()


def test_the_dispatcher_takes_the_first_backend_that_supports_the_call():
    call = definition.Call(
        platform="cpu",
        dtype="float32",
        tokens=T,
        width=D,
        vocabulary=V,
        outputs=("logprob",),
        temperature=1.0,
        soft_cap=None,
        biased=False,
        chunk=None,
        shards=2,
    )
    assert dispatch.choose("token_stats", ("reference", "xla"), call, None) is xla
    assert not dispatch.supports("token_stats", "reference", call)
    with pytest.raises(ValueError, match="reference: it runs on one device"):
        dispatch.choose("token_stats", ("reference", "xla"), call, "reference")
