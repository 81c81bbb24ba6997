"""Conversations: turns of a session find their server again, share one batch, and are answered alike by both samplers."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from agents.gateways import talking
from agents.scripted import Scripted
from fake_vllm import VOCABULARY, FakeVllm
from fleet_cases import running
from sampler_cases import MAX_LENGTH

from jaxrl_llm.agents.gateway import Gateway
from jaxrl_llm.agents.service import TokenService
from jaxrl_llm.agents.session import Session
from jaxrl_llm.experience import Completion, SamplingParams
from jaxrl_llm.samplers.servers.answers import Ask, Piece

SETTINGS = SamplingParams(max_tokens=3)


async def turns(service: TokenService, session: Session, count: int, prompt: np.ndarray) -> list[np.ndarray]:
    """The prompts of a conversation, in which one token follows each completion."""
    prompts = []
    for number in range(count):
        prompts.append(prompt)
        done = await service.continue_(session, prompt)
        prompt = np.concatenate([prompt, done.tokens, [number]]).astype(np.int32)
    return prompts


def embedded(tiny, run, **fields):
    async def main():
        engine = tiny.start(**fields)
        await engine.publish(tiny.params, 4)
        try:
            return await run(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def capacities(engine) -> list:
    return [program[1] for program in engine._programs if program[0] == "empty"]


def test_growing_turns_of_many_sessions_share_one_batch(tiny, prefixes):
    async def talk(engine):
        service = TokenService(engine, SETTINGS, at_once=8)
        sessions = [service.open(seed=i) for i in range(8)]
        prompts = await asyncio.gather(*(turns(service, one, 5, prefixes[i]) for i, one in enumerate(sessions)))
        return capacities(engine), prompts, engine.metrics()

    (capacity,), prompts, counted = embedded(tiny, talk, decode_chunk=2, keep_turns=False)
    assert (capacity.slots, capacity.length) == (8, MAX_LENGTH)
    again = [len(later) - 1 for talk in prompts for later in talk[1:]]  # all but the token that is new
    assert counted["sampler/prefill_again_tokens"] == sum(again)
    assert counted["sampler/prefill_tokens"] == sum(len(p) for talk in prompts for p in talk)


def test_a_short_session_takes_a_small_batch(tiny, prefixes):
    async def talk(engine):
        service = TokenService(engine, SETTINGS, at_once=2)
        await turns(service, service.open(seed=1, max_length=14), 1, prefixes[0])
        return capacities(engine)

    (capacity,) = embedded(tiny, talk)
    assert (capacity.slots, capacity.length) == (2, 16)


def test_first_turns_of_a_group_are_prefilled_once_and_draw_as_they_do_alone(tiny, prefixes):
    async def talk(engine, together):
        service = TokenService(engine, SETTINGS, at_once=4)
        sessions = [service.open(seed=i) for i in range(4)]
        calls = [service.continue_(one, prefixes[1]) for one in sessions]
        engine.metrics()
        done = await asyncio.gather(*calls) if together else [await call for call in calls]
        return [one.tokens.tolist() for one in done], engine.metrics()["sampler/prefill_tokens"]

    tokens, prefilled = embedded(tiny, lambda engine: talk(engine, True))
    alone, each = embedded(tiny, lambda engine: talk(engine, False))
    assert tokens == alone and len({tuple(one) for one in tokens}) > 1
    assert (prefilled, each) == (len(prefixes[1]), 4 * len(prefixes[1]))


@pytest.mark.parametrize("sequences", [1024, 3])
def test_a_session_stays_on_its_server_while_the_load_allows_it(tiny, tmp_path, sequences):
    """16 sessions of 6 turns on two servers; with room for 3 on each, some have to move, and none fails."""

    async def main():
        servers = [FakeVllm(step_s=0.001), FakeVllm(step_s=0.002)]
        async with running(tiny, tmp_path, servers, sequences=sequences) as client:
            await client.publish({}, 1)
            service = TokenService(client, SETTINGS)
            rng = np.random.default_rng(0)
            starts = [rng.integers(0, VOCABULARY, 4).astype(np.int32) for _ in range(16)]
            await asyncio.gather(*(turns(service, service.open(seed=i), 6, s) for i, s in enumerate(starts)))
            return starts, [[body["token_ids"] for body in server.bodies] for server in servers]

    starts, asked = asyncio.run(main())
    assert sum(map(len, asked)) == 96 and min(map(len, asked)) > 20
    moved = sum(all(any(ids[:4] == start.tolist() for ids in one) for one in asked) for start in starts)
    assert moved == 0 if sequences == 1024 else moved > 0


BODY = {"model": "policy", "token_ids": [3, 1, 4], "sampling_params": {"max_tokens": 3, "logprobs": 1, "n": 2}}


async def answers(sampler, **more):
    """The answer's text without its request's number, and the calls of its session."""
    async with talking(sampler, settings=SETTINGS, seed=11) as talk:
        status, _, body = await talk.post("/inference/v1/generate", {**BODY, **more})
        assert status == 200, body
        body.pop("request_id")
        return json.dumps(body), talk.session.calls


def test_the_generate_route_gives_the_embedded_samplers_very_tokens(tiny):
    async def main(engine):
        return await answers(engine)

    text, calls = embedded(tiny, main)
    for choice, call in zip(json.loads(text)["choices"], calls, strict=True):
        assert choice["token_ids"] == call.completion.tokens.tolist()
        assert [e["token"] for e in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in choice["token_ids"]]
        assert [e["token_id"] for e in choice["logprobs"]["content"]] == choice["token_ids"]
        given = np.asarray([e["logprob"] for e in choice["logprobs"]["content"]], np.float32)
        assert given.tobytes() == call.completion.logprobs.tobytes()
        assert choice["weight_versions"] == [{"version": "4", "start": 0, "end": 3}]
        seen = np.concatenate([call.prompt, call.completion.tokens])
        logits = tiny.logits([seen])[0].astype(np.float64)
        expected = [row[t] - np.log(np.exp(row).sum()) for row, t in zip(logits[2:], call.completion.tokens)]
        np.testing.assert_allclose(given, expected, rtol=0, atol=1e-4)

    replayed = {call.prompt.tobytes(): [] for call in calls}
    for call in calls:
        replayed[call.prompt.tobytes()].append(call.completion)

    class Replay(Scripted):
        async def sample(self, prefixes, n, settings, seeds):
            yield 0, [replayed[prefixes[0].tobytes()].pop(0)]

    again, _ = asyncio.run(answers(Replay(lambda *_: [])))
    assert again == text


@pytest.mark.parametrize("lists", [False, True])
def test_servers_of_both_ages_give_the_same_bytes(tiny, tmp_path, lists):
    async def main(release, folder):
        folder.mkdir()
        async with running(tiny, folder, [FakeVllm(release=release, lists=lists)]) as client:
            await client.publish({}, 4)
            return (await answers(client))[0]

    old, new = (asyncio.run(main(release, tmp_path / release)) for release in ("0.30.0", "0.32.0"))
    assert old == new and '"weight_versions": [{"version": "4", "start": 0, "end": 3}]' in old


EXCHANGE = json.loads((Path(__file__).parents[1] / "fixtures" / "generate_exchange.json").read_text())


@pytest.mark.parametrize("age", ["0.31", "0.32"])
def test_an_exchange_in_the_form_of_either_age_passes_through_the_route_unchanged(age):
    """The client reads a server's answers in the shape of its age; the route gives them on, and in both of the shapes."""

    class Server(Scripted):
        """Answers as recorded, as the vLLM client reads it."""

        async def sample(self, prefixes, n, settings, seeds):
            (turn,) = (t for t in EXCHANGE["turns"] if t["request"]["token_ids"] == prefixes[0].tolist())
            piece = Piece()
            ask = Ask(tokens=prefixes[0].tolist(), sampling={"n": 1, "max_tokens": settings.max_tokens})
            piece.take(turn["answers"][age], ask, 151_700, 3)
            self.settings.append(settings)
            assert piece.finish == "stop"
            yield 0, [Completion(tokens=np.asarray(piece.tokens, np.int32), logprobs=np.asarray(piece.logprobs, np.float32),
                                 versions=np.asarray(piece.versions, np.int32), finish="stop")]  # fmt: skip

    async def main():
        server, given = Server(lambda *_: []), SamplingParams(max_tokens=64, stop_token_ids=(151645,))
        async with talking(server, settings=given, seed=11) as talk:
            found = []
            for turn in EXCHANGE["turns"]:
                status, _, body = await talk.post("/inference/v1/generate", turn["request"], **EXCHANGE["headers"])
                assert status == 200, body
                found += body["choices"]
            return found, talk.session.branches(), server.settings

    choices, (branch,), settings = asyncio.run(main())
    for choice, turn in zip(choices, EXCHANGE["turns"], strict=True):
        for recorded in turn["answers"].values():
            entries = zip(choice["logprobs"]["content"], recorded["logprobs"]["content"], strict=True)
            assert all(theirs.items() <= ours.items() for ours, theirs in entries)
            assert all(choice[name] == value for name, value in recorded.items() if name != "logprobs")
    # The second prompt goes on from the first one's completion: one branch, in which the two completions are learned from.
    first, second = (turn["request"]["token_ids"] for turn in EXCHANGE["turns"])
    drawn = [choice["token_ids"] for choice in choices]
    assert [*branch.prefix, *branch.tokens] == [*second, *drawn[1]] and branch.prefix.tolist() == first
    assert branch.tokens[branch.mask].tolist() == [*drawn[0], *drawn[1]]
    assert [(s.max_tokens, s.stop_token_ids) for s in settings] == [(64, (151645, 151643))] * 2


def test_gateways_take_their_prompts_length_from_the_sampler(tiny):
    async def main(engine):
        gateway = await Gateway().start(TokenService(engine, SETTINGS))
        try:
            return gateway.service.open(seed=1).max_length, gateway.service.open(seed=1, max_length=9).max_length
        finally:
            await gateway.close()

    assert embedded(tiny, main) == (MAX_LENGTH, 9)
