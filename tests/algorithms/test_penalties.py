"""Over-long responses, high-entropy tokens and the selections of tokens."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import TOKENS, make_batch, make_outputs, make_sequences, value_and_gradient

from jaxrl_llm.algorithms.gdpo import GDPO
from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.algorithms.penalties import Overlong, draw, highest

LENGTHS = jnp.arange(10)[None, :] < jnp.asarray([0, 4, 6, 7, 8, 9, 10])[:, None]


def test_the_penalty_grows_linearly_over_the_buffer():
    """DAPO's equation 13 with a limit of 8 tokens of which the last 4 are the buffer."""
    penalty = Overlong(max_length=8, buffer=0.5, weight=2.0).penalty(LENGTHS)
    np.testing.assert_allclose(penalty, [0, 0, -1.0, -1.5, -2.0, -2.0, -2.0], atol=1e-6)


def test_responses_that_were_cut_off_leave_the_loss_and_stay_in_the_statistics():
    """Of lengths 0, 4, 6, 7, 8, 9, 10 with a limit of 8: some are cut off before it, at it or beyond it."""
    cut, none = Overlong(how="mask", max_length=8), jnp.zeros(7, bool)
    assert np.asarray(cut.keep(LENGTHS, none)).tolist() == [True] * 5 + [False] * 2
    truncated = jnp.asarray([False, True, False, False, True, False, True])
    assert np.asarray(cut.keep(LENGTHS, truncated)).tolist() == [True, False, True, True, False, False, False]
    assert not np.asarray(cut.penalty(LENGTHS)).any()
    linear = Overlong(max_length=8)
    assert np.asarray(linear.keep(LENGTHS, truncated)).all()


def test_an_answer_that_ends_at_the_limit_is_learned_from_and_one_that_is_cut_there_is_not():
    truncated = np.array([True, False, False, True, False, True] + [False] * 10)
    sequences = make_sequences(1, truncated=jnp.asarray(truncated))
    length = np.asarray(sequences.mask).sum(1)
    at_limit = length == TOKENS
    assert (at_limit & truncated).any() and (at_limit & ~truncated).any() and (~at_limit & truncated).any()
    assigned, plain = (GRPO(overlong=o).advantages(sequences) for o in (Overlong(how="mask", max_length=TOKENS), None))
    np.testing.assert_array_equal(assigned.advantages, plain.advantages)
    np.testing.assert_array_equal(assigned.loss_mask, np.asarray(sequences.learned) & ~truncated[:, None])


def test_the_penalty_is_part_of_the_reward():
    sequences = make_sequences(1)
    overlong = Overlong(max_length=6, buffer=0.5)
    penalised = GRPO(overlong=overlong).advantages(sequences)
    length = np.asarray(sequences.mask).sum(1)
    by_hand = np.asarray(sequences.reward) - np.clip((length - 3) / 3, 0, 1)
    expected = GRPO().advantages(replace(sequences, reward=jnp.asarray(by_hand, jnp.float32)))
    np.testing.assert_allclose(penalised.advantages, expected.advantages, rtol=1e-4, atol=1e-5)
    mean = -np.clip((length - 3) / 3, 0, 1)[:-1].mean()
    np.testing.assert_allclose(penalised.metrics["reward/overlong"], mean, rtol=1e-5)


def test_gdpo_takes_the_penalty_as_a_part_of_its_own():
    sequences = make_sequences(1)
    overlong = Overlong(max_length=6, buffer=0.5)
    parts = {**sequences.parts, "overlong": overlong.penalty(sequences.mask)}
    expected = GDPO().advantages(replace(sequences, parts=parts))
    np.testing.assert_array_equal(GDPO(overlong=overlong).advantages(sequences).advantages, expected.advantages)


def test_only_tokens_of_high_entropy_get_an_advantage():
    sequences = make_sequences(1)
    algorithm = GRPO(entropy_share=0.2, correction=None)
    assigned, plain = algorithm.advantages(sequences), GRPO().advantages(sequences)
    mask, entropy = np.asarray(sequences.learned), np.asarray(sequences.entropy)
    threshold = np.sort(entropy[mask])[::-1][int(0.2 * mask.sum()) - 1]
    np.testing.assert_array_equal(assigned.advantages, np.where(mask & (entropy >= threshold), plain.advantages, 0))
    np.testing.assert_array_equal(assigned.loss_mask, mask)
    _, gradient = value_and_gradient(algorithm, make_outputs(sequences), make_batch(sequences, assigned, 1.0))
    assert not gradient[mask & (entropy < threshold)].any()
    assert algorithm.needs == {"entropy"}


def test_selections_take_the_share_that_was_asked_for():
    x = jnp.asarray([[5.0, 1.0, 4.0], [jnp.nan, 3.0, 2.0]])
    mask = jnp.asarray([[True, True, True], [False, True, True]])
    assert np.asarray(highest(x, mask, 0.4)).tolist() == [[True, False, True], [False, False, False]]
    assert np.asarray(highest(x, mask, 0.01)).tolist() == [[True, False, False], [False, False, False]]
    drawn = draw(mask, jnp.asarray(3), x)
    assert int(drawn.sum()) == 3
    assert not bool(jnp.any(drawn & ~mask))
    assert int(draw(mask, jnp.asarray(9), jnp.ones((2, 9))[:, :3]).sum()) == 5
    assert int(draw(jnp.zeros_like(mask), jnp.asarray(1), x).sum()) == 0


def test_a_draw_is_uniform():
    """10,000 tokens, 1,000 drawn: each fifth of the log-probs gets its share within four standard deviations."""
    logprob = jnp.asarray(-np.random.default_rng(0).gamma(2.0, 0.5, (100, 100)), jnp.float32)
    drawn = np.asarray(draw(jnp.ones((100, 100), bool), jnp.asarray(1000), logprob))
    edges = np.quantile(logprob, [0.2, 0.4, 0.6, 0.8])
    shares = np.bincount(np.searchsorted(edges, np.asarray(logprob)[drawn]), minlength=5)
    assert drawn.sum() == 1000
    assert (np.abs(shares - 200) < 4 * np.sqrt(160)).all()


@pytest.mark.parametrize(
    ("build", "binding"),
    [
        (lambda: Overlong(max_length=0), "penalties.Overlong.max_length"),
        (lambda: Overlong(max_length=5, buffer=0.0), "penalties.Overlong.buffer"),
    ],
)
def test_a_bad_setting_is_refused_by_its_binding(build, binding):
    with pytest.raises(ValueError, match=binding):
        build()
