"""Turns of a conversation go on in the slot of the turn before: they draw what they would draw anew, and prefill what is new alone."""

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest
from sampler_cases import MAX_LENGTH

from jaxrl_llm.agents.service import TokenService
from jaxrl_llm.agents.session import Call, Session
from jaxrl_llm.experience import SamplingParams

SETTINGS = SamplingParams(max_tokens=3)
FLOAT32 = 1e-5  # of log-probs whose sums are made in another order
TOLD = ([7], [1, 2], [4], [9, 9, 2])  # tokens that follow each completion


async def talk(service: TokenService, session: Session, prompt: np.ndarray) -> None:
    """A conversation of up to five turns, as far as there is room."""
    for told in (*TOLD, []):
        done = await service.continue_(session, prompt)
        prompt = np.concatenate([prompt, done.tokens, told]).astype(np.int32)
        if not told or len(prompt) >= MAX_LENGTH:
            return
        await asyncio.sleep(0.01 * (len(prompt) % 3))


def played(tiny, prefixes, settings: SamplingParams = SETTINGS, together: int = 10, **fields):
    """The calls of a conversation from each prefix, `together` at a time, and what the sampler counted."""

    async def main():
        engine = tiny.start(decode_chunk=2, **fields)
        await engine.publish(tiny.params, 4)
        try:
            service = TokenService(engine, settings, at_once=min(len(prefixes), fields.get("slots", 64)))
            sessions = [service.open(seed=i) for i in range(len(prefixes))]
            free = asyncio.Semaphore(together)

            async def one(session: Session, prefix: np.ndarray) -> None:
                async with free:
                    await talk(service, session, prefix)

            await asyncio.gather(*map(one, sessions, prefixes))
            for session in sessions:
                session.close()
            assert engine._batch is None, "the cache outlives the conversations"
            return [session.calls for session in sessions], engine.metrics()
        finally:
            await engine.close()

    return asyncio.run(main())


def same(one: list[tuple[Call, ...]], other: list[tuple[Call, ...]]) -> None:
    """Asserts equal tokens and log-probs, as far as float32 sums in another order allow."""
    assert [len(calls) for calls in one] == [len(calls) for calls in other]
    for a, b in zip((c for calls in one for c in calls), (c for calls in other for c in calls)):
        np.testing.assert_array_equal(a.prompt, b.prompt)
        np.testing.assert_array_equal(a.completion.tokens, b.completion.tokens)
        np.testing.assert_allclose(a.completion.logprobs, b.completion.logprobs, atol=FLOAT32)
        assert a.completion.finish == b.completion.finish


def learners(tiny, calls: list[Call]) -> None:
    """Asserts that log-probs are those of the learner's forward pass over the whole sequence."""
    for begin in range(0, len(calls), 32):
        part = calls[begin : begin + 32]
        for call, logits in zip(part, tiny.logits([call.tokens for call in part])):
            rows = logits[len(call.prompt) - 1 : call.length - 1]
            expected = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
            found = expected[np.arange(len(rows)), call.completion.tokens]
            np.testing.assert_allclose(call.completion.logprobs, found, atol=FLOAT32)


@pytest.mark.parametrize(
    "settings",
    [SETTINGS, replace(SETTINGS, temperature=0.0), replace(SETTINGS, stop_token_ids=(3, 17), stop_strings=("ab", "ca"))],
    ids=["drawn", "greedy", "stopped"],
)  # fmt: skip
def test_turns_draw_in_kept_slots_what_they_draw_anew(tiny, prefixes, settings):
    kept, counted = played(tiny, prefixes, settings)
    anew, recounted = played(tiny, prefixes, settings, keep_turns=False)
    same(kept, anew)
    learners(tiny, [call for calls in kept for call in calls])
    later = [(before, call) for calls in kept for before, call in itertools.pairwise(calls)]
    assert len(later) > 20
    # All but the last token of a turn, which was drawn and never read, stays.
    assert counted["sampler/kept_tokens"] == sum(before.length - 1 for before, _ in later)
    first = sum(len(calls[0].prompt) for calls in kept)
    assert counted["sampler/prefill_tokens"] == first + sum(len(c.prompt) - b.length + 1 for b, c in later)
    assert counted["sampler/prefill_again_tokens"] == counted["sampler/evicted_tokens"] == 0
    assert recounted["sampler/kept_tokens"] == 0
    assert recounted["sampler/prefill_again_tokens"] == sum(before.length for before, _ in later)


def test_slots_that_are_needed_are_given_away_and_their_turns_prefilled_again(tiny, prefixes):
    """Ten conversations in eight slots: each new turn takes the slot that was parked first."""
    few, counted = played(tiny, prefixes, slots=8)
    same(few, played(tiny, prefixes, keep_turns=False)[0])
    evicted, again = counted["sampler/evicted_tokens"], counted["sampler/prefill_again_tokens"]
    assert evicted > 0 and counted["sampler/kept_tokens"] > 0
    turns = sum(before.length for calls in few for before, _ in itertools.pairwise(calls))
    kept = counted["sampler/kept_tokens"]
    assert again <= evicted + len(few) * len(TOLD) and kept + again <= turns <= kept + again + len(few) * len(TOLD)


def test_an_edited_history_and_other_weights_are_prefilled_anew(tiny, prefixes):
    async def main(keep: bool):
        engine = tiny.start(decode_chunk=2, keep_turns=keep)
        await engine.publish(tiny.params, 4)
        service = TokenService(engine, SETTINGS, at_once=2)
        session, counts = service.open(seed=3), []
        first = await service.continue_(session, prefixes[0])
        whole = np.concatenate([prefixes[0], first.tokens, [5]]).astype(np.int32)
        edited = whole.copy()
        edited[len(prefixes[0])] = (edited[len(prefixes[0])] + 1) % 20
        await service.continue_(session, edited)
        counts.append(engine.metrics()["sampler/kept_tokens"])
        await service.continue_(session, whole)  # of the first turn, whose slot is kept beside that of the edited one
        counts.append(engine.metrics()["sampler/kept_tokens"])
        other = dict(tiny.params.items())
        other["embedding"] = tiny.params["embedding"] * 1.5
        await engine.publish(other, 5)
        assert engine._batch is None, "what is kept of other weights takes memory"
        last = await service.continue_(session, np.concatenate([whole, [2]]).astype(np.int32))
        counts.append(engine.metrics()["sampler/kept_tokens"])
        assert last.versions.tolist() == [5, 5, 5]
        await service.hold()
        assert engine._batch is None, "a cache lies beside the learner's update"
        service.flow()
        await engine.close()
        return [session.calls], counts

    kept, counts = asyncio.run(main(True))
    assert counts == [0, len(prefixes[0]) + 2, 0]
    same(kept, asyncio.run(main(False))[0])
