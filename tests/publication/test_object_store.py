"""Versions in object storage, written by the learner and read by a sampler, against a server that speaks both APIs."""

import asyncio
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
import several_hosts
import tensorstore as ts
from bucket import TOKEN, Bucket, pointed_at
from sampler_cases import SIZES, Tiny

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models import hf_format
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen2 import Qwen2
from jaxrl_llm.publication import object_store
from jaxrl_llm.publication.parts import Target, whole_box
from jaxrl_llm.publication.reader import BadVersion, OrbaxReader, read_version
from jaxrl_llm.samplers.servers.publisher import default_address, default_folder
from jaxrl_llm.samplers.servers.store_publisher import StorePublisher

# tensorstore reads the address of Google's stand-in once a process.
pytestmark = pytest.mark.xdist_group("object_store")


@pytest.fixture(scope="module")
def server() -> Iterator[Bucket]:
    one = Bucket()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", one.url)
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", TOKEN)
        pointed_at(one, patch)
        yield one
    one.close()


@pytest.fixture(params=["gs", "s3"])
def address(request: pytest.FixtureRequest, server: Bucket) -> str:
    server.objects.clear()
    server.written.clear()
    return f"{request.param}://bucket/runs of today/one"


def publisher(tiny: Tiny, folder: Path, address: str, **fields: Any) -> StorePublisher:
    return StorePublisher(
        policy=tiny.policy,
        folder=folder,
        address=address,
        dtype="float32",
        keep=2,
        canary=np.zeros(0, np.int32),
        **fields,
    )


def publish(one: StorePublisher, params: dict[str, Any], *versions: int) -> None:
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
    """Two failing requests are tried again; the marker is written last; older versions go, and nothing lies on disk."""
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
    assert not (tmp_path / "p").exists()
    one.close(remove=True)
    assert not server.keys("runs of today/one/")


def test_a_version_that_broke_off_is_not_taken_for_whole(tiny, tmp_path, server, address):
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
def test_what_is_being_written_when_the_run_ends_is_removed_as_well(tiny, tmp_path, server, address, ends, monkeypatch):
    one, begun, complete = publisher(tiny, tmp_path / "p", address), threading.Event(), object_store.Store.complete

    def slow(store: object_store.Store, name: str, processes: int, limit_s: float) -> None:
        try:
            complete(store, name, processes, limit_s)
        finally:
            begun.set()
            time.sleep(0.5)

    async def run() -> None:
        one.start(tiny.params, 0)
        writing = asyncio.create_task(one.finish(0))
        await asyncio.to_thread(begun.wait, 20)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        server.refuses = ""
        one.close(remove=True)

    monkeypatch.setattr(object_store.Store, "complete", slow)
    server.refuses = "_CHECKPOINT_METADATA" if ends == "breaks off" else ""
    asyncio.run(run())
    assert not server.keys("runs of today/one/") and not (tmp_path / "p").exists()


