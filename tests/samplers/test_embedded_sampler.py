"""The embedded sampler against the learner's forward pass, and against itself in other batches."""

import numpy as np
import pytest

from jaxrl_llm.experience import SamplingSettings


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
    groups = draw(tiny, prefixes, 3, SamplingSettings(max_tokens=9, temperature=temperature), decode_chunk=4)
    prompts = [prefix for prefix in prefixes for _ in range(3)]
    completions = [completion for group in groups for completion in group]
    for completion, expected in zip(completions, learner_logprobs(tiny, prompts, completions, temperature)):
        assert len(completion.tokens) == 9 and completion.finish == "length"
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_greedy_takes_the_largest_logit_of_the_learners_forward(tiny, prefixes, draw):
    groups = draw(tiny, prefixes, 1, SamplingSettings(max_tokens=8, temperature=0))
    sequences = list(prefixes)
    for _ in range(8):
        logits = tiny.logits(sequences)
        sequences = [np.append(s, np.argmax(rows[len(s) - 1])) for s, rows in zip(sequences, logits)]
    completions = [completion for (completion,) in groups]
    for prefix, sequence, completion in zip(prefixes, sequences, completions):
        assert completion.tokens.tolist() == sequence[len(prefix) :].tolist()
    for completion, expected in zip(completions, learner_logprobs(tiny, prefixes, completions)):
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
