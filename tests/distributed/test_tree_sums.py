"""Checkpoints are checksummed: whatever bit of whatever file flips, what is restored is what was saved, or there is an error."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.distributed import serialization, tree_sums
from jaxrl_llm.learner.state import TrainState
from jaxrl_llm.publication.manifest import checksum
from jaxrl_llm.train.checkpoint import Checkpointing, Checkpoints, read_host, read_model

HOST = {"stage": 1, "step": 3, "best": 0.25, "feed": {"position": 17, "seeds": [1, 2]}, "controls": {"kl": 1e-3}}


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "matrix": rng.normal(size=(24, 16)).astype(np.float32), "stack": rng.normal(size=(4, 8, 6)).astype(ml_dtypes.bfloat16),
        "vector": rng.integers(0, 9, 24).astype(np.int32), "scalar": np.asarray(7, np.int32), "flags": np.array([True, False, True]),
    }  # fmt: skip


def test_sums_are_the_manifests_however_an_array_lies_on_the_devices():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    specs = {"matrix": PartitionSpec("a", "b"), "stack": PartitionSpec(None, "a"), "vector": PartitionSpec(("a", "b"))}
    host = arrays()
    placed = {n: jax.device_put(x, NamedSharding(mesh, specs.get(n, PartitionSpec()))) for n, x in host.items()}
    words = host | {"scalar": host["scalar"].reshape(1), "flags": host["flags"].view(np.uint8)}
    want = {f"['{n}']": f"{host[n].dtype}:{checksum(x)}" for n, x in words.items()}
    assert tree_sums.sums(placed) == want == tree_sums.sums({n: jnp.asarray(x) for n, x in host.items()})


def test_a_sum_gathers_nothing():
    """Whichever axes an array is divided along, devices exchange sums alone."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    for spec in (PartitionSpec(None, "a", "b"), PartitionSpec("a", None, "b"), PartitionSpec(None, "b", "a")):
        x = jax.device_put(jnp.ones((4, 16, 8), jnp.bfloat16), NamedSharding(mesh, spec))
        program = jax.jit(tree_sums.word_sum).lower(x).compile().as_text()
        moves = ("all-gather", "all-to-all", "collective-permute")
        assert "all-reduce" in program and not any(move in program for move in moves), spec


def state() -> dict[str, Any]:
    policy = {"w": jnp.asarray(arrays()["matrix"]), "b": jnp.asarray(arrays()["stack"])}
    moments = {"policy": {"m": jnp.asarray(arrays()["matrix"] * 2)}}
    return {"state": TrainState(step=jnp.int32(3), skipped=jnp.int32(0), params={"policy": policy}, moments=moments)}


def saved(folder: Path, steps: tuple[int, ...] = (3,)) -> Path:
    checkpoints = Checkpoints(folder, Checkpointing())
    for step in steps:
        checkpoints.save(step, state(), {**HOST, "step": step})
    checkpoints.wait()
    checkpoints.close()
    return folder / "checkpoints"


def test_a_step_that_is_due_and_best_is_summed_once(tmp_path, monkeypatch):
    summed, sums = [], tree_sums.sums
    monkeypatch.setattr(tree_sums, "sums", lambda *given: summed.append(1) or sums(*given))
    checkpoints = Checkpoints(tmp_path, Checkpointing(best="reward"))
    checkpoints.save(3, state(), HOST, best=True)
    checkpoints.save(4, state(), HOST, last=False)
    checkpoints.close()
    assert len(summed) == 1
    for folder in ("checkpoints", "best"):
        assert [p.name for p in (tmp_path / folder).iterdir()] == ["3"] and read_host(tmp_path / folder, 3) == HOST


@pytest.mark.parametrize("end", ["wait", "close"])
def test_a_best_checkpoint_that_fails_is_named(tmp_path, monkeypatch, end):
    checkpoints, full = Checkpoints(tmp_path, Checkpointing(best="reward")), OSError("no space left")
    checkpoints.close()
    for method in ("wait_until_finished", "close"):
        monkeypatch.setattr(
            ocp.CheckpointManager, method, lambda m: refuse(full) if m.directory.name == "best" else None
        )
    with pytest.raises(OSError, match=rf"written to {tmp_path}/best \(no space left"):
        getattr(checkpoints, end)()


def refuse(error: Exception) -> None:
    raise error


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def restored(folder: Path) -> tuple[dict[str, Any], Any]:
    checkpoints = Checkpoints(folder, Checkpointing())
    try:
        step = checkpoints.latest()
        assert step is not None
        return checkpoints.host(step), checkpoints.restore(step, abstract(state()))
    finally:
        checkpoints.close()


