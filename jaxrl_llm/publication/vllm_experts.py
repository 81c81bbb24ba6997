"""The experts of a layer inside a vLLM server: a rank's part of them, the matrices that its loader takes, and their comparison.

A layer's experts are published as two tensors, `gate_up_proj` [E, 2, M, D] and `down_proj` [E, D, M], so that every rank's part of each
is one box: some rows and columns of all experts under tensor parallelism, some whole experts under expert parallelism. vLLM keeps them
as `w13_weight` [own E, 2 M / ranks, D] and `w2_weight` [own E, D, M / ranks], and its loader takes one matrix of one expert at a time
under the names of a Hugging Face checkpoint. They are passed on in this form, a few megabytes each; no further tensor of all experts is
made beside the staged and the served ones.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxrl_llm.publication.cuda_ipc import RemoteTensor
from jaxrl_llm.publication.held_weights import tensor_sum
from jaxrl_llm.publication.manifest import digits, element_type
from jaxrl_llm.publication.parts import Box, Target, whole_box
from jaxrl_llm.publication.reader import BadVersion

GATE_UP, DOWN = "gate_up_proj", "down_proj"  # ends of the published names
_OWN = {"w13_weight", "w2_weight"}
# Backends of vLLM's unquantized method that multiply by the weights as loaded; others rewrite them in place.
_AS_LOADED = {"TRITON", "BATCHED_TRITON"}


def is_experts(layer: Any) -> bool:
    """Returns whether a module of vLLM's holds the experts of a layer: `RoutedExperts`, or `FusedMoE` of earlier releases."""
    return all(hasattr(layer, name) for name in (*_OWN, "expert_map"))


def parts(path: str, layer: Any, own: Mapping[str, Any]) -> Iterator[tuple[str, Target, Any | None]]:
    """Yields the name and the target of both tensors of a layer, and the layer's own tensor of this rank's part, or None where it is rewritten.

    Raises:
      NotImplementedError: the experts are quantized or have biases, are balanced by vLLM between ranks, or a rank's are not consecutive.
    """
    if unknown := sorted(own.keys() - _OWN):
        raise NotImplementedError(
            f"the experts {path!r} have the parameters {unknown}: weights are published to unquantized experts without biases only"
        )
    config = layer.moe_config
    if getattr(config.moe_parallel_config, "enable_eplb", False):
        raise NotImplementedError(
            f"vLLM moves the experts {path!r} between ranks (EPLB), where their weights are not known: start the server without --enable-eplb"
        )
    per_rank, width = _sizes(layer, config)
    inner, mine = per_rank * config.tp_size, slice(config.tp_rank * per_rank, (config.tp_rank + 1) * per_rank)
    held, count = _experts(path, layer), layer.global_num_experts
    stem, either, columns = path.removesuffix(".routed_experts"), slice(0, 2), slice(0, width)
    gate_up = Target(shape=(count, 2, inner, width), box=(held, either, mine, columns))
    down = Target(shape=(count, width, inner), box=(held, columns, mine))
    yield f"{stem}.{GATE_UP}", gate_up, _held(layer, layer.w13_weight, gate_up)
    yield f"{stem}.{DOWN}", down, _held(layer, layer.w2_weight, down)


def _sizes(layer: Any, config: Any) -> tuple[int, int]:
    """Returns the rows of gate, and of up, of one expert on this rank, and their columns, without a kernel's padding."""
    rows = getattr(config, "intermediate_size_per_partition_unpadded", None) or layer.intermediate_size_per_partition
    return rows, getattr(config, "hidden_dim_unpadded", None) or layer.hidden_size


def _experts(path: str, layer: Any) -> slice:
    """Returns the experts that this rank holds, by the layer's own map [E] from all experts to its own, -1 for others'."""
    if layer.expert_map is None:
        return slice(0, layer.global_num_experts)
    places = np.asarray(layer.expert_map.cpu())
    own = np.flatnonzero(places >= 0)
    first = int(own[0]) if len(own) else 0
    if not np.array_equal(own, first + np.arange(len(own))) or not np.array_equal(places[own], np.arange(len(own))):
        raise NotImplementedError(
            f"the experts {own.tolist()[:8]} ... of {path!r} on this rank are not consecutive: start the server with "
            "--expert-placement-strategy linear"
        )
    return slice(first, first + len(own))


def _held(layer: Any, weight: Any, target: Target) -> Any | None:
    """Returns a view of this rank's part in the form of the published tensor; None where the backend rewrote it or padded it."""
    backend = getattr(getattr(layer, "quant_method", None), "unquantized_backend", None)
    shape = tuple(axis.stop - axis.start for axis in target.box)
    rows = (shape[0], 2 * shape[2], shape[3]) if len(shape) == 4 else shape
    if getattr(backend, "name", None) not in _AS_LOADED or tuple(weight.shape) != rows:
        return None
    return weight.data.view(shape)


