"""Checkpoints as verl's FSDP workers write them become Hugging Face folders: torch itself shards and saves them here."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models import hf_weights, verl_shards
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen2 import Qwen2
from jaxrl_llm.tools import import_verl

torch = pytest.importorskip("torch")

MODEL = Qwen2(vocabulary_size=67, width=32, layers=2, heads=4, kv_heads=2, head_width=8, mlp_width=48)
# Four processes of gloo, two replicas of two shards: rows do not divide evenly, and one tensor is not sharded at all.
PROGRAM = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

folder, shape, names = sys.argv[1], eval(sys.argv[2]), eval(sys.argv[3])

def work(rank, world):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    places = [Shard(0)] if len(shape) == 1 else [Replicate(), Shard(0)]
    whole = load_file(f"{folder}/huggingface/model.safetensors")
    state = {}
    for i, (name, x) in enumerate(whole.items()):
        x = x.to(torch.bfloat16)
        own = [*places[:-1], Shard(1)] if x.ndim == 2 and i % 3 == 0 else places
        state["_fsdp_wrapped_module." + name] = x if name == "model.norm.weight" else distribute_tensor(x, mesh, own)
    torch.save(state, f"{folder}/model_world_size_{world}_rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    count = 1
    for n in shape:
        count *= n
    mp.spawn(work, (count,), nprocs=count)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A small model's policy and its Hugging Face folder."""
    policy = Policy(MODEL, Partitioner.create(MeshConfig(), jax.devices()[:1]))
    folder = tmp_path_factory.mktemp("hf") / "model"
    hf_weights.save(policy, policy.init(jax.random.key(0)), folder, dtype="bfloat16")
    return policy, folder


def checkpoint(folder: Path, model: Path, shape: tuple[int, ...], names: tuple[str, ...]) -> Path:
    """verl's folder of an actor with the model's weights, sharded over a mesh."""
    actor = folder / "global_step_7" / "actor"
    shutil.copytree(model, actor / "huggingface")
    (folder / "save.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(folder / "save.py"), str(actor), repr(shape), repr(names)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return actor


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "names"), [((2,), ("fsdp",)), ((2, 2), ("ddp", "fsdp"))])
def test_the_folder_holds_the_weights_that_were_sharded(
    tmp_path: Path, model: tuple[Any, Path], shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    policy, folder = model
    actor = checkpoint(tmp_path, folder, shape, names)
    for file in (actor / "huggingface").glob("*.safetensors"):
        file.unlink()  # verl keeps the configuration and the tokenizer there
    out = import_verl.write(actor.parent, tmp_path / "out", shard_bytes=9000)
    found: dict[str, Any] = {}
    for file in sorted(out.glob("*.safetensors")):
        found |= load_file(file)
    want = load_file(folder / "model.safetensors")
    assert found.keys() == want.keys() and len(list(out.glob("*.safetensors"))) > 2
    for name, x in want.items():
        assert found[name].dtype == x.dtype and np.array_equal(found[name].view(np.uint16), x.view(np.uint16)), name
    pairs = zip(*(jax.tree.leaves(hf_weights.load(policy, f)) for f in (out, folder)), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    other = tmp_path / "other"
    shutil.copytree(actor, other)
    (other / f"model_world_size_{len(verl_shards.rank_files(actor))}_rank_1.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks the ranks \[1\]"):
        import_verl.write(other, tmp_path / "lacking")


def saved(folder: Path, *states: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, state in enumerate(states):
        torch.save(state, folder / f"model_world_size_{len(states)}_rank_{rank}.pt")
    return folder


def test_what_is_no_checkpoint_of_a_model_is_refused_and_leaves_nothing(
    tmp_path: Path, model: tuple[Any, Path]
) -> None:
    with pytest.raises(FileNotFoundError, match="has no file model_world_size"):
        import_verl.write(tmp_path, tmp_path / "out")
    one = torch.zeros(3)
    with pytest.raises(ValueError, match="hold other tensors than each other, such as 'b'"):
        list(verl_shards.tensors(verl_shards.rank_files(saved(tmp_path / "names", {"a": one}, {"a": one, "b": one}))))
    with pytest.raises(ValueError, match="holds adapters"):
        list(verl_shards.tensors(verl_shards.rank_files(saved(tmp_path / "lora", {"x.lora_A.weight": one}))))
    with pytest.raises(ValueError, match="something else than tensors and DTensors"):
        list(verl_shards.tensors(verl_shards.rank_files(saved(tmp_path / "code", {"a": Path("x")}))))
    few = saved(tmp_path / "few", {"module.model.norm.weight": one})
    with pytest.raises(ValueError, match=r"do not fit their config.json: .* is missing"):
        import_verl.write(few, tmp_path / "out", config=model[1])
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    with pytest.raises(FileNotFoundError, match=r"huggingface has no config.json"):
        import_verl.write(few, tmp_path / "out")
    with pytest.raises(FileExistsError, match="give a new folder"):
        import_verl.write(few, few)
