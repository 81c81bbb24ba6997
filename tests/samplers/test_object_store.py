"""Versions in object storage, written by the learner and read by a sampler, against a server that speaks both APIs."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tensorstore as ts
from bucket import KEY, TOKEN, Bucket
from sampler_cases import Tiny

from jaxrl_llm.models import hf_format
from jaxrl_llm.publication import object_store
from jaxrl_llm.publication.reader import BadVersion, OrbaxReader, Target, read_version, whole_box
from jaxrl_llm.samplers.vllm.publisher import Publisher, default_address, default_folder

# tensorstore reads the address of Google's stand-in once a process.
pytestmark = pytest.mark.xdist_group("object_store")


@pytest.fixture(scope="module")
def server() -> Iterator[Bucket]:
    one = Bucket()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", one.url)
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", TOKEN)
        patch.setenv("AWS_ENDPOINT_URL", one.url)
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", "a secret of the tests")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield one
    one.close()


@pytest.fixture(params=["gs", "s3"])
def address(request: pytest.FixtureRequest, server: Bucket) -> str:
    server.objects.clear()
    server.written.clear()
    return f"{request.param}://bucket/runs of today/one"


def publisher(tiny: Tiny, folder: Path, address: str) -> Publisher:
    return Publisher(
        policy=tiny.policy, folder=folder, address=address, dtype="float32", keep=2, canary=np.zeros(0, np.int32),
    )  # fmt: skip


def publish(one: Publisher, params: dict[str, Any], *versions: int) -> None:
    async def run() -> None:
        for version in versions:
            one.start(params, version)
            await one.finish(version)
            await one.prune()

    asyncio.run(run())


def targets(tiny: Tiny) -> dict[str, Target]:
    shapes = {name: x.shape for name, x in hf_format.export(tiny.params).items()}
    return {name: Target(shape=shape, box=whole_box(shape)) for name, shape in shapes.items()}


def test_a_version_in_object_storage_reads_as_the_learner_holds_it(tiny, tmp_path, server, address):
    """Two failing requests are tried again; the marker is written last; older versions and local copies go."""
    server.objects["runs of today/one/v00000099/manifest.json"] = (1, b"of an earlier run")
    server.objects["runs of today/oneself/v1/kept"] = (1, b"of another run")
    one = publisher(tiny, tmp_path / "p", address)
    server.fails = 2
    publish(one, tiny.params, 0, 1, 2)
    assert one.place(2) == f"{address}/v00000002"
    staged = read_version(one.place(2), 2, targets(tiny))
    for name, x in hf_format.export(tiny.params).items():
        np.testing.assert_array_equal(staged.parts[name], np.asarray(x), err_msg=name)
    assert {key.split("/")[2] for key in server.keys("runs of today/one/")} == {"v00000001", "v00000002"}
    assert server.keys("runs of today/oneself/") and server.written[-1].endswith(
        "v00000002/weights/_CHECKPOINT_METADATA"
    )
    assert not list((tmp_path / "p").glob("v*"))
    one.close(remove=True)
    assert not server.keys("runs of today/one/")


def test_a_version_whose_copy_broke_off_is_not_taken_for_whole(tiny, tmp_path, server, address):
    one = publisher(tiny, tmp_path / "p", address)
    server.refuses = "_CHECKPOINT_METADATA"
    try:
        with pytest.raises(OSError, match=r"version 4 .*could not (write|remove).*bucket.*credentials"):
            publish(one, tiny.params, 4)
    finally:
        server.refuses = ""
    assert server.keys("runs of today/one/v00000004/weights/"), "much of it is there"
    with pytest.raises(BadVersion, match="the checkpoint was never completed"):
        OrbaxReader(f"{address}/v00000004")
    publish(one, tiny.params, 5)
    assert read_version(one.place(5), 5, targets(tiny)).manifest.version == 5
    one.close(remove=False)


@pytest.mark.parametrize("ends", ["is whole", "breaks off"])
def test_what_is_being_copied_when_the_run_ends_is_removed_as_well(tiny, tmp_path, server, address, ends, monkeypatch):
    one, begun, upload = publisher(tiny, tmp_path / "p", address), threading.Event(), object_store.Store.upload

    def slow(store: object_store.Store, folder: Path, name: str) -> None:
        try:
            upload(store, folder, name)
        finally:
            begun.set()
            time.sleep(0.5)

    async def run() -> None:
        one.start(tiny.params, 0)
        copying = asyncio.create_task(one.finish(0))
        await asyncio.to_thread(begun.wait, 20)
        copying.cancel()
        await asyncio.gather(copying, return_exceptions=True)
        server.refuses = ""
        one.close(remove=True)

    monkeypatch.setattr(object_store.Store, "upload", slow)
    server.refuses = "_CHECKPOINT_METADATA" if ends == "breaks off" else ""
    asyncio.run(run())
    assert not server.keys("runs of today/one/") and not (tmp_path / "p").exists()


def test_files_are_copied_as_far_as_memory_goes_at_a_time(tmp_path, monkeypatch):
    sizes = [3, 3, 3, 9, 1, 1]
    under_way, most, written = [], [], {}

    class Writing:
        def __init__(self, size: int) -> None:
            under_way.append(size)
            most.append(sum(under_way))

        def result(self) -> None:
            under_way.pop(0)

    def write(name: str, content: bytes) -> Writing:
        written[name] = content
        return Writing(len(content))

    monkeypatch.setattr(object_store, "_WINDOW_BYTES", 6)
    for i, size in enumerate(sizes):
        (tmp_path / str(i)).write_bytes(bytes([i]) * size)
    object_store._write(Mock(spec=ts.KvStore, write=write), tmp_path, [str(i) for i in range(len(sizes))])
    assert written == {str(i): bytes([i]) * size for i, size in enumerate(sizes)}
    assert most == [3, 6, 6, 9, 1, 2] and not under_way, "6 at a time, or a file that is larger alone"


def test_a_flipped_bit_in_object_storage_is_found(tiny, tmp_path, server, address):
    one = publisher(tiny, tmp_path / "p", address)
    publish(one, tiny.params, 0)
    one.close(remove=False)
    key = max(server.keys("runs of today/one/v00000000/weights/"), key=lambda k: len(server.objects[k][1]))
    generation, content = server.objects[key]
    damaged = bytearray(content)
    damaged[len(damaged) // 2] ^= 4
    server.objects[key] = (generation + 1, bytes(damaged))
    with pytest.raises(BadVersion, match=r"cannot be (read|opened)|differ from what was published"):
        read_version(one.place(0), 0, targets(tiny))


def test_an_outage_ends_within_its_limit_and_names_the_place(server, address, monkeypatch):
    monkeypatch.setattr(
        object_store, "RETRIES", {name: {"max_retries": 1, "initial_delay": "10ms"} for name in object_store.RETRIES}
    )
    store = object_store.Store(address)
    server.fails = 100
    try:
        with pytest.raises(OSError, match=r"could not list .*://bucket/runs of today/one"):
            store.versions()
    finally:
        server.fails = 0


def test_a_run_has_a_place_of_its_own(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    assert default_folder("gs://b/weights", run) == run / "publication"
    assert default_address("gs://b/weights/", run).startswith("gs://b/weights/run-")
    assert default_address(str(tmp_path), run) == default_address(None, run) == ""
    assert default_address("s3://b", run) != default_address("s3://b", tmp_path)
