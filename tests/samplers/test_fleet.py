"""Servers that come and go, are updated a few at a time, or are slow: every sample once, every token of its version."""

import asyncio
import socket
import time
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from fake_vllm import VOCABULARY, FakeVllm
from fleet_cases import checked, collect, until

from jaxrl_llm.samplers.servers import server_update
from jaxrl_llm.samplers.servers.client import FleetClient
from jaxrl_llm.samplers.servers.discovery import Discovery
from jaxrl_llm.samplers.vllm.sampler import VllmSampler

pytestmark = pytest.mark.usefixtures("quick_heart")

GENERATE = "/inference/v1/generate"


def write(path: Path, servers: list[FakeVllm]) -> None:
    path.write_text("# samplers\n" + "\n".join(s.url for s in servers) + "\n")


def by_file(path: Path, leave_s: float = 60.0) -> Discovery:
    return Discovery(file=str(path), every_s=0.05, leave_s=leave_s)


def counted(client: FleetClient, name: str) -> int:
    assert client._fleet is not None
    return client._fleet.counters[name]


def others(prefixes: list[np.ndarray], by: int) -> list[np.ndarray]:
    """Prefixes that no server knows yet."""
    return [(prefix + by) % VOCABULARY for prefix in prefixes]


def test_a_server_that_joins_during_a_run_gets_the_newest_weights_before_its_first_request(start, prefixes, tmp_path):
    async def run() -> None:
        servers, new = [FakeVllm(step_s=0.01)], await FakeVllm(step_s=0.01).start()
        file = tmp_path / "servers.txt"
        await servers[0].start()
        write(file, servers)
        await servers[0].kill()
        async with start(servers, listed=False, discovery=by_file(file)) as client:
            await client.publish({}, 0)
            asked = asyncio.create_task(collect(client, prefixes * 4, 2))
            await until(lambda: servers[0].active)
            write(file, [*servers, new])
            await client.publish({}, 1)
            await until(lambda: counted(client, "joined"))
            assert new.version == 1 and "resume" in new.calls
            checked(prefixes * 4, await asked)
            checked(others(prefixes, 1), await collect(client, others(prefixes, 1), 2))
        assert len(new.bodies) >= 3
        assert {body["cache_salt"] for body in new.bodies} == {"v1"}, "asked under the newest version alone"

    asyncio.run(run())


def test_a_server_that_cannot_join_is_named_once_with_the_cause(start, prefixes, tmp_path, caplog):
    async def run() -> None:
        servers, new = [FakeVllm()], await FakeVllm(dev=False).start()
        file = tmp_path / "servers.txt"
        await servers[0].start()
        write(file, servers)
        await servers[0].kill()
        async with start(servers, listed=False, discovery=by_file(file)) as client:
            await client.publish({}, 0)
            await collect(client, prefixes, 1)
            write(file, [*servers, new])
            await until(lambda: "gets no requests yet" in caplog.text)
            await asyncio.sleep(1.2)  # more than one further try
        await new.kill()

    asyncio.run(run())
    (said,) = [one.getMessage() for one in caplog.records if "gets no requests yet" in one.getMessage()]
    assert "VLLM_SERVER_DEV_MODE=1" in said


@pytest.mark.parametrize("leave_s", [60.0, 0.0])
def test_a_server_that_left_finishes_its_requests_or_hands_their_tokens_on(start, prefixes, tmp_path, leave_s):
    async def run() -> None:
        servers = [FakeVllm(step_s=0.02) for _ in range(2)]
        for server in servers:
            await server.start()
        file = tmp_path / "servers.txt"
        write(file, servers)
        for server in servers:
            await server.kill()
        async with start(servers, listed=False, discovery=by_file(file, leave_s)) as client:
            await client.publish({}, 0)
            asked = asyncio.create_task(collect(client, prefixes, 3))
            await until(lambda: sum(bool(sequence.tokens) for sequence in servers[1].active) > 3)
            before = len(servers[1].bodies)
            write(file, servers[:1])
            checked(prefixes, await asked)
            await until(lambda: client._fleet is not None and not client._fleet.leaves(servers[1].url))
            assert (
                len(servers[1].bodies) == before and counted(client, "left") == 1 and counted(client, "set_aside") == 0
            )
            asked_for = {tuple(b["token_ids"]) for b in servers[0].bodies} - {tuple(p.tolist()) for p in prefixes}
            if leave_s:
                assert counted(client, "aborted") == 0
            else:
                assert servers[1].calls[-1] == "pause abort true" and counted(client, "aborted") >= 3
                assert asked_for, "a prefix and the tokens that the other one drew"
            write(file, servers)  # it comes back, and gets weights and requests as a new one does
            await client.publish({}, 1)
            await until(lambda: counted(client, "joined") and servers[1].version == 1)
            await collect(client, others(prefixes, 1), 2)
            assert len(servers[1].bodies) > before

    asyncio.run(run())


