"""The canary's ratio: what rounding gives passes however sharp the policy is, other weights and other models do not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from sampler_cases import SIZES

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.publication import canary as canaries
from jaxrl_llm.publication.manifest import Canary
from jaxrl_llm.samplers.servers.publisher import scored

POSITIONS = 64


def rounded_versions(rng: np.random.Generator, count: int, vocabulary: int = 48):
    """Versions of a policy that sharpens from logits times 0.5 to times 8: log-probs of the learner and of a server in bfloat16.

    Logits are a text model's: a spread of 2.3, a favourite 22 above the mean at times 1, rivals at all distances below it. Noise is that
    of Qwen2.5-Coder-0.5B: 7 roundoffs of the spread for each logit, and an error of 1.6 % of all logits of a position together.
    """
    roundoff = 2.0**-8
    for version in range(count):
        sharp = 0.5 * 16 ** (version / (count - 1))
        logits = rng.normal(0, 2.3, (POSITIONS, vocabulary))
        logits[:, 0] = 22 - rng.exponential(6, POSITIONS).clip(0, 14)
        logits[:, 1] = logits[:, 0] - rng.exponential(4, POSITIONS)
        logits *= sharp
        spread = np.full(POSITIONS, 2.3 * sharp)
        noise = 7 * roundoff * spread[:, None] * rng.normal(0, 1, logits.shape)
        server = (logits + noise) * (1 + 0.016 * rng.normal(0, 1, (POSITIONS, 1)))
        yield logits, server, spread


def log_softmax(x: np.ndarray) -> np.ndarray:
    top = x.max(axis=-1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(axis=-1, keepdims=True))


def seen(
    learner: np.ndarray, server: np.ndarray, text: np.ndarray, most: float
) -> tuple[Canary, np.ndarray, np.ndarray]:
    """The learner's canary, and the server's answers: -inf for a favourite that it does not list."""
    rows, likely = np.arange(len(learner)), learner.argmax(axis=1)
    canary = Canary(
        tokens=(0, *text.tolist()), logprobs=tuple(learner[rows, text].tolist()), likely=tuple(likely.tolist()),
        likely_logprobs=tuple(learner[rows, likely].tolist()), limit=most,
    )  # fmt: skip
    found = server[rows, likely]
    listed = (server > found[:, None]).sum(axis=1) < canaries.LISTED
    return canary, server[rows, text], np.where(listed, found, -np.inf)


def test_ten_thousand_versions_of_a_policy_that_sharpens_all_pass():
    rng, worst, largest = np.random.default_rng(0), 0.0, []
    for logits, noisy, spread in rounded_versions(rng, 10_000):
        learner, server = log_softmax(logits), log_softmax(noisy)
        most = canaries.limit(learner.max(axis=1), spread, 24, ("bfloat16", "float32"))
        text = np.where(
            rng.random(POSITIONS) < 0.7, learner.argmax(axis=1), rng.integers(0, logits.shape[1], POSITIONS)
        )
        found = canaries.gap(*seen(learner, server, text, most))
        worst = max(worst, found.ratio / most)
        largest.append(found.max)
    assert worst < 1
    assert np.median(largest[-1000:]) > 1.15, "the noise is of the size that once ended a run by its largest difference"
    assert worst > 0.1, "the limit is not so far from the noise that it would let anything pass"


def test_a_gap_of_one_improbable_token_after_74_updates_passes():
    """0.0245 nats a token and 1.15 at most were seen in bfloat16, of weights that were right."""
    learner = log_softmax(np.random.default_rng(3).normal(0, 6, (116, 50)))
    server, text = learner.copy(), learner.argmin(axis=1)
    server[np.arange(116), text] += np.where(np.arange(116) == 50, 1.15, 0.0147)
    canary, text_by_server, likely = seen(learner, server, text, canaries.limit(learner.max(axis=1), np.full(116, 6.0), 24, ("bfloat16",)))  # fmt: skip
    found = canaries.gap(canary, text_by_server, likely)
    assert found.mean == pytest.approx(0.0245, abs=1e-4) and found.max == pytest.approx(1.15)
    assert found.ratio <= canary.limit


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_numbers_that_are_none_do_not_pass(value):
    learner = log_softmax(np.random.default_rng(1).normal(0, 2, (5, 9)))
    canary, text, likely = seen(learner, learner, learner.argmax(axis=1), 0.1)
    likely[2] = value
    assert not canaries.gap(canary, text, likely).ratio <= canary.limit


LAYERS = 4
MODEL = replace(SIZES, width=32, mlp_width=64, layers=LAYERS)  # the output projection of attention is square
TEXT = np.random.default_rng(5).integers(0, MODEL.vocabulary_size, 96).astype(np.int32)


def model(sizes: Any = MODEL, compute_dtype: str = "float32") -> Policy:
    return Policy(sizes, Partitioner.create(MeshConfig(), jax.devices()[:1]), compute_dtype)


def two_versions() -> list[dict[str, Any]]:
    """Two versions, a small update apart."""
    rng = np.random.default_rng(11)

    def drawn(leaf: Any) -> jax.Array:
        # Layers speak up beside the embedding, as those of a trained model do.
        noise = rng.normal(0, 1, leaf.shape).astype(np.float32)
        scale = 1.5 / np.sqrt(leaf.shape[-1] if len(leaf.shape) < 3 else np.prod(leaf.shape[1:-1]))
        return jnp.asarray(noise * scale)

    def scaled(path: Any, x: jax.Array) -> jax.Array:
        return 1 + 0.1 * x if "scale" in jax.tree_util.keystr(path) else x

    first = jax.tree_util.tree_map_with_path(scaled, jax.tree.map(drawn, model().abstract()))
    second = jax.tree.map(lambda x: x + 0.03 * jnp.asarray(rng.normal(0, 1, x.shape), jnp.float32) * jnp.std(x), first)
    return [first, second]


@pytest.fixture(scope="module")
def versions() -> list[dict[str, Any]]:
    return two_versions()


def log_probs(params: dict[str, Any], policy: Policy) -> np.ndarray:
    """float64 [T - 1, V]: what a server that computes with `params` says after each token of the text but the last."""
    tokens = jnp.asarray(TEXT)[None]
    places = jnp.arange(len(TEXT), dtype=jnp.int32)[None]
    hidden = policy.hidden(params, tokens, places, jnp.ones_like(tokens), max_segments=1)[0, :-1]
    return log_softmax(np.asarray(hidden, np.float64) @ np.asarray(policy.head(params), np.float64).T)


def ratio(params: dict[str, Any], policy: Policy, right: dict[str, Any]) -> tuple[float, float]:
    """The ratio of a server that computes with `params` by `policy`, where `right` was published in float32; and its limit."""
    row = jnp.asarray(np.pad(TEXT, (0, 32), constant_values=-1))
    count = len(TEXT) - 1
    text, likely, likely_logprobs, spread = (np.asarray(x)[:count] for x in scored(right, row, policy=model()))
    canary = Canary(
        tokens=tuple(TEXT.tolist()), logprobs=tuple(text.tolist()), likely=tuple(likely.tolist()),
        likely_logprobs=tuple(likely_logprobs.tolist()), limit=canaries.limit(likely_logprobs, spread, LAYERS, ("float32",)),
    )  # fmt: skip
    server, rows = log_probs(params, policy), np.arange(count)
    return canaries.gap(canary, server[rows, TEXT[1:]], server[rows, likely]).ratio, canary.limit


Change = Callable[[jax.Array], jax.Array]


def with_leaf(params: dict[str, Any], path: str, change: Change) -> dict[str, Any]:
    """The parameters with one leaf changed."""
    first, _, rest = path.partition(".")
    return params | {first: with_leaf(params[first], rest, change) if rest else change(params[first])}


def exchanged(x: jax.Array) -> jax.Array:
    return x[jnp.array([0, 2, 1, 3])]


def transposed(x: jax.Array) -> jax.Array:
    """The third layer's square matrix [heads x width, hidden] on its side."""
    return x.at[2].set(x[2].reshape(32, 32).T.reshape(x.shape[1:]))


