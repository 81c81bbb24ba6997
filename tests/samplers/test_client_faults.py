"""The client against servers that play vLLM and fail, or are not set up as they must be: no sample lost, and errors that help."""

import asyncio
import time

import numpy as np
import pytest
from fake_vllm import VOCABULARY, FakeVllm
from fleet_cases import Addresses, checked, collect, until

from jaxrl_llm.protocols import SamplerDown
from jaxrl_llm.samplers.servers.answers import Refused, ServerFault
from jaxrl_llm.samplers.servers.publisher import Publisher

pytestmark = pytest.mark.usefixtures("quick_heart")


@pytest.mark.parametrize("release", ["0.32.0", "0.26.0"])
def test_a_killed_server_loses_no_sample_and_rejoins_with_the_present_weights(start, prefixes, release):
    async def run() -> None:
        servers = [FakeVllm(release=release, step_s=0.01) for _ in range(2)]
        async with start(servers) as client:
            await client.publish({}, 0)
            asked = asyncio.create_task(collect(client, prefixes, 3))
            await until(lambda: servers[0].active)
            await servers[0].kill()
            checked(prefixes, await asked)
            await client.publish({}, 1)
            assert set(checked(prefixes, await collect(client, prefixes, 1))) == {1}
            await servers[0].start()
            await until(lambda: servers[0].version == 1 and servers[0].going.is_set())
            await asyncio.sleep(0.1)
            before = servers[0].counts["/inference/v1/generate"]
            others = [(prefix + 1) % VOCABULARY for prefix in prefixes]  # no server knows them
            checked(others, await collect(client, others, 1))
            assert servers[0].counts["/inference/v1/generate"] > before
            found = client.metrics()
            assert found["sampler/retries"] >= 1 and found["sampler/set_aside"] == 1 and found["sampler/rejoined"] == 1

    asyncio.run(run())


def test_a_slow_server_is_left_after_its_limit_and_set_aside_in_the_end(start, prefixes):
    async def run() -> None:
        servers = [FakeVllm(), FakeVllm()]
        async with start(servers, request_s=60.0) as client:
            await client.publish({}, 0)
            await collect(client, prefixes[:1], 1)
            assert client._fleet is not None
            slow, quick = (server.http for server in client._fleet.servers)
            assert slow.request_s == quick.request_s == 60.0
            slow.request_s = 0.15  # of this one alone: a busy machine may keep the other's answers for longer
            servers[0].slow["/inference/v1/generate"] = 60.0
            checked(prefixes, await collect(client, prefixes, 2))
            found = client.metrics()
        assert found["sampler/slow"] >= 3 and found["sampler/set_aside"] == 1

    asyncio.run(run())


@pytest.mark.parametrize("fault", [{"status": {"/inference/v1/generate": 500}}, {"garbage": True}])
def test_a_request_that_fails_everywhere_ends_with_an_error_that_names_the_server(start, prefixes, fault):
    async def run() -> None:
        server = FakeVllm()
        async with start([server], tries=2, wait_s=0.4) as client:
            await client.publish({}, 0)
            await collect(client, prefixes, 1)
            for name, value in fault.items():
                setattr(server, name, value)
            server.off = 0.0
            begin = time.monotonic()
            with pytest.raises(SamplerDown, match=f"{server.url}"):
                await collect(client, prefixes, 1)
            assert time.monotonic() - begin < 5

    asyncio.run(run())


def test_a_server_without_development_endpoints_is_refused_with_what_to_do(start, prefixes):
    async def run() -> None:
        async with start([FakeVllm(dev=False)]) as client:
            await client.publish({}, 0)
            with pytest.raises(Refused, match="VLLM_SERVER_DEV_MODE=1"):
                await collect(client, prefixes, 1)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fault", "proxied", "message"),
    [
        ({"extension": False}, False, "--worker-extension-cls jaxrl_llm.publication.vllm_plugin.OrbaxWorkerExtension"),
        ({"status": {"/health": 401}}, False, "answered GET /health with 401.*api_key_variable.*proxied = True"),
        ({}, True, "is no proxy of ours, it may be vLLM itself: leave out VllmSampler.proxied"),
    ],
)
def test_a_server_of_another_setup_is_refused_with_what_to_do(start, prefixes, fault, proxied, message):
    async def run() -> None:
        async with start([FakeVllm(**fault)], proxied=proxied) as client:
            await client.publish({}, 0)
            with pytest.raises(Refused, match=message):
                await collect(client, prefixes, 1)

    asyncio.run(run())


def test_responses_that_a_servers_shorter_context_cuts_are_counted_and_told_once(start, prefixes, caplog):
    async def run() -> None:
        longest = max(len(prefix) for prefix in prefixes)
        async with start([FakeVllm(context=longest + 2)]) as client:
            await client.publish({}, 0)
            groups = await collect(client, prefixes, 2)
            cut = [one for group in groups.values() for one in group if one.finish == "length" and len(one.tokens) < 12]
            assert cut and client.metrics()["sampler/clipped"] == len(cut)

    asyncio.run(run())
    assert caplog.text.count("--max-model-len") == 1


