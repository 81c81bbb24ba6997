"""No token counts with the version of other weights: what happens to a server behind its client's back is found before a token is used."""

import asyncio

import pytest
from fake_vllm import FakeVllm
from fleet_cases import checked, collect, until

from jaxrl_llm.samplers.servers.answers import ServerFault
from jaxrl_llm.samplers.servers.server_update import Marks
from jaxrl_llm.samplers.vllm.server_api import VllmHttp

pytestmark = pytest.mark.usefixtures("quick_heart")
SETUPS = [
    ("0.26.0", "abort_resume"), ("0.26.0", "recompute"), ("0.26.0", "wait"), ("0.32.0", "abort_resume"), ("0.32.0", "recompute"),
]  # fmt: skip


@pytest.fixture(params=SETUPS, ids=lambda setup: "-".join(setup))
def setup(request) -> tuple[str, str]:
    return request.param


def test_a_server_that_was_started_anew_unnoticed_gives_no_token(start, prefixes, setup):
    """It answers at once, from the weights that it was started with."""
    release, inflight = setup

    async def run() -> None:
        servers = [FakeVllm(release=release), FakeVllm(release=release)]
        async with start(servers, inflight=inflight) as client:
            await client.publish({}, 0)
            await collect(client, prefixes, 1)
            await servers[0].kill()
            await servers[0].start()
            assert set(checked(prefixes, await collect(client, prefixes, 3))) == {0}
            assert client.metrics()["sampler/set_aside"] == 1
            await until(lambda: servers[0].version == 0)

    asyncio.run(run())


def swapped(server: FakeVllm, version: int) -> None:
    """Another learner's update, or a commit that came late: the weights change under running requests, and nobody is told."""
    server.version, server.mark = version, "another's"


def test_tokens_drawn_across_a_swap_by_somebody_else_are_thrown_away(start, prefixes, setup):
    release, inflight = setup

    async def run() -> None:
        server = FakeVllm(release=release, step_s=0.01)
        async with start([server], inflight=inflight) as client:
            await client.publish({}, 0)
            asked = asyncio.create_task(collect(client, prefixes, 3))
            await until(lambda: len(server.active) >= 10 and len(server.begun) >= 10)
            await asyncio.sleep(0.04)
            swapped(server, 5)
            assert set(checked(prefixes, await asked)) == {0}
            assert client.metrics()["sampler/set_aside"] >= 1

    asyncio.run(run())


def test_a_swap_by_somebody_else_just_before_an_update_is_found_by_the_commit(start, prefixes, setup):
    """Requests that go on across the update end with the new mark, though some of their tokens are of neither version."""
    release, inflight = setup

    async def run() -> None:
        server = FakeVllm(release=release, step_s=0.02)
        async with start([server], inflight=inflight) as client:
            await client.publish({}, 0)
            asked = asyncio.create_task(collect(client, prefixes, 3))
            await until(lambda: len(server.begun) >= 10)
            swapped(server, 5)
            await asyncio.sleep(0.05)
            await client.publish({}, 1)
            assert set(checked(prefixes, await asked)) <= {0, 1}
            assert set(checked(prefixes, await collect(client, prefixes, 1))) == {1}

    asyncio.run(run())


class LateCommit(FakeVllm):
    """Carries out one commit after its client has given up: vLLM does not take back what its engine was asked for."""

    late: int = -1  # the version whose commit is late
    kept: str = ""  # its mark, once it was asked for

    async def _collective_rpc(self, request):
        body = await request.json()
        if body.get("method") == "commit" and int(body["kwargs"]["version"]) == self.late and not self.kept:
            self.kept = body["kwargs"]["mark"]
            await asyncio.sleep(60)
        return await super()._collective_rpc(request)

    def at_last(self) -> None:
        self.version, self.mark = self.late, self.kept


@pytest.mark.parametrize(("release", "inflight"), SETUPS)
def test_a_commit_that_comes_after_its_client_gave_up_labels_nothing(start, prefixes, release, inflight):
    async def run() -> None:
        server = LateCommit(release=release, step_s=0.05)
        async with start([server], inflight=inflight, control_s=0.5, update_s=3.0) as client:
            await client.publish({}, 0)
            await collect(client, prefixes, 1)
            server.late = 1
            await client.publish({}, 1)
            await until(lambda: server.kept)
            await client.publish({}, 2)
            asked = asyncio.create_task(collect(client, prefixes, 2))
            await until(lambda: server.version == 2)
            begun = len(server.begun)
            await until(lambda: len(server.begun) >= begun + 5)
            server.at_last()
            assert set(checked(prefixes, await asked)) == {2}

    asyncio.run(run())


class Counting(VllmHttp):
    """A server that names a mark, slowly."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.marks: list[str] = ["mine", "mine"]
        self.asked = 0

    async def stage_status(self) -> list[dict]:
        self.asked += 1
        seen = list(self.marks)
        await asyncio.sleep(0.02)
        return [{"mark": mark} for mark in seen]


def test_many_answers_share_a_question_that_is_asked_after_they_came():
    async def run() -> None:
        server = Counting(url="http://server")
        marks = Marks(http=server, held="mine")
        first = [asyncio.create_task(marks.confirm()) for _ in range(50)]
        await asyncio.sleep(0.01)
        server.marks[1] = "another's"  # after the first question, before the answers of those who come now
        later = [asyncio.create_task(marks.confirm()) for _ in range(50)]
        await asyncio.gather(*first)
        found = await asyncio.gather(*later, return_exceptions=True)
        assert all(isinstance(error, ServerFault) for error in found)
        assert server.asked == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("said", "held", "good"), [("", "", False), ("", "a", False), ("a", "a", True), ("b", "a", False)]
)
def test_no_mark_is_no_confirmation(said, held, good):
    async def run() -> None:
        server = Counting(url="http://server")
        server.marks = [said]
        marks = Marks(http=server, held=held)
        if good:
            await marks.confirm()
        else:
            with pytest.raises(ServerFault, match="other weights than this learner committed last"):
                await marks.confirm()

    asyncio.run(run())
