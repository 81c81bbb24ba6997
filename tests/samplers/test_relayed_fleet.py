"""A fleet whose hosts pass weights on: each host on an address of loopback of its own, the learner publishing to a folder."""

import asyncio
import json
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_vllm import FakeVllm
from fleet_cases import ToyPublisher, checked, collect, running, until
from relay_site import TOKEN, address, contents, free_port

from jaxrl_llm import serving
from jaxrl_llm.models import hf_format
from jaxrl_llm.publication.manifest import FILE
from jaxrl_llm.publication.object_store import Store
from jaxrl_llm.publication.parts import Target, whole_box
from jaxrl_llm.publication.reader import read_version
from jaxrl_llm.publication.relays.client import Relays
from jaxrl_llm.publication.relays.server import Relay
from jaxrl_llm.publication.relays.version import Patience
from jaxrl_llm.samplers.servers.store_publisher import StorePublisher
from jaxrl_llm.samplers.vllm.sampler import VllmSampler

SIZE = 100_000


class ListedToy(ToyPublisher):
    """The toy's versions with something to pass on, written as the learner writes to object storage."""

    def start(self, params: dict[str, Any], version: int) -> tuple[Path, Any]:
        path, manifest = super().start(params, version)
        self.text = (path / FILE).read_bytes()
        return path, manifest

    async def finish(self, version: int) -> None:
        store, name = Store(address(self.folder)), f"v{version:08d}"
        objects = contents({"a": SIZE}, version) | {FILE: self.text}
        store.write(name, {key: partial(bytes, content) for key, content in objects.items()}, 0, listed=True)
        self.listed = store.complete(name, 1, 10)

    def source(self, version: int) -> str:
        return f"{address(self.folder)}/v{version:08d}"

    def blocks(self) -> str:
        return self.listed


class Placed(FakeVllm):
    """A server that notes from where it staged."""

    async def _collective_rpc(self, request: Any) -> Any:
        body = await request.json()
        if body.get("method") == "stage":
            self.__dict__.setdefault("places", []).append(body["kwargs"]["path"])
        return await super()._collective_rpc(request)


async def started(stack: AsyncExitStack, relay: Relay, host: str, port: int) -> None:
    from aiohttp import web

    runner = web.AppRunner(relay.application(), shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, host, port).start()


def test_hosts_pass_versions_on_and_a_host_without_its_relay_reads_the_source(tiny, tmp_path, monkeypatch, prefixes):
    """Two servers on the first host, one on the second, whose relay is dead, and one on the third."""
    monkeypatch.setenv(serving.TOKEN_VARIABLE, TOKEN)
    (tmp_path / "run").mkdir()
    port, hosts = free_port(), ("127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.4")
    servers = [Placed(host=host) for host in hosts]
    folders = {host: tmp_path / host for host in ("127.0.0.2", "127.0.0.4")}

    async def run() -> None:
        async with AsyncExitStack() as stack:
            for host, folder in folders.items():
                one = Relay(folder=folder, token=TOKEN, patience=Patience(silent_s=3.0))
                await started(stack, one, host, port)
            client = await stack.enter_async_context(running(tiny, tmp_path / "run", servers, relay_port=port))
            assert isinstance(client.publisher, ToyPublisher)
            client.publisher.__class__ = ListedToy
            for version in (0, 1):
                await client.publish({}, version)
                await until(lambda v=version: all(s.version == v for s in servers))
                groups = await collect(client, prefixes[:3], 2)
                assert set(checked(prefixes[:3], groups)) == {version}
                found = client.metrics()
                # The dead relay: of no use to its own server, and by-passed by the third.
                assert found["sampler/relay_bypassed"] == 2.0
                place = client.publisher.folder / f"v{version:08d}"
                size = SIZE + sum((place / file).stat().st_size for file in (FILE, "weights/_BLOCKS"))
                assert found["publish/relay_source_bytes"] == size, "one host alone read where the learner wrote"
                assert found["publish/relay_passed_bytes"] == size, "and passed it on to the other"
                assert found["publish/relay_kept_bytes"] == 0, (
                    "random objects, and a manifest with the version's number"
                )
                assert found["publish/relay_s"] > 0

    asyncio.run(run())
    for server in servers:
        wanted = str(folders.get(server.host, tmp_path / "run"))
        assert [place.startswith(wanted) for place in server.places] == [True, True], server.places


