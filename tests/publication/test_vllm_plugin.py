"""A version reaches a worker's model whole and checked, or the model stays as it was."""

import contextlib
import math
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from published import SERVED, write_version
from served_model import HIDDEN, LAYER, SHAPES, VOCABULARY, Served
from stand_in_worker import Worker, on_every_rank, weights

from jaxrl_llm.publication import reader, vllm_plugin
from jaxrl_llm.publication.forward import forward_of
from jaxrl_llm.publication.vllm_plugin import torch_tensor
from jaxrl_llm.publication.vllm_targets import targets_of


def staged(worker: Worker, path: str, version: int) -> dict:
    """The status once staging ended; versions come as strings, as over HTTP."""
    worker.stage(path, str(version))
    until = time.monotonic() + 20
    while worker.stage_status()["state"] == "staging" and time.monotonic() < until:
        time.sleep(0.001)
    return worker.stage_status()


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> list[str]:
    """Versions 0 and 1."""
    folder = tmp_path_factory.mktemp("published")
    return [write_version(folder, version, weights(version)) for version in range(2)]


def refused(worker: Worker, version: int | str) -> str:
    """Why a commit failed."""
    answer = worker.commit(str(version))
    assert answer["error"]
    assert answer["version"] == worker.published_version()
    return answer["error"]


def test_a_staged_version_reaches_the_model_at_commit_and_not_before(published):
    worker = Worker()
    assert worker.stage_status()["state"] == "idle"
    assert worker.published_version() == -1
    status = staged(worker, published[1], 1)
    assert (status["version"], status["state"], status["error"]) == (1, "staged", "")
    assert status["bytes"] == 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert not worker.loaded
    answer = worker.commit("1")
    assert (answer["version"], answer["error"]) == (1, "")
    assert list(worker.loaded) == list(SHAPES)
    for name, array in weights(1).items():
        np.testing.assert_array_equal(worker.loaded[name], array)
    assert worker.published_version() == 1
    assert worker.stage_status()["state"] == "idle"


def test_a_commit_may_be_repeated(published):
    worker = Worker()
    staged(worker, published[1], 1)
    worker.commit("1")
    again = worker.commit("1")
    assert (again["version"], again["error"]) == (1, "")
    assert worker.reloads == 1


def test_a_version_that_is_not_staged_cannot_be_committed(published):
    worker = Worker()
    assert "version 1 is not staged" in refused(worker, 1)
    staged(worker, published[0], 0)
    assert "version 1 is not staged" in refused(worker, 1)
    assert worker.reloads == 0


def test_a_bad_version_leaves_the_model_and_its_number_and_a_good_one_follows(published, tmp_path):
    worker = Worker()
    staged(worker, published[0], 0)
    worker.commit("0")
    lacking = {name: array for name, array in weights(1).items() if name != "lm_head.weight"}
    status = staged(worker, write_version(tmp_path, 1, lacking), 1)
    assert status["state"] == "failed"
    assert "lm_head.weight" in status["error"]
    assert "lm_head.weight" in refused(worker, 1)
    assert worker.published_version() == 0
    np.testing.assert_array_equal(worker.loaded["lm_head.weight"], weights(0)["lm_head.weight"])
    assert staged(worker, published[1], 1)["state"] == "staged"
    worker.commit("1")
    assert worker.published_version() == 1


def test_an_unexpected_error_of_reading_is_a_failed_stage_that_names_the_path(published, monkeypatch):
    def broken(*args, **kwargs):
        raise OSError("stale file handle")

    monkeypatch.setattr(reader, "read_version", broken)
    status = staged(Worker(), published[0], 0)
    assert status["state"] == "failed"
    assert published[0] in status["error"] and "stale file handle" in status["error"]


