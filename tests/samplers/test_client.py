"""The client against servers that play vLLM: every token of its version, settings, seeds, stops, load."""

import asyncio

import numpy as np
import pytest
from fake_vllm import VOCABULARY, FakeVllm
from fleet_cases import PLAIN, Addresses, checked, collect, until
from sampler_cases import MAX_LENGTH, Letters

from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.publication.vllm_route import ROUTE
from jaxrl_llm.samplers.servers.publisher import Publisher, exported

pytestmark = pytest.mark.usefixtures("quick_heart")


@pytest.mark.parametrize(
    ("release", "lists"), [("0.32.0", False), ("0.32.0", True), ("0.26.0", False), ("0.26.0", True)]
)
@pytest.mark.parametrize("inflight", ["recompute", "stale_kv", "wait", "abort_resume"])
def test_every_token_has_the_version_that_drew_it(start, prefixes, inflight, release, lists):
    """Weights change three times under requests in flight; a log-prob of another version's table would differ."""

    async def run() -> None:
        servers = [FakeVllm(release=release, step_s=0.01, lists=lists) for _ in range(2)]
        async with start(servers, inflight=inflight, sequences=12) as client:
            await client.publish({}, 0)
            asked = asyncio.create_task(collect(client, prefixes, 3))
            await until(lambda: servers[0].active)
            for version in (1, 2, 3):
                await asyncio.sleep(0.04)
                await client.publish({}, version)
            versions = checked(prefixes, await asked)
            groups = await collect(client, prefixes, 2)
            assert set(checked(prefixes, groups)) == {3}, "requests after a publication are its version's"
        assert len(versions) == sum(min(12, MAX_LENGTH - len(p)) * 3 for p in prefixes)
        assert len(set(versions)) > 1
        pause = {"recompute": "pause keep true", "stale_kv": "pause keep false", "wait": "pause wait true"}
        label = ["label 3"] if release >= "0.30" else []
        wanted = ["stage 3", pause.get(inflight, "pause abort true"), "commit 3", *label, "resume"]
        assert servers[0].calls[-len(wanted) :] == wanted
        if inflight in ("wait", "abort_resume"):
            assert not any(body["stream"] for s in servers for body in s.bodies)
        streams = release < "0.32" and inflight in ("recompute", "stale_kv")
        assert (servers[0].counts[ROUTE] > 1) == (lists and not streams), "our route is asked where it is there"

    asyncio.run(run())


def test_settings_arrive_in_the_words_of_vllm(start, prefixes):
    async def run() -> None:
        server = FakeVllm(release="0.26.0")
        settings = SamplingParams(
            max_tokens=9, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.3, stop_token_ids=(4, 7)
        )
        async with start([server], inflight="wait") as client:
            await client.publish({}, 0)
            groups = await collect(client, prefixes[:2], 2, settings)
        sent = server.bodies[0]["sampling_params"]
        want = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3, "n": 2}
        assert want.items() <= sent.items() and sent["max_tokens"] == 9 and sent["stop_token_ids"] == [4, 7]
        assert sent["output_kind"] == 2, "vLLM 0.26 gives only the samples that ended last otherwise"
        assert (
            sent["ignore_eos"] and sent["logprobs"] == 0 and sent["seed"] != server.bodies[1]["sampling_params"]["seed"]
        )
        for one in (one for group in groups.values() for one in group):
            ended = one.tokens[-1] in (4, 7)
            assert one.finish == ("stop" if ended else "length") and (ended or len(one.tokens) == 9)
            assert not set(one.tokens[:-1].tolist()) & {4, 7}

    asyncio.run(run())


def test_what_a_server_read_and_what_it_had_already_is_reported(start, prefixes):
    async def run() -> None:
        async with start([FakeVllm()]) as client:  # which says 8 and 3 bytes
            await client.publish({}, 0)
            await collect(client, prefixes[:1], 1)
            found = client.metrics()
        assert (found["publish/staged_bytes"], found["publish/unchanged_bytes"]) == (8.0, 3.0)

    asyncio.run(run())


def test_completions_serve_where_tokens_in_and_out_are_not_to_be_had(start, prefixes):
    async def run() -> None:
        server = FakeVllm(status={"/inference/v1/generate": 403})
        async with start([server]) as client:
            await client.publish({}, 0)
            checked(prefixes, await collect(client, prefixes, 2))
        assert server.counts["/v1/completions"] == len(prefixes) + 1
        assert server.bodies[0]["return_token_ids"] and server.bodies[0]["prompt"] == prefixes[0].tolist()

    asyncio.run(run())


def test_equal_seeds_give_equal_draws_and_samples_differ(start, prefixes):
    async def run() -> None:
        async with start([FakeVllm(), FakeVllm()]) as client:
            await client.publish({}, 0)
            first, again, other = [await collect(client, prefixes, 3, seed=s) for s in (0, 0, 50)]
        tokens = lambda groups: [[c.tokens.tolist() for c in groups[i]] for i in range(len(prefixes))]  # noqa: E731
        assert tokens(first) == tokens(again) != tokens(other)
        assert all(len({tuple(t) for t in group}) == 3 for group in tokens(first)[:5])

    asyncio.run(run())