def test_a_name_stands_for_all_the_addresses_that_it_resolves_to(start, prefixes, tmp_path, monkeypatch):
    """As a headless Service does: one port, an address for each pod; a failing look-up changes nothing."""
    known = ["127.0.0.1"]
    resolve = socket.getaddrinfo

    def resolver(host, port, *rest, **options):
        if host != "samplers.test":
            return resolve(host, port, *rest, **options)
        if not known:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [entry for one in known for entry in resolve(one, port, *rest, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolver)

    async def run() -> None:
        servers = [FakeVllm(step_s=0.002)]
        await servers[0].start()
        servers.append(await FakeVllm(step_s=0.002, host="127.0.0.2", port=servers[0].port).start())
        await servers[0].kill()
        await servers[1].kill()
        name = Discovery(dns=f"http://samplers.test:{servers[0].port}", every_s=0.05)
        async with start(servers, listed=False, discovery=name) as client:
            await client.publish({}, 0)
            await collect(client, prefixes, 1)
            assert servers[0].bodies and not servers[1].bodies
            known.append("127.0.0.2")
            await until(lambda: counted(client, "joined"))
            await collect(client, others(prefixes, 1), 1)
            assert servers[1].bodies
            known.clear()
            await asyncio.sleep(0.15)
            await collect(client, others(prefixes, 2), 1)
            assert counted(client, "left") == 0

    asyncio.run(run())


def test_a_list_that_names_no_server_or_no_address_says_so(tmp_path):
    file = tmp_path / "servers.txt"
    look = lambda: asyncio.run(by_file(file).look())  # noqa: E731
    with pytest.raises(OSError, match=r"servers\.txt"):
        look()
    file.write_text("# none yet\n")
    with pytest.raises(OSError, match="names no server"):
        look()
    file.write_text("10.0.0.7:9000\n")
    with pytest.raises(ValueError, match=r"'10.0.0.7:9000' is no address: a line is like http://HOST:PORT"):
        look()
    file.write_text("http://a:1/ # first\nhttp://a:1\n\nhttp://b:1\n")
    assert look() == ["http://a:1", "http://b:1"]
    with pytest.raises(ValueError, match="http://NAME:PORT"):
        Discovery(dns="samplers:9000")
    with pytest.raises(ValueError, match="VLLM_SPAWN = False"):
        VllmSampler(spawn=True, discovery=by_file(file))


@pytest.mark.parametrize("inflight", ["wait", "abort_resume"])
def test_a_request_that_reaches_a_paused_server_is_asked_again(start, prefixes, monkeypatch, inflight):
    """The server holds it until the resume, which waits for what is in flight."""
    monkeypatch.setattr(server_update, "_HELD_S", 0.2)

    async def run() -> None:
        server = FakeVllm(step_s=0.002)
        async with start([server], inflight=inflight) as client:
            await client.publish({}, 0)
            await collect(client, prefixes[:1], 1)
            server.slow["*"] = 0.15  # on its way while the pause, asked sooner, is answered
            for route in ("/pause", "/collective_rpc", "/resume", "/update_weight_version"):
                server.slow[route] = 0.0
            asked = asyncio.create_task(collect(client, prefixes, 2))
            await until(lambda: client._fleet.servers[0].flights)
            begin = time.monotonic()
            await client.publish({}, 1)
            versions = checked(prefixes, await asked)
            assert time.monotonic() - begin < 10 and set(versions) == {1}
            assert counted(client, "set_aside") == counted(client, "retries") == 0
            assert client.metrics()["sampler/held"] >= 1

    asyncio.run(run())


def test_servers_updated_one_at_a_time_never_stop_sampling_and_new_requests_wait_for_new_weights(start, prefixes):
    """What was asked under version 0 is drawn by servers of version 0 while others are paused; nothing asked after is."""

    async def run() -> None:
        servers = [FakeVllm(step_s=0.004) for _ in range(3)]
        for server in servers:
            server.slow["/update_weight_version"] = 0.25
        async with start(servers, at_once=1, sequences=6, inflight="wait") as client:
            await client.publish({}, 0)
            await until(lambda: all(s.version == 0 and s.going.is_set() for s in servers))
            asked = asyncio.create_task(collect(client, prefixes * 12, 2))
            await until(lambda: all(s.active for s in servers))
            await client.publish({}, 1)
            fresh = asyncio.create_task(collect(client, others(prefixes, 3), 2))
            shut, drawn = [], []
            while not asked.done():
                paused = [s for s in servers if not s.going.is_set()]
                shut.append(len(paused))
                drawn.append(bool(paused) and any(s.active and s.version == 0 for s in servers if s not in paused))
                await asyncio.sleep(0.005)
            versions = checked(prefixes * 12, await asked)
            assert max(shut) == 1 and any(drawn) and set(versions) == {0, 1}
            assert set(checked(others(prefixes, 3), await fresh)) == {1}
            await until(lambda: all(s.version == 1 for s in servers))  # the last one may be updated when all is drawn

    asyncio.run(run())


def test_a_server_that_is_slow_to_update_holds_neither_the_others_nor_the_next_publication(start, prefixes):
    async def run() -> None:
        servers = [FakeVllm(step_s=0.002) for _ in range(3)]
        async with start(servers, straggler_s=0.1, straggler=2.0, wait_s=5.0) as client:
            await client.publish({}, 0)
            await collect(client, prefixes, 1)
            servers[2].slow["/pause"] = 30.0
            begin = time.monotonic()
            for version in (1, 2):
                await client.publish({}, version)
                groups = await collect(client, others(prefixes, version), 2)
                assert set(checked(others(prefixes, version), groups)) == {version}
            assert time.monotonic() - begin < 4 and counted(client, "late_updates") >= 1
            assert [s.version for s in servers] == [2, 2, 0]

    asyncio.run(run())


def test_no_sample_keeps_a_token_of_weights_that_the_canary_refused(start, prefixes):
    """Its tokens are off the version's table, in every one of the n samples; they are thrown away."""

    async def run() -> None:
        servers = [FakeVllm(), FakeVllm(step_s=0.005)]
        async with start(servers, wait_s=3.0) as client:
            await client.publish({}, 0)
            asked = asyncio.create_task(collect(client, prefixes, 4))
            await until(lambda: servers[1].active)
            servers[1].off, servers[1].off_drawn = 0.2, {1: 0.2}
            servers[1].slow[GENERATE] = 0.06  # the canary takes a while, in which the new weights draw
            await client.publish({}, 1)
            versions = checked(prefixes, await asked)
            assert {0, 1} >= set(versions)
            assert counted(client, "set_aside") >= 1

    asyncio.run(run())


NOISE = [
    b"",
    b"[]",
    b'{"results": [{"version": "x", "state": "staged"}]}',
    b'{"results": [7]}',
    b"\xff",
    b"[" * 100_000,
]


@asynccontextmanager
async def garbled(start, prefixes, noise: bytes):
    """A client, and its two servers, of which the second has begun to answer with noise."""
    servers = [FakeVllm(), FakeVllm()]
    async with start(servers) as client:
        await client.publish({}, 0)
        await collect(client, prefixes, 1)
        servers[1].noise = noise
        yield client, servers


@pytest.mark.parametrize("noise", NOISE)
def test_a_server_that_answers_an_update_with_garbage_is_set_aside_and_the_others_go_on(start, prefixes, noise):
    async def run() -> None:
        async with garbled(start, prefixes, noise) as (client, servers):
            await client.publish({}, 1)
            assert set(checked(prefixes, await collect(client, prefixes, 1))) == {1}
            await until(lambda: counted(client, "set_aside") == 1)
            servers[1].noise = None
            await until(lambda: servers[1].version == 1 and counted(client, "rejoined"))

    asyncio.run(run())


@pytest.mark.parametrize("noise", NOISE)
def test_a_server_that_answers_requests_with_garbage_is_set_aside_and_others_are_asked(start, prefixes, noise):
    async def run() -> None:
        async with garbled(start, prefixes, noise) as (client, _):
            checked(others(prefixes, 1), await collect(client, others(prefixes, 1), 1))
            assert counted(client, "set_aside") == 1

    asyncio.run(run())


def test_a_server_that_leaves_and_fails_does_not_make_the_others_update_a_failure(start, prefixes, tmp_path):
    async def run() -> None:
        servers = [await FakeVllm(step_s=step_s).start() for step_s in (0.01, 0.3)]
        file = tmp_path / "servers.txt"
        write(file, servers)
        for server in servers:
            await server.kill()
        async with start(servers, listed=False, discovery=by_file(file)) as client:
            await client.publish({}, 0)
            asked = asyncio.create_task(collect(client, prefixes, 2))
            await until(lambda: len(servers[1].active) > 5)
            servers[1].slow["/collective_rpc"], servers[1].status["/collective_rpc"] = 0.3, 500
            before = servers[1].counts["/collective_rpc"]
            await client.publish({}, 1)
            await until(lambda: servers[1].counts["/collective_rpc"] > before)
            write(file, servers[:1])
            await until(lambda: counted(client, "left"))
            await client.publish({}, 2)
            checked(prefixes, await asked)
            assert servers[0].version == 2

    asyncio.run(run())
