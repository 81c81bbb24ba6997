"""The distribution that a token is drawn from, against a derivation in float64 NumPy."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_cases import distribution, softmax

from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.samplers.embedded import choose
from jaxrl_llm.samplers.embedded.choose import Choice, filters, penalise, tempered

VOCABULARY = 40
filtered = jax.jit(choose.filtered)
draw = jax.jit(choose.draw, static_argnames="cut")
noise = jax.jit(choose.noise, static_argnums=2)
in_blocks = jax.jit(choose.drawn_in_blocks, static_argnums=3)
SETTINGS = (
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 1.5},
    {"top_p": 0.001},
    {"min_p": 0.2},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.7},
    {"repetition_penalty": 1.3, "temperature": 0.9, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
)


def choice_of(rows):
    choice = Choice.empty(len(rows))
    for slot, settings in enumerate(rows):
        choice.set(slot, settings)
    return Choice(*(jnp.asarray(values) for values in choice))


@pytest.fixture(scope="module")
def case():
    """Logits, seen tokens and settings of one row for each entry of SETTINGS."""
    rng = np.random.default_rng(3)
    rows = [SamplingParams(**fields) for fields in SETTINGS]
    return rng.normal(0, 2, (len(rows), VOCABULARY)).astype(np.float32), rng.random((len(rows), VOCABULARY)) < 0.3, rows


def test_support_and_probabilities_of_every_setting(case):
    logits, seen, rows = case
    choice = choice_of(rows)
    adjusted = tempered(penalise(jnp.asarray(logits), jnp.asarray(seen), choice.repetition_penalty), choice.temperature)
    probabilities = np.asarray(jax.nn.softmax(filtered(adjusted, choice), axis=-1))
    for got, row, row_seen, settings in zip(probabilities, logits, seen, rows):
        expected = distribution(row, row_seen, settings)
        assert np.array_equal(got > 0, expected > 0), settings
        np.testing.assert_allclose(got, expected, atol=1e-6, err_msg=str(settings))


def test_reported_logprob_is_that_of_the_drawn_token(case):
    logits, seen, rows = case
    gumbel = np.random.default_rng(4).gumbel(size=logits.shape).astype(np.float32)
    token, logprob = draw(jnp.asarray(logits), jnp.asarray(gumbel), choice_of(rows), jnp.asarray(seen), cut=True)
    for slot, settings in enumerate(rows):
        expected = distribution(logits[slot], seen[slot], settings)
        assert int(token[slot]) == np.argmax(np.log(np.maximum(expected, 1e-300)) + gumbel[slot])
        assert float(logprob[slot]) == pytest.approx(np.log(expected[int(token[slot])]), abs=1e-5)


def test_greedy_ignores_noise_and_filters_and_reports_the_plain_softmax(case):
    logits, seen, _ = case
    greedy = choice_of([SamplingParams(temperature=0, top_k=2, top_p=0.1, min_p=0.9)] * len(logits))
    gumbel = np.random.default_rng(5).gumbel(size=logits.shape).astype(np.float32)
    for cut in (False, True):
        token, logprob = draw(jnp.asarray(logits), jnp.asarray(gumbel), greedy, jnp.asarray(seen), cut=cut)
        assert token.tolist() == logits.argmax(-1).tolist()
        expected = [np.log(softmax(row.astype(np.float64)).max()) for row in logits]
        np.testing.assert_allclose(logprob, expected, atol=1e-5)


def test_only_cutting_settings_ask_for_the_sort():
    assert [filters(SamplingParams(**fields)) for fields in SETTINGS] == [
        any(name in fields for name in ("top_k", "top_p", "min_p")) for fields in SETTINGS
    ]
    assert not filters(SamplingParams(temperature=0, top_k=5))


def test_equal_logits_at_the_edge_are_kept_together():
    logits = jnp.asarray([[1.0, 3.0, 2.0, 2.0, 0.0]])
    kept = filtered(logits, choice_of([SamplingParams(top_k=2)]))
    assert np.isfinite(kept).tolist() == [[False, True, True, True, False]]


def test_draws_follow_the_distribution(case):
    logits, seen, rows = case
    draws = 4000
    for slot in (0, 7, 12):
        keys = jax.random.split(jax.random.key(slot), draws)
        gumbel = noise(keys, jnp.zeros(draws, jnp.int32), VOCABULARY)
        repeated = (jnp.asarray(np.tile(x[slot], (draws, 1))) for x in (logits, seen))
        x, s = repeated
        tokens, _ = draw(x, gumbel, choice_of([rows[slot]] * draws), s, cut=True)
        expected = distribution(logits[slot], seen[slot], rows[slot])
        counts = np.bincount(np.asarray(tokens), minlength=VOCABULARY)
        assert counts[expected == 0].sum() == 0
        deviation = np.abs(counts - draws * expected) / np.sqrt(draws * expected * (1 - expected) + 1)
        assert deviation.max() < 4


def test_noise_depends_on_key_and_draw_alone():
    keys = jax.random.split(jax.random.key(0), 3)
    drawn = jnp.array([0, 1, 2])
    together = noise(keys, drawn, VOCABULARY)
    alone = noise(keys[2:], drawn[2:], VOCABULARY)
    assert np.array_equal(together[2:], alone)
    assert not np.array_equal(noise(keys[2:], jnp.array([3]), VOCABULARY), alone)


def test_real_vocabularies_are_drawn_in_blocks_and_small_ones_at_once():
    blocks = {151_936: 128, 128_256: 256, 248_320: 512, 32_768: 512, 50_257: None, 1_000: None}
    assert {entries: choose.block_of(entries) for entries in blocks} == blocks
    for entries, block in blocks.items():
        width = entries if block is None else entries // block + block
        shape = jax.eval_shape(
            partial(choose.noise, vocabulary=entries), jax.random.split(jax.random.key(0), 2), jnp.zeros(2, int)
        )
        assert shape.shape == (2, width)


def test_tpus_draw_among_all_entries(monkeypatch):
    monkeypatch.setattr(choose.dispatch, "device", lambda: SimpleNamespace(platform="tpu"))
    assert choose.block_of(151_936) is None


def test_draws_in_blocks_follow_the_distribution_and_report_its_logprob():
    entries, block, draws = 24, 4, 6000
    logits = np.random.default_rng(0).normal(0, 2, entries).astype(np.float32)
    logits[4:8] = -np.inf  # a whole block is cut
    logits[[1, 9, 22]] = -np.inf
    gumbel = np.random.default_rng(1).gumbel(size=(draws, entries // block + block)).astype(np.float32)
    rows = jnp.asarray(np.tile(logits, (draws, 1)))
    tokens, logprobs = in_blocks(rows, jnp.asarray(gumbel), jnp.zeros(draws, bool), block)
    expected = softmax(logits.astype(np.float64))
    counts = np.bincount(np.asarray(tokens), minlength=entries)
    assert counts[expected == 0].sum() == 0
    assert (np.abs(counts - draws * expected) / np.sqrt(draws * expected * (1 - expected) + 1)).max() < 4
    np.testing.assert_allclose(logprobs, np.log(expected[np.asarray(tokens)]), atol=2e-6)
    # What one draw does, by hand: a block by its sum and its noise, then an entry of it.
    mass = np.log(np.maximum(expected.reshape(-1, block).sum(1), 1e-300))
    at = (mass + gumbel[:, : len(mass)]).argmax(1)
    inside = (np.log(np.maximum(expected.reshape(-1, block)[at], 1e-300)) + gumbel[:, len(mass) :]).argmax(1)
    np.testing.assert_array_equal(tokens, at * block + inside)


def test_a_greedy_row_takes_the_first_largest_entry_of_all_blocks():
    logits = np.random.default_rng(2).normal(0, 3, (5, 24)).astype(np.float32)
    logits[0, [3, 17]] = 9.0
    gumbel = jnp.full((5, 10), 100.0) * jnp.arange(10)
    tokens, logprobs = in_blocks(jnp.asarray(logits), gumbel, jnp.ones(5, bool), 4)
    assert tokens.tolist() == logits.argmax(1).tolist()
    expected = [np.log(softmax(row.astype(np.float64)).max()) for row in logits]
    np.testing.assert_allclose(logprobs, expected, atol=2e-6)
