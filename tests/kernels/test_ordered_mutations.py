"""Another order of sums in any of the bitwise mode's kernels, on CPUs and in the interpreters, is seen as other bits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_ordered_gpu import NEW_INTERPRETER, interpreter, wide

from jaxrl_llm.kernels.attention import ordered as attention_cpu
from jaxrl_llm.kernels.attention import ordered_gpu as attention_gpu
from jaxrl_llm.kernels.attention.api import Call
from jaxrl_llm.kernels.ordered import arithmetic, hopper
from jaxrl_llm.kernels.token_stats import mosaic_gpu, ordered, ordered_gpu
from jaxrl_llm.kernels.token_stats.api import token_stats

SLOW = pytest.mark.slow  # of the interpreter, which takes long to compile kernels
CLUSTER = 2 if NEW_INTERPRETER else 1  # the interpreter of jax 0.10 knows no clusters that share a tile


class Backwards:
    """jax.lax whose loops begin at the end."""

    def __getattr__(self, name):
        return getattr(lax, name)

    @staticmethod
    def fori_loop(first, end, body, start):
        return lax.fori_loop(first, end, lambda i, carry: body(end - 1 - (i - first), carry), start)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def seen(found, mutant, atol):
    """The mutant's numbers are near, and not the same."""
    np.testing.assert_allclose(mutant, found, atol=atol)
    return not np.array_equal(mutant, found)


# -- CPUs --------------------------------------------------------------------------------------------------------------


def halves_of_k(tile, w, *, turned=False):
    w, k = (w.T if turned else w), tile.shape[1] // 2
    return tile[:, :k] @ w[:k] + tile[:, k:] @ w[k:]


def totals_from_the_end(x):
    return arithmetic.matmul(x[:, ::-1], jnp.ones((x.shape[1], arithmetic.ONES)))[:, 0]


MUTATIONS = {"tile_product": halves_of_k, "totals": totals_from_the_end}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_samplers_log_probs_are_token_stats_but_in_another_order(monkeypatch, name):
    hidden, head, temperature = normal(0, 90, 48), normal(1, 300, 48), jnp.full(90, 0.7)
    targets = jnp.asarray(np.random.default_rng(2).integers(0, 300, 90), jnp.int32)

    def learner():
        run = partial(token_stats, temperature=0.7, outputs=("logprob",), backend="ordered")
        return jax.jit(lambda *arrays: run(*arrays)["logprob"])(hidden, head, targets)

    @jax.jit
    def sampler(hidden, targets, temperature):
        read = ordered.read(hidden, head, temperature)
        return ordered.logprobs(read, hidden, head, targets, temperature)

    found = learner()
    assert np.array_equal(sampler(hidden[20:23], targets[20:23], temperature[20:23]), found[20:23])
    monkeypatch.setattr(arithmetic, name, MUTATIONS[name])
    assert seen(found, learner(), 2e-5)


def test_norms_in_another_order_are_seen(monkeypatch):
    x, scale = normal(3, 70, 400), normal(4, 400)
    norm = lambda x: jax.jit(partial(arithmetic.rms_norm, epsilon=1e-6))(x, scale)  # noqa: E731
    found = norm(x)
    assert np.array_equal(norm(x[9:12]), found[9:12])
    monkeypatch.setattr(arithmetic, "totals", totals_from_the_end)
    assert seen(found, norm(x + 0), 1e-5)


H, K, C, T = 4, 2, 16, 70
SEGMENTS = np.repeat([[1, 2]], [20, 50], axis=1).astype(np.int32)
POSITIONS = np.concatenate([np.arange(20), np.arange(50)])[None].astype(np.int32)


def call_of(platform, dtype):
    return Call(
        platform=platform, dtype=dtype, batch=1, queries=T, keys=T, heads=H, kv_heads=K, width=C, window=None,
        scale=C**-0.5, max_segments=2,
    )  # fmt: skip


@pytest.mark.parametrize("mutation", [("lax", Backwards()), ("KEYS", 8)], ids=lambda pair: pair[0])
def test_attention_to_blocks_in_another_order_is_seen(monkeypatch, mutation):
    arrays = [normal(5 + heads, 1, T, heads, C) for heads in (H, K, K)]

    def attended():
        return jax.jit(partial(attention_cpu._packed, call=call_of("cpu", "float32")))(*arrays, POSITIONS, SEGMENTS)

    found = attended()
    monkeypatch.setattr(attention_cpu, *mutation)
    assert seen(found, attended(), 1e-5)


# -- Hopper's kernels in the interpreters ------------------------------------------------------------------------------


def test_attention_to_blocks_in_another_order_is_seen_on_gpus(monkeypatch):
    arrays = [normal(5 + heads, 1, T, heads, C, dtype=jnp.bfloat16) for heads in (H, K, K)]
    q, k, v = arrays[0][0], *(jnp.zeros((1, T, T, K, C), jnp.bfloat16).at[0].set(x) for x in arrays[1:])

    def attended():
        rows = attention_gpu.packed(*arrays, jnp.asarray(SEGMENTS * 0 + 1), call_of("gpu", "bfloat16"), interpret=True)
        at = jnp.arange(T, dtype=jnp.int32)
        return wide(rows)[0], wide(
            attention_gpu.decoded.__wrapped__(q, k, v, jnp.int32(0), at, window=None, interpret=True)
        )

    packed, decoded = attended()
    assert np.array_equal(packed, decoded)
    monkeypatch.setattr(attention_gpu, "lax", Backwards())
    mutants = attended()
    # Two blocks of keys: of the tokens that see one alone nothing changes.
    assert all(np.array_equal(x[:64], y[:64]) for x, y in zip((packed, decoded), mutants))
    assert all(seen(x, y, 0.05) for x, y in zip((packed, decoded), mutants))