def test_a_load_that_fails_midway_leaves_no_version_and_can_be_committed_again(published):
    worker = Worker()
    staged(worker, published[0], 0)
    worker.commit("0")
    staged(worker, published[1], 1)
    worker.fails_after = 3
    assert "failed midway (MemoryError" in refused(worker, 1)
    assert worker.published_version() == -1
    assert worker.stage_status()["state"] == "staged"
    worker.commit("1")
    assert worker.published_version() == 1
    np.testing.assert_array_equal(worker.loaded["lm_head.weight"], weights(1)["lm_head.weight"])


def test_an_error_without_words_is_still_an_error(published, monkeypatch):
    def broken(*args):
        raise AssertionError

    monkeypatch.setattr(vllm_plugin, "agreed", broken)
    assert refused(Worker(), 1) == "AssertionError()"


def test_the_version_asked_for_last_is_the_one_that_is_staged(published, monkeypatch):
    reading, go_on = threading.Event(), threading.Event()
    real = reader.read_version

    def held(path, version, *rest):
        if version == 0:
            reading.set()
            assert go_on.wait(20)
        return real(path, version, *rest)

    monkeypatch.setattr(reader, "read_version", held)
    worker = Worker()
    worker.stage(published[0], "0")
    assert reading.wait(20)
    assert worker.stage(published[0], "0")["state"] == "staging", "asking twice reads once"
    worker.stage(published[1], "1")
    assert worker.stage_status()["version"] == 1
    go_on.set()
    until = time.monotonic() + 20
    while worker.stage_status()["state"] == "staging" and time.monotonic() < until:
        time.sleep(0.001)
    assert worker.commit("1")["version"] == 1
    np.testing.assert_array_equal(worker.loaded["lm_head.weight"], weights(1)["lm_head.weight"])


def test_versions_may_be_read_into_the_same_block_one_after_the_other(published):
    block = np.empty(10**6, np.uint8)
    mine = reader.Stager(lambda nbytes: block[:nbytes])
    for version in (0, 1, 0):
        mine.read(published[version], version, targets_of(Served()))
        tensors = mine.take(version).parts
        assert all(np.shares_memory(array, block) for array in tensors.values())
        for name, array in weights(version).items():
            np.testing.assert_array_equal(tensors[name], array)
        mine.drop()


