"""Published versions as the samplers' reader finds them: values, checksums, canary, versions kept, a disk that is full."""

import asyncio
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from sampler_cases import Tiny

from jaxrl_llm.models import hf_format
from jaxrl_llm.models.lora import AdaptedPolicy, LoRA
from jaxrl_llm.publication.manifest import Manifest, checksum
from jaxrl_llm.publication.parts import Target, whole_box
from jaxrl_llm.publication.reader import read_version
from jaxrl_llm.samplers.servers.publisher import Publisher, exported, shutil

CANARY = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)


def publisher(tiny: Tiny, folder: Path, **fields: Any) -> Publisher:
    given: dict[str, Any] = {
        "dtype": "float32",
        "keep": 2,
        "canary": CANARY,
    }
    return Publisher(policy=tiny.policy, folder=folder, **given | fields)


def publish(one: Publisher, params: dict[str, Any], versions: tuple[int, ...] = (0,)) -> tuple[Path, Manifest]:
    async def all_of_them() -> tuple[Path, Manifest]:
        for version in versions:
            path, manifest = one.start(params, version)
            await one.finish(version)
            await one.prune()
        return path, manifest

    found = asyncio.run(all_of_them())
    one.close(remove=False)
    return found


def as_published(tiny: Tiny, dtype: Any) -> dict[str, np.ndarray]:
    """What the checkpoint must hold, from the definitions: [in..., heads, width] -> [out, in], layers apart."""
    found = {}
    for tensor in hf_format.tensors(tiny.params):
        leaf = np.asarray(hf_format.leaf_of(tiny.params, tensor.path))
        leaf = leaf if tensor.layer is None else leaf[tensor.layer]
        if tensor.inputs:
            inner = int(np.prod(leaf.shape[: tensor.inputs]))
            leaf = np.swapaxes(leaf.reshape(inner, -1), 0, 1)
        elif tensor.inputs == 0:
            leaf = leaf.reshape(-1)
        found[tensor.name] = leaf.astype(dtype)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", [{}, {"devices": 4, "fsdp": 2, "tensor": 2}], ids=["one", "fsdp2 tensor2"])