class Half(StorePublisher):
    """Of two processes of which each has two of four devices, the one that is numbered `process`."""

    def held(self, x: jax.Array) -> Iterable[jax.Shard]:
        return [shard for shard in super().held(x) if shard.device.id // 2 == self.process]


def halves(tiny: Tiny, folder: Path, address: str, **fields: Any) -> list[Half]:
    given = {"policy": tiny.policy, "folder": folder, "address": address, "dtype": "float32", "keep": 2}
    return [Half(**given, canary=np.zeros(0, np.int32), process=i, processes=2, **fields) for i in (0, 1)]


def test_a_version_is_whole_once_every_process_has_written_its_shards(make, tmp_path, server, address):
    """Neither writes what the other holds, and there is no marker before the second is done, which is slow."""
    four = make(devices=4, fsdp=2, tensor=2)
    first, second = halves(four, tmp_path, address)

    async def run() -> None:
        for version in (0, 1, 2):
            first.start(four.params, version)
            second.start(four.params, version)
            assert not first._objects.keys() & second._objects.keys()
            whole = asyncio.create_task(first.finish(version))
            while not server.keys(f"runs of today/one/v{version:08d}/weights/_WRITTEN/0"):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert not whole.done() and not server.keys(f"runs of today/one/v{version:08d}/{object_store.MARKER}")
            await second.finish(version)
            await whole
            await first.prune()

    asyncio.run(run())
    staged = read_version(first.place(2), 2, targets(four))
    for name, x in hf_format.export(four.params).items():
        np.testing.assert_array_equal(staged.parts[name], np.asarray(x), err_msg=name)
    assert {key.split("/")[2] for key in server.keys("runs of today/one/")} == {"v00000001", "v00000002"}


def test_a_version_of_which_a_process_is_killed_is_never_whole(make, tmp_path, server, address):
    four = make(devices=4, fsdp=2, tensor=2)
    first, second = halves(four, tmp_path, address, wait_s=0.2)
    first.start(four.params, 0)
    second.start(four.params, 0)
    with pytest.raises(OSError, match=r"processes \[1\] have not written their shards 0.2 s after process 0"):
        asyncio.run(first.finish(0))
    assert server.keys("runs of today/one/v00000000/weights/_WRITTEN/0")
    with pytest.raises(BadVersion, match="the checkpoint was never completed"):
        OrbaxReader(f"{address}/v00000000")
    # The run that begins anew removes it before it writes.
    publish(publisher(make(), tmp_path, address), make().params, 0)
    assert read_version(f"{address}/v00000000", 0, targets(make())).manifest.version == 0
    assert not server.keys("runs of today/one/v00000000/weights/_WRITTEN/1")


@pytest.fixture(scope="module")
def wide() -> Tiny:
    """A policy of four devices whose matrices are larger than the gaps between parts that tensorstore reads along (4 KiB)."""
    partitioner = Partitioner.create(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
    policy = Policy(replace(SIZES, width=128, mlp_width=256, layers=1), partitioner)
    return Tiny(policy=policy, params=policy.init(jax.random.key(0)))


@pytest.mark.parametrize(("axis", "ways", "shards"), [(0, 2, 2), (0, 4, 2), (1, 2, 2), (1, 8, 2)])
def test_a_rank_reads_the_bytes_of_its_part_alone(wide, tmp_path, server, address, axis, ways, shards):
    """Of each of the learner's shards that it touches, it reads where the pieces are, 16 bytes each, and its own pieces."""
    one = publisher(wide, tmp_path, address)
    publish(one, wide.params, 0)
    name = "model.layers.0.mlp.gate_proj.weight"
    whole = np.asarray(hf_format.export(wide.params)[name])
    assert whole.shape == (256, 128) and len([k for k in server.keys("") if f"{name}/c/" in k]) == 4
    length = whole.shape[axis] // ways
    box = tuple(slice(length, 2 * length) if i == axis else slice(0, n) for i, n in enumerate(whole.shape))
    out, reader = np.empty_like(whole[box]), OrbaxReader(one.place(0))
    server.sent.clear()
    assert list(reader.read_into({name: (box, out)})) == [name]
    np.testing.assert_array_equal(out, whole[box])
    sent = [n for key, n in server.sent.items() if "/c/" in key]
    places = 16 * (128 // 32) * (64 // 16)  # an eighth of an axis is the least that a rank is to read apart
    assert len(sent) == shards and sum(sent) == out.nbytes + places * shards


# Publishes as one of two processes, and says what it wrote.
PUBLISHING = """
import asyncio, os, pathlib, sys, jax, numpy as np
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.distributed.processes import Hosts
from jaxrl_llm.distributed.rendezvous import coordinator_arguments, joined
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen2 import Qwen2
from jaxrl_llm.samplers.servers.store_publisher import StorePublisher
with joined(Hosts(wait_s=60, lost_s=60), coordinator_arguments(os.environ, False)) as processes:
    model = Qwen2(vocabulary_size=32, width=16, layers=1, heads=2, kv_heads=2, head_width=8, mlp_width=32, tied=True)
    policy = Policy(model, Partitioner.create(MeshConfig(fsdp=2)))
    one = StorePublisher(
        policy=policy, folder=pathlib.Path("/nowhere"), address=sys.argv[1], dtype="float32", keep=2,
        canary=np.arange(4, dtype=np.int32),
    )
    one.start(policy.init(jax.random.key(0)), 7)
    for key in one._objects:
        print("wrote", key, file=sys.stderr)
    asyncio.run(one.finish(7))
    processes.meet("written")
"""


@pytest.mark.slow
def test_two_processes_write_their_shards_and_neither_those_of_the_other(server):
    server.objects.clear()
    processes = several_hosts.start([sys.executable, "-c", PUBLISHING, "s3://bucket/two"], 2, 1)
    found = several_hosts.ended(processes)
    assert [status for status, _ in found] == [0, 0], found
    first, second = ({line.split()[1] for line in said.splitlines() if line.startswith("wrote")} for _, said in found)
    assert first and second and not first & second
    embedding = {f"weights/model.embed_tokens.weight/c/0/{i}" for i in (0, 1)}
    assert len(first & embedding) == len(second & embedding) == 1, "each writes its half of the width"
    model = Qwen2(vocabulary_size=32, width=16, layers=1, heads=2, kv_heads=2, head_width=8, mlp_width=32, tied=True)
    alone = Policy(model, Partitioner.create(MeshConfig(), jax.devices()[:1]))
    want = hf_format.export(alone.init(jax.random.key(0)))
    boxes = {name: Target(shape=x.shape, box=whole_box(x.shape)) for name, x in want.items()}
    staged = read_version("s3://bucket/two/v00000007", 7, boxes)  # compares checksums
    assert staged.manifest.canary is not None
    for name, x in want.items():
        np.testing.assert_array_equal(staged.parts[name], np.asarray(x), err_msg=name)


def test_objects_are_written_as_far_as_memory_goes_at_a_time(monkeypatch):
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
    made = {str(i): partial(bytes, bytes([i]) * size) for i, size in enumerate(sizes)}
    object_store._write(Mock(spec=ts.KvStore, write=write), made)
    assert written == {str(i): bytes([i]) * size for i, size in enumerate(sizes)}
    assert most == [3, 6, 6, 9, 1, 2] and not under_way, "6 at a time, or an object that is larger alone"


def test_a_flipped_bit_in_object_storage_is_found(tiny, tmp_path, server, address):
    one = publisher(tiny, tmp_path / "p", address)
    publish(one, tiny.params, 0)
    one.close(remove=False)
    keys = [key for key in server.keys("runs of today/one/v00000000/weights/") if "/c/" in key]
    key = max(keys, key=lambda k: len(server.objects[k][1]))
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