def flipped(x: jax.Array) -> jax.Array:
    """The uppermost bit of one element's exponent."""
    bits = np.asarray(x).copy()
    bits.view(np.uint32)[1, 3, 7] ^= 1 << 30
    return jnp.asarray(bits)


def rounded(x: jax.Array) -> jax.Array:
    return jnp.asarray(np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32))


WRONG: dict[str, tuple[Callable[[list[dict[str, Any]]], dict[str, Any]], Any]] = {
    "layers exchanged": (lambda v: v[1] | {"layers": jax.tree.map(exchanged, v[1]["layers"])}, MODEL),
    "a square matrix transposed": (lambda v: with_leaf(v[1], "layers.attention.output", transposed), MODEL),
    "one stale tensor": (lambda v: with_leaf(v[1], "norm.scale", lambda _: v[0]["norm"]["scale"]), MODEL),
    "the version before": (lambda v: v[0], MODEL),
    "another element type": (lambda v: jax.tree.map(rounded, v[1]), MODEL),
    "one flipped bit of an exponent": (lambda v: with_leaf(v[1], "layers.mlp.down", flipped), MODEL),
    "another base of the rotary wavelengths": (lambda v: v[1], replace(MODEL, rope_theta=1e4)),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_weights_and_another_model_are_told_from_the_published_one(versions, name):
    change, sizes = WRONG[name]
    found, most = ratio(change(versions), model(sizes), versions[1])
    assert found > 4 * most


def test_the_same_weights_by_another_order_of_sums_pass(versions):
    found, most = ratio(versions[1], model(), versions[1])
    assert 0 < found < most


@pytest.mark.parametrize("name", ["layers exchanged", "the version before", "one flipped bit of an exponent"])
def test_in_bfloat16_what_is_larger_than_rounding_is_told_too(versions, name):
    right = versions[1]
    row = jnp.asarray(np.pad(TEXT, (0, 32), constant_values=-1))
    count = len(TEXT) - 1
    policy = model(compute_dtype="bfloat16")
    _, likely, likely_logprobs, spread = (np.asarray(x)[:count] for x in scored(right, row, policy=policy))
    most = canaries.limit(likely_logprobs, spread, LAYERS, ("bfloat16",))
    found = {}
    for kind, params in {"right": jax.tree.map(rounded, right), name: WRONG[name][0](versions)}.items():
        by_server = log_probs(params, model())[np.arange(count), likely]
        p = np.exp(likely_logprobs)
        found[kind] = np.abs(np.exp(by_server) - p).sum() / p.sum()
    assert found["right"] < most < found[name]