def product_tiles(**sizes):
    return hopper.Tiles(**{"columns": 128, "stages": 2, "cluster": CLUSTER, "multiprocessors": 2 * CLUSTER} | sizes)


@SLOW
def test_a_product_in_pieces_of_another_depth_is_seen(monkeypatch):
    # The first and the third piece of K cancel and are so large that the second is rounded beside them.
    x, w = normal(8, 64, 64), normal(9, 64, 128)
    x = jnp.concatenate([x * 2**9, normal(10, 64, 64), x * -(2**9), normal(11, 64, 64)], axis=1).astype(jnp.bfloat16)
    w = jnp.concatenate([w * 2**7, normal(12, 64, 128), w * 2**7, normal(13, 64, 128)]).astype(jnp.bfloat16)

    def product(x, **sizes):
        monkeypatch.setattr(hopper, "tiles_of", lambda rows, columns: product_tiles(**sizes))
        with interpreter():
            return wide(jax.block_until_ready(hopper.product.__wrapped__(x, w)))

    found = product(x)
    # Neither company, nor the rows of a block, nor the stages change a bit.
    assert np.array_equal(product(x[30:33], rows=128, slice_bytes=64, stages=3), found[30:33])
    mutant = product(x, depth=128)
    assert not np.array_equal(mutant, found)
    want = wide(x) @ wide(w)
    size = np.abs(wide(x)) @ np.abs(wide(w))  # of the sums on their way, whose float32 roundings stay
    assert (np.abs([found - want, mutant - want]) < 2.0**-20 * size).all()


@pytest.mark.parametrize("kernel", ["norms", "chosen"])
def test_rows_summed_in_other_parts_are_seen(monkeypatch, kernel):
    x, scale = normal(14, 37, 384, dtype=jnp.bfloat16), normal(15, 384)
    targets, head = jnp.arange(37, dtype=jnp.int32) % 11, normal(16, 11, 384, dtype=jnp.bfloat16)
    # Numbers of float32 leave the norms' last bits to be seen.
    kernels = {
        "norms": lambda x, _: hopper._norms.__wrapped__(x.astype(jnp.float32), scale, 1e-6, interpret=True),
        "chosen": lambda x, targets: hopper.chosen_logits(x, head, targets, interpret=True),
    }
    found = kernels[kernel](x, targets)
    assert np.array_equal(kernels[kernel](x[7:9], targets[7:9]), found[7:9])
    monkeypatch.setattr(hopper, "BLOCK", 256)
    assert seen(found, kernels[kernel](x, targets), 1e-4)


VOCABULARY, WIDTH, ROWS = 112, 64, CLUSTER * 128


def stats_tiles(**sizes):
    small = {"rows": 64, "columns": 64, "depth": 32, "stages": 2, "head_columns": not NEW_INTERPRETER}
    return mosaic_gpu.Tiles(**small | {"cluster": CLUSTER, "multiprocessors": 2 * CLUSTER} | sizes)


@SLOW
def test_a_heads_sums_are_a_rows_own_and_in_tiles_of_other_columns_are_seen():
    hidden, head = (normal(s, n, WIDTH, dtype=jnp.bfloat16) for s, n in ((17, ROWS), (18, VOCABULARY)))
    targets = jnp.asarray(np.random.default_rng(19).integers(0, VOCABULARY, ROWS), jnp.int32)
    temperature = jnp.linspace(0.5, 2.0, ROWS)

    def of(rows=hidden, **sizes):
        tiles = stats_tiles(**sizes)
        with interpreter():
            shares, logits = jax.block_until_ready(ordered_gpu.read(rows, head, temperature, logits=True, tiles=tiles))
        chosen = hopper.chosen_logits(rows, head, targets, interpret=True)
        more = (0, shares.shape[2] - len(chosen))
        filled = jnp.pad(chosen, more), jnp.pad(temperature, more, constant_values=1.0)
        return ordered_gpu._summed(shares, *filled, interpret=True)[-1][: len(chosen)], logits

    found, logits = of()
    # As many rows, since the processor's own products, by which the interpreter makes those of a tile, may go by their number.
    company, company_logits = of(normal(23, ROWS, WIDTH, dtype=jnp.bfloat16).at[40:43].set(hidden[40:43]))
    assert np.array_equal(company_logits[40:43], logits[40:43]) and np.array_equal(company[40:43], found[40:43])
    assert not np.array_equal(company_logits[:40], logits[:40])
    assert seen(found, of(columns=32)[0], 1e-4)
    assert seen(logits, of(depth=64)[1], 1e-4)


def test_shares_of_the_vocabulary_summed_in_another_order_are_seen(monkeypatch):
    maximum, total, first = normal(20, 7, 64), jnp.abs(normal(21, 7, 64)) + 1, normal(22, 7, 64)
    shares, ones = jnp.stack([maximum, total, first]), jnp.ones(64)

    def totals():
        return ordered_gpu._summed(shares, ones * 0, ones, interpret=True)[1]

    found = totals()
    want = (np.exp(np.asarray(maximum - maximum.max(axis=0), np.float64)) * total).sum(axis=0)
    np.testing.assert_allclose(found, want, rtol=1e-5)
    monkeypatch.setattr(ordered_gpu, "lax", Backwards())
    assert seen(found, totals(), 1e-4)