class Locking:
    """Stands in for CUDA's runtime."""

    def __init__(self, code: int = 0):
        self.locked: dict[int, int] = {}  # bytes by address
        self.code = code

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.code:
            self.locked[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.mark.parametrize("code", [0, 2], ids=["locked", "refused"])
def test_a_gpu_keeps_locked_memory_of_its_rank_s_parts_alone(published, monkeypatch, caplog, code):
    runtime = Locking(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    mine = vllm_plugin.stager_for(SimpleNamespace(type="cuda"), forward_of(SERVED))
    targets = targets_of(Served(1, 2))
    needed = sum(4 * math.prod(s.stop - s.start for s in target.box) for target in targets.values())
    for version in (0, 1):
        mine.read(published[version], version, targets)
        for name, part in mine.take(version).parts.items():
            np.testing.assert_array_equal(part, weights(version)[name][targets[name].box])
        mine.drop()
        if code == 0:
            (size,) = runtime.locked.values()
            assert needed <= size < needed + 64 * len(targets)
            assert not caplog.records
    assert len(caplog.records) == (2 if code else 0)


def test_servers_with_pipeline_stages_or_replicas_are_refused(published):
    worker = Worker()
    worker.vllm_config.parallel_config.pipeline_parallel_size = 2
    status = worker.stage(published[0], "0")
    assert (status["state"], "tensor parallelism alone" in status["error"]) == ("failed", True)


def test_arguments_that_make_no_sense_are_answered_and_not_raised():
    worker = Worker()
    assert worker.stage("/nowhere", "newest")["state"] == "failed"
    assert "invalid literal" in refused(worker, "newest")


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_load_their_parts_of_one_version_together(published, monkeypatch, ranks):
    workers = [Worker(rank, ranks) for rank in range(ranks)]
    for worker in workers:
        assert staged(worker, published[1], 1)["state"] == "staged"
    assert [result["version"] for result in on_every_rank(monkeypatch, workers, "commit", "1")] == [1] * ranks
    for worker in workers:
        for name, target in targets_of(worker.model_runner.get_model()).items():
            np.testing.assert_array_equal(worker.loaded[name][target.box], weights(1)[name][target.box])
    assert [r["error"] for r in on_every_rank(monkeypatch, workers, "commit", "1")] == [""] * ranks
    assert [worker.reloads for worker in workers] == [1] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_vocabulary_that_one_rank_holds_alone_is_checked_by_all_together(tmp_path, monkeypatch, ranks):
    """12 words are padded to 64 rows, of which the first rank has 16 or 32; the numbers that ranks add up must be as many on each."""
    words, embedding = 12, "model.embed_tokens.weight"
    whole = {name: array[:words] if len(array) == VOCABULARY else array for name, array in weights(1).items()}
    path = write_version(tmp_path, 1, whole)
    workers = [Worker(rank, ranks) for rank in range(ranks)]
    for rank, worker in enumerate(workers):
        model = Served(rank, ranks, words=words)
        worker.model_runner.get_model = lambda model=model: model
        assert staged(worker, path, 1)["state"] == "staged"
    answers = on_every_rank(monkeypatch, workers, "commit", "1")
    assert [(answer["version"], answer["error"]) for answer in answers] == [(1, "")] * ranks
    np.testing.assert_array_equal(workers[0].loaded[embedding], whole[embedding])
    assert all(worker.loaded[embedding].shape == (words, HIDDEN) for worker in workers)
    for worker in workers:
        staged(worker, path, 1)
    workers[0]._orbax_stager._staged.sums[embedding] ^= 1
    for answer in on_every_rank(monkeypatch, workers, "commit", "1"):
        assert embedding in answer["error"]


def test_no_rank_loads_a_version_that_another_rank_lacks(published, monkeypatch):
    workers = [Worker(rank, 2) for rank in range(2)]
    staged(workers[0], published[1], 1)
    first, second = on_every_rank(monkeypatch, workers, "commit", "1")
    assert "not staged on 1 other ranks" in first["error"]
    assert "version 1 is not staged" in second["error"]
    assert workers[0].reloads == workers[1].reloads == 0


def test_a_part_that_was_damaged_on_one_rank_is_refused_by_all(published, monkeypatch):
    workers = [Worker(rank, 2) for rank in range(2)]
    for worker in workers:
        staged(worker, published[1], 1)
    workers[1]._orbax_stager._staged.sums[f"{LAYER}mlp.down_proj.weight"] ^= 1 << 7
    for answer in on_every_rank(monkeypatch, workers, "commit", "1"):
        assert (answer["version"], "down_proj" in answer["error"]) == (-1, True)
    assert workers[0].reloads == workers[1].reloads == 0
    assert "down_proj" in workers[0].stage_status()["error"]


def test_torch_sees_the_bits_of_bfloat16():
    import ml_dtypes

    array = np.array([1.0, -2.5, 3.140625], ml_dtypes.bfloat16)
    tensor = torch_tensor(array)
    assert tensor.dtype == torch.bfloat16
    assert tensor.float().tolist() == [1.0, -2.5, 3.140625]


def test_the_packed_copy_of_a_tied_head_is_made_again():
    model = Served(tied=True)
    packed = []
    model.lm_head.cpu_linear = None
    model.lm_head.quant_method = SimpleNamespace(process_weights_after_loading=packed.append)
    vllm_plugin.repack_tied_head(model)
    assert packed == [model.lm_head]


def test_a_sampler_host_needs_only_numpy_tensorstore_and_ml_dtypes():
    program = "import sys, jaxrl_llm.publication.vllm_plugin; print(*{m.partition('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert {"numpy", "tensorstore", "ml_dtypes"} <= loaded
    assert not loaded & {"jax", "jaxlib", "flax", "gin", "orbax", "torch", "vllm", "transformers", "aiohttp"}
