"""The embedded sampler against the learner's forward pass, and against itself in other batches."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from sampler_cases import MAX_LENGTH, ROWS, VOCABULARY, Letters, distribution, sample

from jaxrl_llm.experience import SamplingParams


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def learner_logprobs(tiny, prefixes, completions, temperature=1.0):
    """float64 log-probs [T] of each completion by the learner's forward pass."""
    logits = tiny.logits([np.concatenate([p, c.tokens]) for p, c in zip(prefixes, completions)])
    for prefix, completion, rows in zip(prefixes, completions, logits):
        at = np.arange(len(completion.tokens))
        yield log_softmax(rows[len(prefix) - 1 :][at] / temperature)[at, completion.tokens]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_are_the_learners(tiny, prefixes, draw, temperature):
    groups = draw(tiny, prefixes, 3, SamplingParams(max_tokens=9, temperature=temperature))
    prompts = [prefix for prefix in prefixes for _ in range(3)]
    completions = [completion for group in groups for completion in group]
    for completion, expected in zip(completions, learner_logprobs(tiny, prompts, completions, temperature)):
        assert len(completion.tokens) == 9 and completion.finish == "length"
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_a_cache_of_8_bits_stays_within_its_rounding_of_the_learners_log_probs(tiny, prefixes, draw):
    # Three bits of fraction: an entry is off by 2^-4 of itself at most, 0.018 in the mean of a uniform fraction.
    (eight, whole) = (
        draw(tiny, prefixes, 3, SamplingParams(max_tokens=9), **f) for f in ({"cache": "float8_e4m3fn"}, {})
    )
    prompts = [prefix for prefix in prefixes for _ in range(3)]

    def gaps(groups):
        completions = [completion for group in groups for completion in group]
        expected = learner_logprobs(tiny, prompts, completions)
        return np.concatenate([np.abs(c.logprobs - e) for c, e in zip(completions, expected)])

    assert gaps(whole).max() < 1e-4 < gaps(eight).mean() < 0.1
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        tiny.start(cache="int4")


def test_greedy_takes_the_largest_logit_of_the_learners_forward(tiny, prefixes, draw):
    groups = draw(tiny, prefixes, 1, SamplingParams(max_tokens=8, temperature=0))
    sequences = list(prefixes)
    for _ in range(8):
        logits = tiny.logits(sequences)
        sequences = [np.append(s, np.argmax(rows[len(s) - 1])) for s, rows in zip(sequences, logits)]
    completions = [completion for (completion,) in groups]
    for prefix, sequence, completion in zip(prefixes, sequences, completions):
        assert completion.tokens.tolist() == sequence[len(prefix) :].tolist()
    for completion, expected in zip(completions, learner_logprobs(tiny, prefixes, completions)):
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def same(groups, others):
    """Equal tokens and ends, and log-probs up to the rounding of differently shaped products."""
    assert len(groups) == len(others)
    for group, other_group in zip(groups, others):
        for completion, other in zip(group, other_group, strict=True):
            assert completion.tokens.tolist() == other.tokens.tolist()
            assert completion.finish == other.finish
            np.testing.assert_allclose(completion.logprobs, other.logprobs, atol=1e-5)


ENDS_EARLY = SamplingParams(max_tokens=11, stop_token_ids=(3, 17, 8))


@pytest.fixture(scope="module")
def enough_slots(tiny, prefixes, draw):
    return draw(tiny, prefixes, 3, ENDS_EARLY)


def test_the_same_call_twice_is_equal_bit_for_bit(tiny, prefixes, draw, enough_slots):
    again = draw(tiny, prefixes, 3, ENDS_EARLY)
    for group, other_group in zip(enough_slots, again):
        for completion, other in zip(group, other_group):
            assert completion.tokens.tolist() == other.tokens.tolist()
            assert completion.logprobs.tolist() == other.logprobs.tolist()


@pytest.mark.parametrize("fields", [{"slots": 4}, {"slots": 5, "prefill_tokens": 32}])
def test_refilled_slots_draw_what_enough_slots_draw(tiny, prefixes, draw, enough_slots, fields):
    lengths = {len(completion.tokens) for group in enough_slots for completion in group}
    assert len(lengths) > 4  # else no slot is refilled while others go on
    same(draw(tiny, prefixes, 3, ENDS_EARLY, decode_chunk=4, **fields), enough_slots)


def test_draws_depend_on_neither_order_nor_company(tiny, prefixes, draw, enough_slots):
    order = [4, 1, 7, 9, 0]
    some = draw(tiny, [prefixes[i] for i in order], 2, ENDS_EARLY, seeds=order)
    same(some, [enough_slots[i][:2] for i in order])


def test_samples_and_seeds_differ(tiny, prefixes, draw):
    settings = SamplingParams(max_tokens=11)
    first, second, large = draw(tiny, [prefixes[0]] * 3, 4, settings, seeds=[1, 2, 1 + 2**32])
    texts = {tuple(completion.tokens.tolist()) for completion in first + second + large}
    assert len(texts) == 12


