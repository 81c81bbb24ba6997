"""Reads the weights that verl's FSDP workers saved, one file a rank with DTensor shards, tensor by tensor.

A folder holds `model_world_size_W_rank_R.pt` for R in 0..W-1, and `huggingface/` with config.json and the tokenizer. The files are
pickles, from which torch reads only tensors and the classes of DTensor. PyTorch is needed, and no process group.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")


def rank_files(folder: Path) -> list[Path]:
    """Returns the files of all ranks of a folder, or of its folder `actor`, in the order of the ranks.

    Raises:
      FileNotFoundError: there are none, or not all of them.
    """
    for place in (folder, folder / "actor"):
        found = {tuple(map(int, m.groups())): p for p in place.glob("*.pt") if (m := FILE.fullmatch(p.name))}
        if not found:
            continue
        sizes = {size for size, _ in found}
        size = max(sizes)
        missing = [rank for rank in range(size) if (size, rank) not in found]
        if len(sizes) > 1 or missing:
            raise FileNotFoundError(
                f"{place} holds files of world sizes {sorted(sizes)} and lacks the ranks {missing[:8]} of {size}: copy the files of all ranks "
                "of one checkpoint"
            )
        return [found[size, rank] for rank in range(size)]
    raise FileNotFoundError(
        f"{folder} has no file model_world_size_W_rank_R.pt: name the folder actor/ of a verl checkpoint"
    )


def tensors(files: Sequence[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name in a Hugging Face folder, whole tensor); one tensor at a time is in memory, the files are mapped.

    Raises:
      ValueError: the files hold something else than DTensors and tensors, other names by rank, or adapters.
    """
    shards = [_read(file) for file in files]
    for file, shard in zip(files, shards, strict=True):
        if different := sorted(shard.keys() ^ shards[0].keys()):
            raise ValueError(f"{file} and {files[0]} hold other tensors than each other, such as {different[0]!r}")
    for name in shards[0]:
        if "lora_" in name:
            raise ValueError(
                f"{files[0]} holds adapters ({name}): merge them with verl's model_merger, or import the base and the adapters apart"
            )
        yield named(name), _array(_whole(name, [shard[name] for shard in shards]))


def named(name: str) -> str:
    """Removes from a parameter's name those of the modules that training wrapped around its model."""
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper) if wrapper == "module." else name.replace(wrapper, "")
    return name


def _read(file: Path) -> Mapping[str, Any]:
    try:
        import torch
        import torch.distributed.tensor
    except ImportError as error:
        raise ModuleNotFoundError("verl's checkpoints are PyTorch's files: pip install 'jaxrl_llm[serve]'") from error
    try:
        found: Mapping[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (torch.serialization.pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(
            f"{file} is incomplete, or holds something else than tensors and DTensors: copy it again, or save it anew with verl's strategy fsdp or fsdp2"
        ) from error
    return found


def _whole(name: str, parts: Sequence[Any]) -> Any:
    """Joins the parts that the ranks hold to a whole tensor; a plain tensor is whole in each."""
    import torch
    from torch.distributed.tensor import DTensor

    first = parts[0]
    if not isinstance(first, DTensor):
        return first
    placements, mesh = first.placements, np.array(first.device_mesh.mesh)
    local = np.empty(mesh.shape, object)
    for place, rank in np.ndenumerate(mesh):
        local[place] = parts[int(rank)].to_local()
    for axis in reversed(range(mesh.ndim)):
        placed: Any = placements[axis]
        if type(placed).__name__ not in ("Shard", "Replicate"):
            raise ValueError(
                f"{name} is placed as {placements}, and Shard and Replicate are read: merge the checkpoint with verl's model_merger"
            )
        outer = np.empty(local.shape[:-1], object)
        for place in np.ndindex(*local.shape[:-1]):
            along = list(local[place])
            outer[place] = torch.cat(along, placed.dim) if type(placed).__name__ == "Shard" else along[0]
        local = outer
    whole = local[()]
    if whole.shape != first.shape:
        raise ValueError(
            f"the shards of {name} make {tuple(whole.shape)}, and it is {tuple(first.shape)}: a rank's file is another checkpoint's"
        )
    return whole


def _array(tensor: Any) -> np.ndarray:
    import torch

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    found: np.ndarray = tensor.numpy()
    return found