def test_the_samplers_reader_finds_what_the_learner_holds(make, tmp_path, dtype, mesh):
    tiny = make(**mesh)
    path, manifest = publish(publisher(tiny, tmp_path / "p", dtype=dtype), tiny.params, (7,))
    assert path.name == "v00000007"
    want = as_published(tiny, ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    targets = {n: Target(shape=x.shape, box=whole_box(x.shape)) for n, x in want.items()}
    staged = read_version(str(path), 7, targets)
    assert staged.manifest == manifest and set(manifest.tensors) == set(want)
    for name, x in want.items():
        np.testing.assert_array_equal(staged.parts[name], x, err_msg=name)
        assert manifest.tensors[name].checksum == checksum(x), name


def test_each_device_writes_the_shards_that_it_holds(make):
    tiny = make(devices=4, fsdp=2, tensor=2)
    tensors, _ = exported(tiny.params, policy=tiny.policy, dtype="bfloat16")
    whole = [n for n, x in tensors.items() if x.ndim == 2 and x.is_fully_replicated]
    assert not whole, "gathered before it is written"


@pytest.mark.parametrize("mesh", [{}, {"devices": 4, "fsdp": 2, "tensor": 2}], ids=["one", "fsdp2 tensor2"])
def test_the_canary_holds_the_log_probs_of_the_plain_softmax(make, tmp_path, mesh):
    tiny = make(**mesh)
    _, manifest = publish(publisher(tiny, tmp_path / "p"), tiny.params)
    logits = make().logits([CANARY])[0, : len(CANARY)]
    log = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert manifest.canary is not None and manifest.canary.tokens == tuple(CANARY.tolist())
    np.testing.assert_allclose(manifest.canary.logprobs, log[np.arange(7), CANARY[1:]], atol=2e-5)
    assert manifest.canary.likely == tuple(logits[:7].argmax(axis=1).tolist())
    np.testing.assert_allclose(manifest.canary.likely_logprobs, log[:7].max(axis=1), atol=2e-5)


def test_a_publication_warns_of_nothing(tiny, tmp_path, caplog):
    publish(publisher(tiny, tmp_path / "p"), tiny.params, (0, 1))
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


def test_adapters_are_merged_into_what_is_published(tiny, tmp_path):
    plain = tiny.policy
    adapted = AdaptedPolicy(
        plain.architecture, plain.partitioner, plain.compute_dtype, plain.remat, LoRA(rank=2, targets=("q_proj",))
    )
    adapters = jax.tree.map(lambda x: jnp.full(x.shape, 0.1), adapted.init(jax.random.key(0)))
    path, _ = publish(publisher(tiny, tmp_path / "p"), adapted.merged(adapters, tiny.params))
    name = "model.layers.1.self_attn.q_proj.weight"
    staged = read_version(
        str(path),
        0,
        {n: Target(shape=x.shape, box=whole_box(x.shape)) for n, x in as_published(tiny, np.float32).items()},
    )
    # (alpha / rank) sum over rank of 0.1 x 0.1 = 16 x 2 x 0.01 everywhere
    np.testing.assert_allclose(staged.parts[name], as_published(tiny, np.float32)[name] + 0.32, atol=1e-6)


def test_the_last_versions_are_kept_and_those_of_an_earlier_run_are_not(tiny, tmp_path):
    (tmp_path / "v00000099").mkdir()
    publish(publisher(tiny, tmp_path, keep=2), tiny.params, (0, 1, 2, 3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v00000002", "v00000003"]


def test_a_process_that_comes_late_leaves_what_the_first_one_wrote(tiny, tmp_path, monkeypatch):
    first, late = publisher(tiny, tmp_path), publisher(tiny, tmp_path)
    path = tmp_path / "v00000003"
    first._make_room(path, 1)
    (path / "manifest.json").write_text("{}")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    late._make_room(path, 1)
    assert (path / "manifest.json").read_text() == "{}"
    monkeypatch.undo()
    publisher(tiny, tmp_path)._make_room(path, 1)
    assert not list(path.iterdir()), "a version that is published once more begins empty"


def test_requests_go_on_while_old_versions_are_removed(tiny, tmp_path, monkeypatch):
    one = publisher(tiny, tmp_path, keep=1)
    publish(one, tiny.params, (0,))
    (tmp_path / "v00000001").mkdir()
    answered = threading.Event()
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: answered.wait(20) or pytest.fail("nothing ran"))

    async def run() -> None:
        removing = asyncio.create_task(one.prune())
        await asyncio.sleep(0.01)
        assert not removing.done()
        answered.set()
        await removing

    asyncio.run(run())


def test_a_version_appears_whole_or_not_at_all(tiny, tmp_path):
    one = publisher(tiny, tmp_path / "p")

    async def run() -> None:
        path, _ = one.start(tiny.params, 0)
        assert (path / "manifest.json").is_file()
        await one.finish(0)
        assert (path / "weights" / "_CHECKPOINT_METADATA").is_file()

    asyncio.run(run())
    assert set(one.seconds) == {"blocked_s", "save_s"}
    one.close(remove=True)
    assert not (tmp_path / "p").exists()


def test_a_full_disk_is_an_error_that_says_what_to_do(tiny, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 64))
    with pytest.raises(OSError, match=r"version 3 .*free some space.*VllmSampler.publication"):
        publish(publisher(tiny, tmp_path / "p"), tiny.params, (3,))


def test_a_folder_that_cannot_be_written_is_an_error_that_says_what_to_do(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"could not be published to .*VllmSampler.publication"):
        publisher(tiny, tmp_path / "file" / "p")  # at once, before there is a version
