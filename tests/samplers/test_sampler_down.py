"""Where every server refuses a version it is published again, then by the other transfer; what is left is an error that ends a run softly."""

import asyncio

import pytest
from fake_vllm import FakeVllm
from fleet_cases import ToyPublisher, checked, collect

from jaxrl_llm.protocols import Down, SamplerDown
from jaxrl_llm.samplers.servers.answers import ServerFault

pytestmark = pytest.mark.usefixtures("quick_heart")


def test_a_version_that_every_server_refused_once_is_published_whole_again(start, prefixes, caplog):
    async def run() -> None:
        servers = [FakeVllm(), FakeVllm()]
        async with start(servers) as client:
            await client.publish({}, 0)
            await collect(client, prefixes, 1)
            written = []
            client.publisher.finish = lambda version: asyncio.sleep(0, written.append(version))
            for server in servers:
                server.commit_failures = 1
            await client.publish({}, 1)
            assert set(checked(prefixes, await collect(client, prefixes, 2))) == {1}
            assert written == [1, 1]
            assert client.metrics()["sampler/published_again"] == 1

    asyncio.run(run())
    assert caplog.text.count("version 1 is published whole once more, because every server refused it") == 1


class OverMemory(ToyPublisher):
    """Publishes as a learner on the servers' host does."""

    def described(self) -> str:
        return "{}"


def test_the_other_transfer_is_tried_where_one_is_broken_and_is_kept(start, prefixes, caplog):
    async def run() -> None:
        servers = [FakeVllm(), FakeVllm()]
        async with start(servers) as client:
            fields = {n: getattr(client.publisher, n) for n in ("policy", "folder", "dtype", "keep", "canary")}
            client.other = lambda: OverMemory(**fields)
            await client.publish({}, 0)
            await collect(client, prefixes, 1)
            for server in servers:
                server.stage_error = "the file system is gone"
            for version in (1, 2):
                await client.publish({}, version)
                assert set(checked(prefixes, await collect(client, prefixes, 2))) == {version}
            assert all(f"commit_ipc {version}" in server.calls for server in servers for version in (1, 2))
            assert client.metrics()["sampler/published_again"] == 2, "at version 2 the other transfer is used at once"

    asyncio.run(run())
    assert caplog.text.count("is published by the other transfer") == 1


@pytest.mark.parametrize("fault", [{"holds": 77}, {"commit_error": "out of memory"}, {"stage_error": "no such file"}])
def test_a_refusal_by_all_ends_the_run_softly_and_leaves_the_state_clean(start, prefixes, fault):
    async def run() -> None:
        servers = [FakeVllm(), FakeVllm()]
        async with start(servers) as client:
            await client.publish({}, 0)
            checked(prefixes, await collect(client, prefixes, 1))
            for server in servers:
                for name, value in fault.items():
                    setattr(server, name, value)
            await client.publish({}, 1)
            with pytest.raises(
                SamplerDown, match=r"with version 1 of the weights; what was learned is not lost: no server took"
            ) as down:
                await collect(client, prefixes, 1)
            assert isinstance(down.value, Down) and "\n" not in str(down.value)
            assert all(server.url in str(down.value) for server in servers)
            with pytest.raises(SamplerDown):
                await client.publish({}, 2)
            assert client.metrics()["sampler/published_again"] == 1
        assert not {t for t in asyncio.all_tasks() if t is not asyncio.current_task()}, "nothing goes on"

    asyncio.run(run())


def test_servers_that_are_gone_for_good_end_the_run_softly(start, prefixes):
    async def run() -> None:
        server = FakeVllm(step_s=0.01)
        async with start([server], wait_s=0.3) as client:
            await client.publish({}, 0)
            await collect(client, prefixes, 1)
            await server.kill()
            with pytest.raises(SamplerDown, match=server.url):
                await collect(client, prefixes, 1)
            await server.start()

    asyncio.run(run())


def test_a_disk_that_is_full_after_the_first_version_ends_the_run_softly(start, prefixes):
    async def run() -> None:
        async with start([FakeVllm()]) as client:
            await client.publish({}, 0)
            await collect(client, prefixes, 1)

            def full(params, version):
                raise OSError(28, "No space left on device")

            client.publisher.start = full
            with pytest.raises(SamplerDown, match="No space left"):
                await client.publish({}, 1)

    asyncio.run(run())


def test_before_any_version_was_served_there_is_nothing_to_save(start, prefixes):
    async def run() -> None:
        async with start([FakeVllm(holds=77)]) as client:
            await client.publish({}, 0)
            with pytest.raises(ServerFault, match="no server took version 0"):
                await collect(client, prefixes, 1)

    asyncio.run(run())


def test_parameters_that_the_learner_gave_away_are_not_written_again(start, prefixes):
    """The servers are brought to what was written the first time."""
    import jax.numpy as jnp

    async def run() -> None:
        servers = [FakeVllm()]
        async with start(servers) as client:
            await client.publish({}, 0)
            await collect(client, prefixes, 1)
            weights = {"w": jnp.ones(3)}
            written = []
            client.publisher.finish = lambda version: asyncio.sleep(0, written.append(version))
            servers[0].commit_failures = 1
            await client.publish(weights, 1)
            weights["w"].delete()
            assert set(checked(prefixes, await collect(client, prefixes, 1))) == {1}
            assert written == [1]

    asyncio.run(run())