def test_samples_that_had_no_token_yet_are_asked_again_by_seeds_of_their_own(start, prefixes):
    """vLLM draws sample i by the request's seed + i: with the same seed, the first of those that waited would draw what sample 0 drew."""

    async def run() -> None:
        server = FakeVllm(step_s=0.01, room=2)
        async with start([server], inflight="abort_resume") as client:
            await client.publish({}, 0)
            asked = asyncio.create_task(collect(client, prefixes[:1], 7))
            for version in (1, 2, 3):
                await until(lambda version=version: len({(p, s) for p, s in server.begun}) >= 2 * version)
                await client.publish({}, version)
            groups = await asked
            checked(prefixes, groups)
        seeds = [seed for prefix, seed in server.begun if prefix == tuple(prefixes[0].tolist())]
        assert len(seeds) == len(set(seeds)) == 7

    asyncio.run(run())


def test_stops_count_from_min_tokens_on_and_none_is_taken_out_of_the_distribution(start, prefixes):
    async def run() -> None:
        server = FakeVllm()
        settings = SamplingParams(max_tokens=12, min_tokens=6, stop_token_ids=tuple(range(0, VOCABULARY, 2)))
        async with start([server]) as client:
            await client.publish({}, 0)
            groups = await collect(client, prefixes, 2, settings)
        checked(prefixes, groups)
        drawn = [one.tokens.tolist() for group in groups.values() for one in group]
        assert all(len(t) >= 6 and not any(x % 2 == 0 for x in t[5:-1]) for t in drawn)
        assert any(x % 2 == 0 for t in drawn for x in t[:5])
        assert all(body["sampling_params"].get("min_tokens") is None for body in server.bodies)

    asyncio.run(run())


def test_a_stop_string_ends_a_response_at_the_token_that_completes_it(start, prefixes):
    async def run() -> None:
        async with start([FakeVllm()]) as client:
            await client.publish({}, 0)
            settings = SamplingParams(max_tokens=12, stop_strings=("a", "c"))
            groups = await collect(client, prefixes, 3, settings)
        for one in (one for group in groups.values() for one in group):
            texts = [Letters().decode([t]) for t in one.tokens.tolist()]
            assert not any(set("ac") & set(t) for t in texts[:-1])
            assert (one.finish == "stop") == bool(set("ac") & set(texts[-1]))

    asyncio.run(run())


def test_load_spreads_and_equal_prefixes_stay_together(start, prefixes):
    async def run() -> None:
        servers = [FakeVllm(step_s=0.002) for _ in range(3)]
        async with start(servers, sequences=8) as client:
            await client.publish({}, 0)
            many = prefixes * 6
            await collect(client, many, 2)  # asked before the first server is through with its update
            shares = [s.counts["/inference/v1/generate"] for s in servers]
            assert min(shares) >= len(many) / 6
            for server in servers:
                server.bodies.clear()
            for _ in range(3):
                await collect(client, prefixes[:1], 1)
            assert sorted(len(s.bodies) for s in servers) == [0, 0, 3]

    asyncio.run(run())


def test_what_nobody_waits_for_is_ended_at_the_server(start, prefixes):
    async def run() -> None:
        server = FakeVllm(step_s=0.02)
        async with start([server]) as client:
            await client.publish({}, 0)
            stream = client.sample(prefixes, 2, PLAIN, list(range(len(prefixes))))
            asked = asyncio.ensure_future(anext(stream))
            await until(lambda: server.active)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await stream.aclose()
            await asyncio.sleep(0.1)
            assert client._fleet is not None and client._fleet.servers[0].load == 0

    asyncio.run(run())


def test_weights_go_from_memory_to_memory_without_a_checkpoint(start, prefixes, tiny, tmp_path):
    """The server is told where copies of the exported tensors lie; nothing is staged or written."""

    async def run() -> None:
        server, addresses = FakeVllm(), Addresses()
        async with start([server]) as client:
            fields = {n: getattr(client.publisher, n) for n in ("policy", "folder", "dtype", "keep")}
            client.publisher = Publisher(**fields, canary=np.zeros(0, np.int32), driver=addresses)
            for version in (0, 1):
                await client.publish(tiny.params, version)
                assert set(checked(prefixes, await collect(client, prefixes, 1))) == {version}
            tensors, _ = exported(tiny.params, policy=tiny.policy, dtype="bfloat16")
            buffer = addresses.buffers[0, 1]
            for name, entry in server.memory["tensors"].items():
                ((number, place, begin, shape),) = entry["shards"]
                array = np.asarray(tensors[name])
                assert (number, begin, shape) == (0, [0] * array.ndim, list(array.shape)) and entry[
                    "dtype"
                ] == "bfloat16"
                assert buffer[place : place + array.nbytes].tobytes() == array.tobytes()
            assert set(server.memory["tensors"]) == set(tensors) and len(tensors) > 10
            assert set(addresses.buffers) == {(0, 0), (0, 1)}, "the version before stays where a late server copies it"
        assert server.calls[-4:] == ["pause keep true", "commit_ipc 1", "label 1", "resume"]
        assert not any("stage" in call for call in server.calls) and not list(tmp_path.rglob("weights"))

    asyncio.run(run())