def test_a_flipped_bit_in_any_file_of_a_checkpoint_is_an_error_or_changes_nothing(tmp_path):
    root, rng = saved(tmp_path, (2, 3)) / "3", random.Random(0)
    caught, values = 0, max((f for f in root.rglob("d/*")), key=lambda f: f.stat().st_size)
    for file in sorted(f for f in root.rglob("*") if f.is_file()):
        content = file.read_bytes()
        for _ in range(8 if file in (values, root / "host" / "metadata") else 2):
            damaged = bytearray(content)
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            file.write_bytes(damaged)
            try:
                host, trees = restored(tmp_path)
            except ValueError as error:
                assert "/checkpoints/3" in str(error) and "go on from step 2" in str(error)
                caught += 1
            else:
                assert host == HOST
                jax.tree.map(np.testing.assert_array_equal, trees, state())
        file.write_bytes(content)
    assert caught >= 16 and restored(tmp_path)[0] == HOST


def test_orbax_alone_restores_flipped_bits_without_an_error(tmp_path):
    """The reason for sums of our own; where this fails because orbax raises, they can go."""
    saved = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)), jnp.float32)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", saved)
        checkpointer.wait_until_finished()
        largest = max((file for file in (tmp_path / "c").rglob("*") if file.is_file()), key=lambda f: f.stat().st_size)
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 1
        largest.write_bytes(bytes(data))
        found = checkpointer.restore(tmp_path / "c", saved)
    assert np.sum(np.asarray(found["w"]) != np.asarray(saved["w"])) >= 1


def test_a_model_that_is_read_alone_is_checked_too(tmp_path):
    folder = saved(tmp_path)
    policy = abstract(state()["state"].policy)
    found = read_model(folder, 3, policy)
    jax.tree.map(np.testing.assert_array_equal, found, state()["state"].policy)
    for values in [f for f in folder.rglob("d/*") if f.stat().st_size > 1000]:  # arrays lie in one or two of them
        content = bytearray(values.read_bytes())
        step = len(content) // 40
        values.write_bytes(bytes(b ^ (16 * (i % step == 0)) for i, b in enumerate(content)))
    with pytest.raises(ValueError, match=r"not what was written|damaged"):
        read_model(folder, 3, policy)
    metadata = folder / "3" / "host" / "metadata"
    metadata.write_text(metadata.read_text().replace('"step": 3', '"step": 2'))
    with pytest.raises(ValueError, match=r"the host's state in .*/3 is not what was written"):
        read_host(folder, 3)


def test_a_checkpoint_without_sums_is_still_read(tmp_path):
    """As they were made before there were any."""
    folder = saved(tmp_path)
    metadata = folder / "3" / "host" / "metadata"

    metadata.write_text(json.dumps(HOST))
    assert restored(tmp_path)[0] == HOST


def test_deferred_parts_are_saved_as_bytes_and_checked(tmp_path):
    """They are made where a save is due, and are read where they are asked for."""
    made = []
    tokens = np.random.default_rng(0).integers(0, 2**31, 100_000).astype(np.int32)
    part = serialization.Deferred(lambda: made.append(1) or [{"tokens": tokens, "text": "ü"}])
    checkpoints = Checkpoints(tmp_path, Checkpointing(best="reward"), deferred=True)
    checkpoints.save(1, state(), {"feed": part}, last=False)
    assert made == []
    for step, feed in ((2, []), (3, part)):
        checkpoints.save(step, state(), {**HOST, "feed": feed}, best=True)
        checkpoints.wait()
    assert made == [1]
    host = checkpoints.whole_host(3)
    (entry,) = host.pop("feed")
    assert (
        host == {name: x for name, x in HOST.items() if name != "feed"}
        and entry["text"] == "ü"
        and entry["tokens"].dtype == np.int32
    )
    np.testing.assert_array_equal(entry["tokens"], tokens)
    assert checkpoints.whole_host(2) == {**HOST, "feed": []}
    checkpoints.close()
    root = tmp_path / "checkpoints" / "3" / "deferred"
    assert (root.parent / "host" / "metadata").stat().st_size < 10_000
    file = max((f for f in root.rglob("d/*")), key=lambda f: f.stat().st_size)
    content = file.read_bytes()
    file.write_bytes(content[:500])
    refused(tmp_path, "are damaged")
    shutil.rmtree(root)
    shutil.copytree(root.parents[1] / "2" / "deferred", root)
    refused(tmp_path, "are not what was written")


def refused(folder: Path, why: str) -> None:
    checkpoints = Checkpoints(folder, Checkpointing())
    with pytest.raises(ValueError, match=rf"sampled groups in .*/checkpoints/3 {why}.*go on from step 2"):
        checkpoints.whole_host(3)
    checkpoints.close()