# -- one matrix at a time ----------------------------------------------------------------------------------------------


def of_experts(name: str) -> bool:
    """Returns whether a published tensor is one of all experts of a layer."""
    return name.endswith((f".experts.{GATE_UP}", f".experts.{DOWN}"))


def matrices(name: str, target: Target) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the checkpoint's name of each matrix of this rank's experts, with its place along the tensor's first axes."""
    stem, _, kind = name.rpartition(".")
    for expert in range(target.box[0].start, target.box[0].stop):
        if kind == DOWN:
            yield f"{stem}.{expert}.down_proj.weight", (expert,)
        else:
            yield f"{stem}.{expert}.gate_proj.weight", (expert, 0)
            yield f"{stem}.{expert}.up_proj.weight", (expert, 1)


def from_host(name: str, part: Any, target: Target) -> Iterator[tuple[str, Any]]:
    """Yields the matrices of a part in the host's memory in the form of vLLM's loader, at full size.

    Under tensor parallelism the rank has some rows or columns of each, and only those are set; the matrix stays in the host's memory,
    of which only the pages that are set are allocated.

    Args:
      name: name of the published tensor.
      part: a torch tensor, this rank's box.
      target: the box of the part.
    """
    import torch

    for matrix, (expert, *which) in matrices(name, target):
        own = part[(expert - target.box[0].start, *which)]
        shape, box = target.shape[-2:], target.box[-2:]
        if box == whole_box(shape):
            yield matrix, own
            continue
        whole = torch.empty(shape, dtype=own.dtype)
        whole[box] = own
        yield matrix, whole


def from_learner(
    name: str,
    tensor: RemoteTensor,
    target: Target,
    copied: Callable[[RemoteTensor], Any],
    published: dict[str, tuple[str, int]],
) -> Iterator[tuple[str, Any]]:
    """Yields the matrices of this rank's experts in the form of vLLM's loader, from the learner's memory.

    All experts are copied, one matrix after the other, to compare their sum with the tensor's checksum; those of other ranks are dropped at once.

    Args:
      name: name of the published tensor.
      tensor: its place in the learner's memory.
      target: this rank's box of it.
      copied: copies a matrix to the server's device.
      published: receives the element type and the sum of this rank's part.

    Raises:
      BadVersion: the copied tensor differs from the published one.
    """
    own = {place: matrix for matrix, place in matrices(name, target)}
    total, mine, whole, box = 0, 0, whole_box(tensor.shape[-2:]), target.box[-2:]
    for place in np.ndindex(*tensor.shape[:-2]):
        matrix = copied(matrix_of(tensor, place))
        total += int(tensor_sum(matrix, target_of(tensor.shape, place, whole), tensor.dtype))
        if place in own:
            mine += int(tensor_sum(matrix[box], target_of(tensor.shape, place, box), tensor.dtype))
            yield own[place], matrix
    if digits(total) != tensor.checksum:
        raise BadVersion(f"tensor {name!r} arrived with checksum {digits(total)}, published is {tensor.checksum}")
    published[name] = (tensor.dtype, mine % (1 << 32))


def matrix_of(tensor: RemoteTensor, place: tuple[int, ...]) -> RemoteTensor:
    """Returns the matrix at `place` along the first axes of a tensor in another process's memory."""
    found = []
    for shard in tensor.shards:
        inside = [at - first for at, first in zip(place, shard.start)]
        if all(0 <= at < n for at, n in zip(inside, shard.shape)):
            rows, columns = shard.shape[-2:]
            number = int(np.ravel_multi_index(inside, shard.shape[:-2]))
            offset = shard.offset + number * rows * columns * element_type(tensor.dtype).itemsize
            found.append(replace(shard, offset=offset, start=shard.start[-2:], shape=(rows, columns)))
    return replace(tensor, shape=tensor.shape[-2:], shards=tuple(found))


def target_of(shape: tuple[int, ...], place: tuple[int, ...], box: Box) -> Target:
    """Returns a box of the matrix at `place` along the first axes of a tensor, as a box of the tensor's rows, on which its checksum is
    defined."""
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    first = int(np.ravel_multi_index(place, shape[:-2])) * shape[-2]
    return Target(shape=(rows, columns), box=(slice(first + box[0].start, first + box[0].stop), box[1]))


def repack(model: Any) -> None:
    """Packs experts anew on a CPU, where vLLM multiplies by a packed copy that it makes with the kernel, and a reload leaves them unpacked."""
    for layer in model.modules():
        backend = getattr(getattr(layer, "quant_method", None), "unquantized_backend", None)
        if getattr(backend, "name", None) == "CPU" and layer.quant_method.moe_kernel is not None:
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)
