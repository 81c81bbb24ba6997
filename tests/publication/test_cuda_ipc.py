"""Weights found in another process's memory arrive whole; a stand-in for CUDA's driver copies in this process's own."""

import ctypes
import json
from contextlib import contextmanager

import jax
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from published import SERVED
from served_model import LAYER, SHAPES, Served
from stand_in_worker import Worker, on_every_rank, weights

from jaxrl_llm.publication import cuda_ipc, vllm_plugin
from jaxrl_llm.publication.cuda_ipc import check, copy_into, opened, parse, share
from jaxrl_llm.publication.forward import forward_of
from jaxrl_llm.publication.manifest import Manifest, TensorEntry, checksum
from jaxrl_llm.publication.reader import BadVersion
from jaxrl_llm.publication.vllm_targets import targets_of


class HostMemory:
    """Allocations are buffers of this process; handles are their addresses."""

    def __init__(self):
        self.open = 0
        self.buffers = {}
        self.out_of_reach = False

    def shared(self, device, number, size):
        buffer = self.buffers.setdefault((device, number), np.full(size, 0x7F, np.uint8))
        assert buffer.size >= size
        return f"{buffer.ctypes.data:x}", buffer.ctypes.data

    @contextmanager
    def opened(self, handle):
        if self.out_of_reach:
            raise OSError("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        self.open += 1
        yield int(handle, 16)
        self.open -= 1

    def copy(self, to, to_pitch, source, source_pitch, width, rows):
        for row in range(rows):
            ctypes.memmove(to + row * to_pitch, source + row * source_pitch, width)


SPECS = [PartitionSpec(), PartitionSpec("fsdp"), PartitionSpec(None, "tensor"), PartitionSpec("fsdp", "tensor")]


FORWARD = forward_of(SERVED)


def manifest(version: int) -> Manifest:
    entries = {
        n: TensorEntry(shape=a.shape, dtype=a.dtype.name, checksum=checksum(a)) for n, a in weights(version).items()
    }
    return Manifest(version=version, model_type="qwen2", tied=False, tensors=entries, forward=FORWARD)


def on_devices(version: int, spec: PartitionSpec) -> dict[str, jax.Array]:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"))
    vector = PartitionSpec(*spec[:1])
    return {
        name: jax.block_until_ready(jax.device_put(a, NamedSharding(mesh, spec if a.ndim == 2 else vector)))
        for name, a in weights(version).items()
    }


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_sharding_arrives_whole(spec):
    arrays, memory = on_devices(1, spec), HostMemory()
    found = parse(share(arrays, manifest(1), memory, 0))
    check(found, targets_of(Served()), FORWARD)
    with opened(found, memory) as bases:
        for name, array in weights(1).items():
            out = np.full(array.shape, np.nan, np.float32)
            copy_into(out.ctypes.data, found.tensors[name], bases, memory)
            np.testing.assert_array_equal(out, array)
    assert memory.open == 0


KEPT = HostMemory()


def changed(change) -> str:
    content = json.loads(share(on_devices(0, SPECS[1]), manifest(0), KEPT, 0))
    change(content)
    return json.dumps(content)


QUERY = f"{LAYER}self_attn.q_proj.weight"
BAD = {
    "lacks": lambda c: c["tensors"].pop(QUERY),
    "too many": lambda c: c["tensors"].update(more=c["tensors"][QUERY]),
    "has shape": lambda c: c["tensors"][QUERY].update(shape=[4, 4]),
    "do not cover": lambda c: c["tensors"][QUERY]["shards"].pop(),
    "cover it once": lambda c: c["tensors"][QUERY]["shards"][1].__setitem__(2, [0, 0]),
    "outside of it": lambda c: c["tensors"][QUERY]["shards"][1].__setitem__(2, [9, 0]),
    "has a shard": lambda c: c["tensors"][QUERY]["shards"][0].__setitem__(0, 10**6),
    "cannot be read": lambda c: c.pop("handles"),
}


@pytest.mark.parametrize("message", BAD)
def test_a_description_that_is_not_the_models_is_refused(message):
    with pytest.raises(BadVersion, match=message):
        check(parse(changed(BAD[message])), targets_of(Served()), FORWARD)


@pytest.fixture
def memory(monkeypatch) -> HostMemory:
    made = HostMemory()
    monkeypatch.setattr(vllm_plugin, "gpu_memory", lambda device: made)
    return made


def test_a_worker_loads_from_the_learners_memory(memory):
    worker, arrays = Worker(), on_devices(1, SPECS[3])
    answer = worker.commit_ipc("1", share(arrays, manifest(1), memory, 0))
    assert (answer["version"], answer["error"]) == (1, "")
    assert list(worker.loaded) == list(SHAPES)
    for name, array in weights(1).items():
        np.testing.assert_array_equal(worker.loaded[name], array)
    assert memory.open == 0


def test_a_worker_keeps_its_weights_where_the_memory_is_not_the_models_or_out_of_reach(memory):
    worker = Worker()
    worker.commit_ipc("0", share(on_devices(0, SPECS[0]), manifest(0), memory, 0))
    answer = worker.commit_ipc("1", changed(BAD["lacks"]))
    assert (answer["version"], "lacks" in answer["error"]) == (0, True)
    memory.out_of_reach = True
    answer = worker.commit_ipc("1", share(on_devices(1, SPECS[0]), manifest(1), memory, 1))
    assert (answer["version"], "PEER_ACCESS" in answer["error"]) == (0, True)
    assert worker.reloads == 1


def test_no_rank_loads_where_another_does_not_reach_the_memory(memory, monkeypatch):
    workers = [Worker(rank, 2) for rank in range(2)]
    good = share(on_devices(1, SPECS[1]), manifest(1), memory, 1)
    workers[1].commit_ipc = lambda version, text: as_written(workers[1], version, changed(BAD["lacks"]))
    first, second = on_every_rank(monkeypatch, workers, "commit_ipc", "1", good)
    assert "1 other ranks" in first["error"] and "lacks" in second["error"]
    assert workers[0].reloads == workers[1].reloads == 0
    del workers[1].commit_ipc
    assert [a["version"] for a in on_every_rank(monkeypatch, workers, "commit_ipc", "1", good)] == [1, 1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_a_model_holds_is_compared_with_the_learners_sums_on_every_rank(memory, monkeypatch, ranks):
    workers = [Worker(rank, ranks, torch.float32) for rank in range(ranks)]
    text = share(on_devices(1, SPECS[1]), manifest(1), memory, 0)
    for answer in on_every_rank(monkeypatch, workers, "commit_ipc", "1", text):
        assert (answer["version"], answer["error"], answer["checked"], answer["unchecked"]) == (1, "", len(SHAPES), 0)


@pytest.mark.parametrize("name", [QUERY, f"{LAYER}input_layernorm.weight"])
def test_memory_that_the_learner_overwrote_meanwhile_is_refused(memory, monkeypatch, name):
    """The sums are those of version 1, the bytes of `name` version 0's: what a late server would copy."""
    arrays = on_devices(1, SPECS[1]) | {name: on_devices(0, SPECS[1])[name]}
    text = share(arrays, manifest(1), memory, 0)
    for ranks in (1, 2):
        workers = [Worker(rank, ranks, torch.float32) for rank in range(ranks)]
        for answer in on_every_rank(monkeypatch, workers, "commit_ipc", "1", text):
            assert (answer["version"], name in answer["error"]) == (-1, True)


def as_written(worker: Worker, version: str, text: str) -> dict:
    return type(worker).commit_ipc(worker, version, text)


def test_a_server_on_the_cpu_says_that_it_has_no_gpu_memory():
    answer = Worker().commit_ipc("1", "{}")
    assert (answer["version"], "not through GPU memory" in answer["error"]) == (-1, True)


def test_a_host_without_the_driver_says_what_to_do(monkeypatch):
    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda_ipc.ctypes, "CDLL", absent)
    with pytest.raises(OSError, match=r"needs the CUDA driver .*libcuda.so.1.*: use TRANSFER = 'orbax'"):
        cuda_ipc.Cuda()


def test_the_layout_of_a_copy_is_the_drivers():
    # cuda.h, CUDA_MEMCPY2D_v2 on 64 bits: x, y, type (padded), host, device, array, pitch, for both ends; width, height.
    assert ctypes.sizeof(cuda_ipc._Copy2D) == 128
    offsets = [getattr(cuda_ipc._Copy2D, name).offset for name, _ in cuda_ipc._Copy2D._fields_]
    assert offsets == list(range(0, 128, 8))