FAILED_UPDATES = {
    "wrong architecture": ({"stage_error": "model.layers.0.mlp is [64, 32] there"}, "model.layers.0.mlp is", "stage 0"),
    "version skipped": ({"commit_adds": 1}, "stays paused", "commit 0"),
    "commit fails": ({"commit_error": "the model lacks lm_head"}, "the model lacks lm_head.*stays paused", "commit 0"),
    "label fails": ({"status": {"/update_weight_version": 500}}, "a fault of the test", "commit 0"),
    "another model": ({"holds": 77}, "scores the canary apart from the learner", "pause abort true"),
    "probabilities that do not add up": (
        {"off": 0.3},
        "differ by 0.35 of themselves, rounding explains 0.0001",
        "pause abort true",
    ),
    "a plugin that compares nothing": ({"checks": False}, "install the learner's version of jaxrl-llm", "commit 0"),
}


@pytest.mark.parametrize("name", FAILED_UPDATES)
def test_a_failed_update_is_never_resumed_and_says_why(start, prefixes, name):
    fault, message, last = FAILED_UPDATES[name]

    async def run() -> None:
        server = FakeVllm(**fault)
        async with start([server]) as client:
            await client.publish({}, 0)
            with pytest.raises((ServerFault, Refused), match=message) as raised:
                await collect(client, prefixes, 1)
            assert server.url in str(raised.value)
            calls = list(server.calls)
        assert calls[-1] == last and not server.bodies

    asyncio.run(run())


def test_a_close_as_an_update_begins_leaves_none_behind(start, prefixes, monkeypatch, caplog):
    async def run() -> None:
        async with start([FakeVllm()]) as client:
            await client.publish({}, 0)
            await collect(client, prefixes, 1)
            monkeypatch.setattr(client.publisher, "finish", lambda version: asyncio.sleep(0))
            await client.publish({}, 1)
            while "Fleet.publish" not in running_now():
                await asyncio.sleep(0)
            await client.close()
            assert not {"Fleet.publish", "Updates.bring"} & running_now()

    def running_now() -> set[str]:
        return {task.get_coro().__qualname__ for task in asyncio.all_tasks()}

    asyncio.run(run())
    assert "set aside" not in caplog.text


def test_memory_that_a_late_server_copies_is_not_overwritten(start, prefixes, tiny):
    """Versions take two places in turn: the one of version 1 is that of 3."""

    async def run() -> None:
        servers = [FakeVllm() for _ in range(3)]
        async with start(servers, straggler_s=0.1, straggler=2.0) as client:
            fields = {n: getattr(client.publisher, n) for n in ("policy", "folder", "dtype", "keep")}
            client.publisher = Publisher(**fields, canary=np.zeros(0, np.int32), driver=Addresses())
            await client.publish(tiny.params, 0)
            await collect(client, prefixes, 1)
            servers[2].slow["/collective_rpc"] = 2.0
            await client.publish(tiny.params, 1)
            await client.publish(tiny.params, 2)
            assert servers[2].version == 0, "one version later there is no need to wait"
            await client.publish(tiny.params, 3)
            assert servers[2].version >= 1
            assert set(checked(prefixes, await collect(client, prefixes, 1))) == {3}

    asyncio.run(run())


def test_requests_go_on_with_the_servers_that_took_the_update(start, prefixes):
    async def run() -> None:
        servers = [FakeVllm(), FakeVllm(step_s=0.005)]
        async with start(servers, wait_s=3.0) as client:
            await client.publish({}, 0)
            asked = asyncio.create_task(collect(client, prefixes, 3))
            await until(lambda: servers[1].active)
            servers[1].off = 0.2  # its canary fails from now on
            await client.publish({}, 1)
            checked(prefixes, await asked)
            assert set(checked(prefixes, await collect(client, prefixes, 2))) == {1}
            assert client._fleet is not None
            await until(lambda: client._fleet.counters["set_aside"])
            seen = servers[1].counts["/inference/v1/generate"]
            servers[1].off = 0.0
            await until(lambda: servers[1].going.is_set() and servers[1].counts["/inference/v1/generate"] > seen)
            assert servers[1].version == 1

    asyncio.run(run())


def test_a_wait_for_servers_ends_within_its_limit_and_names_each_cause(start, prefixes):
    async def run() -> None:
        server = FakeVllm(step_s=0.01)
        async with start([server], wait_s=0.3) as client:
            await client.publish({}, 0)
            await collect(client, prefixes, 1)
            await server.kill()
            begin = time.monotonic()
            with pytest.raises(SamplerDown, match=f"{server.url}.*Connect"):
                await collect(client, prefixes, 1)
            assert time.monotonic() - begin < 2
            await server.start()

    asyncio.run(run())


@pytest.mark.parametrize("before", ["the first version", "its answer"])
def test_whoever_waits_for_samples_is_told_that_the_sampler_is_closed(start, prefixes, before):
    async def run() -> None:
        server = FakeVllm(step_s=0.1)
        async with start([server]) as client:
            if before == "the first version":
                client.publisher.finish = lambda version: asyncio.Event().wait()
            await client.publish({}, 0)
            asked = asyncio.create_task(collect(client, prefixes, 2))
            await until(lambda: server.active or (before == "the first version" and server.counts))
            await client.close()
            with pytest.raises(RuntimeError, match="the sampler is closed"):
                await asyncio.wait_for(asked, 5)

    asyncio.run(run())
