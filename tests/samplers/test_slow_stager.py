"""A server that stages for longer than the learner takes for a version gets its versions too, and does not pass for one that is ready."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_vllm import FakeVllm
from fleet_cases import checked, collect, until

pytestmark = pytest.mark.usefixtures("quick_heart")


@dataclass(eq=False, kw_only=True)
class SlowReader(FakeVllm):
    """Says that a version is staged so many seconds after it was asked to stage it; another version begins anew, as the plugin does."""

    reads_s: float = 0.0
    asked: tuple[int, float] = (-1, 0.0)
    lost: bool = False

    async def _collective_rpc(self, request):
        body = await request.json()
        now = asyncio.get_running_loop().time()
        if body.get("method") == "stage":
            version = int(body["kwargs"]["version"])
            if self.asked[0] != version:
                self.asked = (version, now)
            self.path = Path(body["kwargs"]["path"])
        if body.get("method") == "stage_status" and now < self.asked[1] + self.reads_s:
            if not (self.path / "manifest.json").is_file():
                self.lost = True
            rank = {
                "version": self.asked[0],
                "state": "staging",
                "error": "",
                "seconds": 0.0,
                "bytes": 0,
                "mark": self.mark,
            }
            return await _answer({"results": [rank]})
        return await super()._collective_rpc(request)


async def _answer(content):
    from aiohttp import web

    return web.Response(text=json.dumps(content), content_type="application/json")


@pytest.mark.parametrize("at_once", [0, 2], ids=["newest alone", "older too"])
def test_a_slow_server_commits_versions_while_newer_ones_come(start, prefixes, at_once):
    async def run() -> None:
        servers = [FakeVllm(), SlowReader(), FakeVllm()]
        async with start(servers, straggler=2.0, straggler_s=0.05, at_once=at_once) as client:
            await client.publish({}, 0)
            await collect(client, prefixes, 1)
            servers[1].reads_s = 0.5
            assert client._fleet is not None
            slow = client._fleet.servers[1]
            ready = []
            for version in range(1, 13):
                await client.publish({}, version)
                assert set(checked(prefixes, await collect(client, prefixes, 1))) == {version}
                await asyncio.sleep(0.2)
                ready.append(slow.ready and slow.http.version < version - 1)
            commits = [call for call in servers[1].calls if call.startswith("commit")]
            assert len(commits) >= 3, "every half second one"
            assert not servers[1].lost, "what it read was there to the end"
            if not at_once:
                assert not any(ready[5:]), "a server that lags is not ready"
            assert client._fleet.counters["lagging"] >= 2
            servers[1].reads_s = 0.0
            await until(lambda: slow.ready and slow.http.version == 12)

    asyncio.run(run())


def test_a_server_that_stages_for_long_is_asked_less_and_less_often(start, prefixes):
    """A second and a half took 75 questions at 50 a second; 1.5 times as long between each gives eleven."""

    async def run() -> None:
        server = SlowReader(reads_s=1.5)
        async with start([server]) as client:
            await client.publish({}, 0)
            await until(lambda: "stage 0" in server.calls)
            before = server.counts["/collective_rpc"]
            await until(lambda: "commit 0" in server.calls)
            assert 4 <= server.counts["/collective_rpc"] - before <= 12

    asyncio.run(run())