def test_relays_stand_in_the_order_of_the_servers_behind_the_learners():
    urls = ["http://10.0.0.5:9000", "http://10.0.0.5:9001", "http://[fd00::6]:9000", "http://gpu7:9000"]
    relays = Relays(port=9100, token=TOKEN, first="http://10.0.0.1:9100/")
    last = relays.of(urls[3])
    assert last == "http://gpu7:9100"
    assert relays.before(last, urls) == ["http://[fd00::6]:9100", "http://10.0.0.5:9100", "http://10.0.0.1:9100"]
    assert relays.before(relays.of(urls[1]), urls) == ["http://10.0.0.1:9100"]
    assert relays.before("http://new:9100", urls) == ["http://gpu7:9100", *relays.before(last, urls)], (
        "a host that comes later"
    )
    assert Relays(port=1, token=TOKEN).before("http://10.0.0.5:1", urls) == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"relay_port": -1}, "relay_port must be 0..65535"),
        ({"relay_port": 9100, "relay_first": "gpu0:9100"}, "an address like http"),
        ({"relay_first": "http://gpu0:9100"}, "relay_first needs a relay_port"),
        ({"relay_port": 9100, "transfer": "cuda_ipc"}, "relay_port needs transfer 'orbax' and all weights"),
        ({"relay_port": 9100, "adapters": True}, "relay_port needs transfer 'orbax' and all weights"),
    ],
)
def test_settings_that_relays_do_not_go_with_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        VllmSampler(**fields)


def test_a_run_with_relays_needs_their_token(tiny, tmp_path, monkeypatch):
    monkeypatch.delenv(serving.TOKEN_VARIABLE, raising=False)
    sampler = VllmSampler(spawn=False, urls=["http://127.0.0.1:1"], relay_port=9100)
    with pytest.raises(ValueError, match=r"the token has 0 characters.*JAXRL_LLM_TOKEN"):
        sampler.start(tiny.policy, None, max_length=32, run_dir=tmp_path)


def test_a_folder_that_relays_pass_on_is_a_version_for_servers_too(tiny, tmp_path):
    """What the learner writes for relays is read as any version, from the relay's copy as well; old versions leave nothing."""
    from relay_site import beside, ended

    from jaxrl_llm.publication.relays.version import Announcement

    store = address(tmp_path / "with a blank")
    one = StorePublisher(
        policy=tiny.policy, folder=tmp_path / "with a blank", address=store, dtype="float32", keep=2,
        canary=np.zeros(0, np.int32), relayed=True,
    )  # fmt: skip

    async def run() -> str:
        for version in (0, 1, 2):
            one.start(tiny.params, version)
            await one.finish(version)
            await one.prune()
        said = Announcement(version=2, source=one.source(2), blocks=one.blocks())
        async with beside(Relay(folder=tmp_path / "relay", token=TOKEN)) as url:
            found = await ended(url, said)
            assert found["state"] == "whole", found
            await asyncio.to_thread(same_weights, found["path"])
        return one.place(2)

    exported = hf_format.export(tiny.params)
    targets = {name: Target(shape=x.shape, box=whole_box(x.shape)) for name, x in exported.items()}

    def same_weights(place: str) -> None:
        staged = read_version(place, 2, targets)
        for name, x in exported.items():
            np.testing.assert_array_equal(staged.parts[name], np.asarray(x), err_msg=name)

    place = asyncio.run(run())
    assert place == str(tmp_path / "with a blank/v00000002")
    same_weights(place)
    listed = json.loads((Path(place) / "weights/_BLOCKS").read_text())["objects"]
    assert FILE in listed and "weights/_METADATA" in listed and len(listed) == 2 + 2 * len(exported)
    assert sorted(x.name for x in (tmp_path / "with a blank").iterdir()) == ["v00000001", "v00000002"]
