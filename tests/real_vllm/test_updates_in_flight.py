"""What becomes of requests in flight while weights change: each token's log-prob is that of the version it is labelled with.

Prompts are longer than the cache's blocks of 128 tokens, so that keys and values of an older version would be found again.
"""

import json
import threading
import time

import numpy as np
import pytest
from serving import STEP_S, names_versions
from tiny_qwen2 import VOCABULARY

named = pytest.mark.skipif(
    not names_versions(), reason="vLLM names the versions of tokens from 0.32 on: test_streamed_versions.py"
)
TOLERANCE = 1e-4  # nats, float32
OLD, NEW = 0, 1
MAX_TOKENS = 192  # long enough for an update to meet requests in flight on a busy machine
PROMPTS = [
    [int(token) for token in np.random.default_rng(seed).integers(3, VOCABULARY, length)]
    for seed, length in enumerate((140, 260, 300))
]


def generated(server) -> float:
    """Tokens that a server has drawn so far."""
    lines = [line for line in server.text("/metrics").splitlines() if line.startswith("vllm:generation_tokens_total")]
    return sum(float(line.split()[-1]) for line in lines)


class Flight:
    """Requests under way in threads of their own."""

    def __init__(self, server, salt: str) -> None:
        self.results: list[dict | None] = [None] * len(PROMPTS)
        self.server, self.salt = server, salt
        before = generated(server)
        self.threads = [threading.Thread(target=self.ask, args=(i,)) for i in range(len(PROMPTS))]
        for thread in self.threads:
            thread.start()
        until = time.monotonic() + STEP_S
        while generated(server) < before + 16:
            assert time.monotonic() < until, "nothing is generated"
            time.sleep(0.005)

    def ask(self, i: int) -> None:
        self.results[i] = self.server.generate(PROMPTS[i], MAX_TOKENS, self.salt, temperature=1.0)

    def ended(self) -> list[dict]:
        for thread in self.threads:
            thread.join(STEP_S)
        assert all(result is not None for result in self.results)
        return self.results


def through_an_update(server, published, mode: str, clear_cache: bool) -> list[dict]:
    """The samples of requests that were in flight when the weights went from OLD to NEW."""
    server.update(published[OLD], OLD)
    assert server.stage(published[NEW], NEW)["state"] == "staged"
    flight = Flight(server, salt=str(OLD))
    server.call(f"/pause?mode={mode}&clear_cache={json.dumps(clear_cache)}")
    assert server.method("commit", version=NEW)["version"] == NEW
    server.call("/update_weight_version", {"new_version": str(NEW)})
    server.call("/resume")
    return flight.ended()


def split(sample: dict) -> int:
    """Number of tokens of the old version, which come first."""
    count = sample["versions"].count(OLD)
    assert sample["versions"] == [OLD] * count + [NEW] * (len(sample["token_ids"]) - count)
    return count


def off(sample: dict, expected: np.ndarray, start: int, stop: int) -> float:
    """Largest difference of the sampled tokens' log-probs, nats; `expected` is [tokens]."""
    return float(np.abs(np.array(sample["logprobs"])[start:stop] - expected[start:stop]).max(initial=0.0))


def of_response(reference, prompt: list[int], sample: dict) -> np.ndarray:
    return reference.logprobs(prompt + sample["token_ids"])[len(prompt) - 1 :]


@named
def test_recompute_draws_each_token_exactly_from_the_version_it_names(server, published, references):
    samples = through_an_update(server, published, "keep", clear_cache=True)
    crossing = 0
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        old, length = split(sample), len(sample["token_ids"])
        assert length == MAX_TOKENS
        assert off(sample, of_response(references(OLD), prompt, sample), 0, old) < TOLERANCE
        assert off(sample, of_response(references(NEW), prompt, sample), old, length) < TOLERANCE
        crossing += 0 < old < length
    assert crossing, "no request was in flight"


@named
def test_stale_kv_draws_new_tokens_over_the_old_versions_keys_and_values(server, published, references):
    samples = through_an_update(server, published, "keep", clear_cache=False)
    crossing = 0
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        old, length = split(sample), len(sample["token_ids"])
        assert off(sample, of_response(references(OLD), prompt, sample), 0, old) < TOLERANCE
        if 0 < old < length:
            crossing += 1
            # The last token of the old version was drawn, and not yet read: its keys are the new version's.
            kept = len(prompt) + old - 1
            mixed = references(NEW).logprobs_over_keys_of(references(OLD), prompt + sample["token_ids"], kept)
            assert np.abs(np.array(sample["logprobs"])[old:] - mixed).max() < TOLERANCE
            assert off(sample, of_response(references(NEW), prompt, sample), old, length) > 0.01, "recomputed after all"
    assert crossing, "no request was in flight"
    salted = server.generate(PROMPTS[2], 1, str(NEW), temperature=0.0)
    assert off(salted, of_response(references(NEW), PROMPTS[2], salted), 0, 1) < TOLERANCE
    stale = server.generate(PROMPTS[2], 1, str(OLD), temperature=0.0)
    assert off(stale, of_response(references(NEW), PROMPTS[2], stale), 0, 1) > 0.01, "the salt is needed"


@named
def test_wait_finishes_what_is_in_flight_with_the_old_version(server, published, references):
    for prompt, sample in zip(PROMPTS, through_an_update(server, published, "wait", clear_cache=True), strict=True):
        assert split(sample) == MAX_TOKENS == len(sample["token_ids"])
        assert off(sample, of_response(references(OLD), prompt, sample), 0, MAX_TOKENS) < TOLERANCE
    after = server.generate(PROMPTS[2], 4, str(NEW), temperature=1.0)
    assert after["versions"] == [NEW] * 4
    assert off(after, of_response(references(NEW), PROMPTS[2], after), 0, 4) < TOLERANCE


@named
def test_abort_hands_back_what_was_drawn_and_the_new_version_goes_on_from_there(server, published, references):
    samples = through_an_update(server, published, "abort", clear_cache=True)
    aborted = [(p, s) for p, s in zip(PROMPTS, samples, strict=True) if s["finish"] == "abort"]
    assert aborted
    for prompt, sample in aborted:
        old = split(sample)
        assert 0 < old == len(sample["token_ids"]) < MAX_TOKENS
        assert off(sample, of_response(references(OLD), prompt, sample), 0, old) < TOLERANCE
        prefix = prompt + sample["token_ids"]
        rest = server.generate(prefix, MAX_TOKENS - old, str(NEW), temperature=1.0)
        assert rest["versions"] == [NEW] * (MAX_TOKENS - old)
        assert off(rest, of_response(references(NEW), prefix, rest), 0, MAX_TOKENS - old) < TOLERANCE


@pytest.mark.parametrize("length", [1, 129, 300])
def test_an_update_leaves_nothing_of_the_old_version_in_the_cache(server, published, references, length):
    prompt = PROMPTS[2][:length]
    for version in (OLD, NEW):
        server.update(published[version], version)
        sample = server.generate(prompt, 3, temperature=0.0)
        assert off(sample, of_response(references(version), prompt, sample), 0, 3) < TOLERANCE
