"""Several learners of adapters on one fleet of servers that play vLLM: whose adapters are whose, and who removes them."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from adapter_fleet import client_of
from aiohttp import web
from fake_vllm import FakeVllm
from fleet_cases import checked, collect, until

from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.samplers.vllm import adapters
from jaxrl_llm.samplers.vllm.sampler import VllmSampler

pytestmark = pytest.mark.usefixtures("quick_heart")


class Telling(FakeVllm):
    """A server whose metrics name the adapters of requests that run, as vLLM's do: a line for each state that it was in, whose value is
    the time when it was last in it."""

    used: tuple[str, ...] = ()

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = ""
        for names, time in ((("math~00ff-3-4",), "1.5e+09"), (self.used, "1.6e+09")):
            lists = f'max_lora="4",running_lora_adapters="{",".join(names)}",waiting_lora_adapters=""'
            lines += f"vllm:lora_requests_info{{{lists}}} {time}\n"
        return web.Response(text=lines)


def owners(server: FakeVllm) -> dict[str, list[int]]:
    """{tenant: versions} of the adapters that a server holds."""
    found: dict[str, list[int]] = {}
    for name in server.adapters or ():
        found.setdefault(name.partition("~")[0], []).append(adapters.version_named(name))
    return {tenant: sorted(versions) for tenant, versions in found.items()}


def test_two_learners_on_one_fleet_unload_their_own_adapters_alone(tiny, tmp_path, prefixes):
    async def run() -> None:
        servers = [await FakeVllm(adapters={}, dev=False).start() for _ in range(2)]
        urls = [server.url for server in servers]
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
        one = client_of(tiny, tmp_path / "one", urls, tenant="math.v2")
        other = client_of(tiny, tmp_path / "other", urls, tenant="math")  # the beginning of the other's name
        async with one as first, other as second:
            for version in range(3):
                await first.publish({}, version)
                await second.publish({}, 10 + version)
                assert set(checked(prefixes, await collect(first, prefixes, 2))) == {version}
                assert set(checked(prefixes, await collect(second, prefixes, 2))) == {10 + version}
            for server in servers:
                assert owners(server) == {"math.v2": [2], "math": [12]}
                async with aiohttp.ClientSession() as session, session.get(f"{server.url}/v1/models") as answer:
                    names = {model["id"] for model in json.loads(await answer.text())["data"]}
                assert {name.partition("~")[0] for name in names} == {"policy", "math", "math.v2"}
            for client in (first, second):
                found = client.metrics()
                assert found["sampler/retries"] == found["sampler/set_aside"] == 0
            await second.close()
            for server in servers:
                assert owners(server) == {"math.v2": [2]}
        for server in servers:
            assert owners(server) == {}
            await server.kill()

    asyncio.run(run())


def test_a_restarted_run_removes_what_the_former_left_and_nothing_uses(tiny, tmp_path, prefixes):
    """Beside them a nameless learner's, another tenant's, and one of the former run for which a request still runs."""
    left = {"math~00ff-3-4": 3, "math~00ff-4-5": 4, "00ff-7-8": 7, "maths~11-8-9": 8}

    async def run() -> None:
        server: Any = await Telling(adapters=dict(left), dev=False).start()
        server.used = ("math~00ff-4-5", "maths~11-8-9")
        async with client_of(tiny, tmp_path, [server.url], tenant="math") as client:
            await client.publish({}, 5)
            await collect(client, prefixes[:1], 1)
            kept = set(left) - {"math~00ff-3-4"}
            assert set(server.adapters) > kept and owners(server)["math"] == [4, 5]
            server.used = ()
            twin = "math~22-9-1"  # of a run that began later under the same name
            server.adapters[twin] = 9
            await client.publish({}, 6)
            await collect(client, prefixes[:1], 1)
            kept = {"00ff-7-8", "maths~11-8-9", twin}
            assert set(server.adapters) > kept and owners(server)["math"] == [6, 9]
        await server.kill()

    asyncio.run(run())


def test_a_learner_without_a_name_leaves_all_others_alone(tiny, tmp_path, prefixes):
    async def run() -> None:
        server = await FakeVllm(adapters={"math~00ff-3-4": 3, "00ff-7-8": 7}, dev=False, step_s=0.01).start()
        async with client_of(tiny, tmp_path, [server.url]) as client:
            await client.publish({}, 0)
            asked = asyncio.create_task(collect(client, prefixes[:2], 1, SamplingParams(max_tokens=12)))
            await until(lambda: server.active)
            await client.publish({}, 1)
            await client._publication
            assert sorted(server.adapters.values()) == [0, 1, 3, 7], "requests for version 0 are in flight"
            await asked
            await client.publish({}, 2)
            await collect(client, prefixes[:1], 1)
            assert sorted(server.adapters.values()) == [2, 3, 7]
        await server.kill()

    asyncio.run(run())


def test_a_server_that_leaves_a_fleet_keeps_nothing_of_the_learner(tiny, tmp_path, prefixes):
    async def run() -> None:
        servers = [await FakeVllm(adapters={"00ff-7-8": 7}, dev=False).start() for _ in range(2)]
        async with client_of(tiny, tmp_path, [server.url for server in servers]) as client:
            await client.publish({}, 0)
            await collect(client, prefixes, 1)
            client._fleet.leave(client._fleet.servers[0], 1.0)
            await until(lambda: not client._fleet.leaves(servers[0].url))
            assert [sorted(server.adapters.values()) for server in servers] == [[7], [0, 7]]
            assert set(checked(prefixes, await collect(client, prefixes, 1))) == {0}
        for server in servers:
            await server.kill()

    asyncio.run(run())


def test_a_learner_that_ends_leaves_nothing_where_a_server_answers(tiny, tmp_path, prefixes):
    """One of two servers is gone, and requests are in flight at the other, which holds those of a nameless run too."""

    async def run() -> None:
        gone, server = [await FakeVllm(adapters={"00ff-7-8": 7}, dev=False, step_s=0.01).start() for _ in range(2)]
        async with client_of(tiny, tmp_path, [gone.url, server.url]) as client:
            for version in range(2):
                await client.publish({}, version)
                await collect(client, prefixes[:1], 1)
            asked = asyncio.create_task(collect(client, prefixes[:2], 1, SamplingParams(max_tokens=12)))
            await until(lambda: server.active)
            await gone.kill()
        with pytest.raises(RuntimeError, match="the sampler is closed"):
            await asked
        assert server.adapters == {"00ff-7-8": 7}
        await server.kill()

    asyncio.run(run())


@pytest.mark.parametrize("tenant", ["a-b", "a~b", "a b", "ä", "a/b", "a\n"])
def test_a_name_of_other_signs_is_refused(tenant):
    with pytest.raises(ValueError, match=r"VllmSampler.tenant must be letters, digits, '_' and '.' alone, or empty"):
        VllmSampler(spawn=False, urls=("http://a:1",), adapters=True, tenant=tenant)


def test_a_name_without_adapters_alone_is_refused():
    with pytest.raises(
        ValueError, match=r"VllmSampler.tenant .* \(got 'math' with adapters=False\): set adapters = True"
    ):
        VllmSampler(spawn=False, urls=("http://a:1",), tenant="math")