def test_a_prompt_is_prefilled_once_for_all_its_samples(tiny, prefixes):
    async def run():
        engine = tiny.start(slots=4, decode_chunk=4, prefill_tokens=64)
        await engine.publish(tiny.params, 0)
        await sample(engine, prefixes, 6, ENDS_EARLY)
        return engine.metrics(), engine.metrics()

    metrics, cleared = asyncio.run(run())
    assert metrics["sampler/prefill_tokens"] == sum(len(prefix) for prefix in prefixes)
    assert cleared["sampler/prefill_tokens"] == cleared["sampler/generated_tokens"] == 0


def test_metrics_count_kept_tokens_and_the_share_of_slot_steps(tiny, prefixes):
    async def run():
        engine = tiny.start()
        await engine.publish(tiny.params, 0)
        await sample(engine, prefixes, 3, SamplingParams(max_tokens=6))
        await sample(engine, prefixes, 1, SamplingParams(max_tokens=6))
        return engine.metrics()

    metrics = asyncio.run(run())
    assert metrics["sampler/generated_tokens"] == 40 * 6
    assert metrics["sampler/occupancy"] == pytest.approx(40 / (32 + 16))  # 30 sequences take 32 slots, 10 take 16
    assert metrics["sampler/tokens_per_s"] == pytest.approx(240 / metrics["sampler/seconds"])


def test_a_stop_id_ends_a_response_from_min_tokens_on_and_is_kept(tiny, prefixes, draw):
    free = draw(tiny, prefixes, 3, SamplingParams(max_tokens=11))
    ended = 0
    for min_tokens in (0, 1, 5):
        settings = SamplingParams(max_tokens=11, min_tokens=min_tokens, stop_token_ids=(3, 17, 8))
        for group, free_group in zip(draw(tiny, prefixes, 3, settings), free):
            for completion, other in zip(group, free_group):
                tokens = other.tokens.tolist()
                end = next(
                    (t + 1 for t, token in enumerate(tokens) if token in (3, 17, 8) and t + 1 >= min_tokens), None
                )
                assert completion.tokens.tolist() == tokens[:end]
                assert completion.finish == ("length" if end is None else "stop")
                ended += end is not None
    assert 20 < ended < 90


def test_a_stop_string_ends_a_response_across_tokens_and_chunks(tiny, prefixes, draw):
    letters = Letters()
    settings = SamplingParams(max_tokens=11)
    free = draw(tiny, prefixes, 3, settings)
    texts = [letters.decode(completion.tokens.tolist()) for group in free for completion in group]
    string = texts[0][5:8]  # three letters of the first response: three tokens, unless one is "ab"
    for chunk in (4, 16):
        groups = draw(tiny, prefixes, 3, replace(settings, stop_strings=(string, "zzz")), decode_chunk=chunk)
        for group, free_group in zip(groups, free):
            for completion, other in zip(group, free_group):
                prefixes_of = (letters.decode(other.tokens[:end].tolist()) for end in range(12))
                end = next((end for end, text in enumerate(prefixes_of) if string in text), None)
                assert completion.tokens.tolist() == other.tokens[:end].tolist()
                assert completion.finish == ("length" if end is None else "stop")
                assert len(completion.logprobs) == len(completion.versions) == len(completion.tokens)
        assert groups[0][0].finish == "stop"


def test_a_response_ends_where_the_sequence_is_full(tiny, prefixes, draw):
    prefix = np.arange(20, dtype=np.int32)
    groups = draw(tiny, [*prefixes, prefix], 1, SamplingParams(max_tokens=500))
    for tokens, (completion,) in zip([*prefixes, prefix], groups):
        assert len(completion.tokens) == MAX_LENGTH - len(tokens) and completion.finish == "length"


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 4}, {"top_p": 0.7, "temperature": 1.3}, {"min_p": 0.3}, {"repetition_penalty": 1.9}],
    ids=lambda fields: "-".join(fields),
)
def test_samples_follow_the_filtered_distribution(tiny, prefixes, draw, fields):
    """Frequencies of the first token, and log-probs of all, against float64 NumPy on the learner's logits."""
    settings = SamplingParams(max_tokens=3, **fields)
    prefix = prefixes[3]
    (group,) = draw(tiny, [prefix], 512, settings, seeds=[11])
    logits = tiny.logits([np.concatenate([prefix, completion.tokens]) for completion in group[:ROWS]])
    for completion, rows in zip(group, logits):
        seen = np.isin(np.arange(VOCABULARY), prefix)
        for t, token in enumerate(completion.tokens.tolist()):
            probabilities = distribution(rows[len(prefix) - 1 + t], seen, settings)
            assert completion.logprobs[t] == pytest.approx(np.log(probabilities[token]), abs=1e-4)
            seen[token] = True
    first = distribution(logits[0][len(prefix) - 1], np.isin(np.arange(VOCABULARY), prefix), settings)
    counts = np.bincount([completion.tokens[0] for completion in group], minlength=VOCABULARY)
    assert counts[first == 0].sum() == 0
    assert np.max(np.abs(counts - 512 * first) / np.sqrt(512 * first * (1 - first) + 1)) < 4
