"""Finds the part of each Hugging Face tensor that one rank of a vLLM server loads, from the server's own model.

vLLM fuses layers (q, k and v; gate and up) and divides them over tensor-parallel ranks; its loaders take whole tensors and cut this
rank's part out of them. The parts follow from attributes of vLLM's layers, so that only they need to be read. A layer of an unknown
kind is refused, since its tensors could go missing unnoticed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxrl_llm.publication import vllm_experts, vllm_fp8
from jaxrl_llm.publication.parts import Target, whole_box


def targets_of(model: Any) -> dict[str, Target]:
    """Returns, by Hugging Face name and in the order of the model's layers, the shape and the part that this rank loads.

    Args:
      model: the torch module that vLLM serves (`worker.model_runner.get_model()`).

    Raises:
      NotImplementedError: a layer's kind or one of its parameters is unknown.
    """
    return {name: target for name, target, _ in _parts(model)}


def held_by(model: Any) -> dict[str, Any | None]:
    """Returns, by Hugging Face name, this rank's part of each tensor as the model holds it now: a view of vLLM's parameter.

    vLLM stacks fused tensors along the rows, in the order of the names, and a padded vocabulary begins with its own rows. The part is
    None where the parameter lacks the rows and columns of its parts, as for matrices that vLLM packs for a CPU, or is quantized.
    """
    found: dict[str, Any | None] = {}
    first: dict[int, int] = {}  # the next part's first row in each parameter
    for name, target, parameter in _parts(model):
        if vllm_experts.of_experts(name):
            found[name] = parameter
            continue
        if parameter is None:
            found[name] = None
            continue
        rows, *columns = (axis.stop - axis.start for axis in target.box)
        begin = first.get(id(parameter), 0)
        first[id(parameter)] = begin + rows
        fits = list(parameter.shape[1:]) == columns and begin + rows <= (len(parameter) if parameter.ndim else 0)
        found[name] = parameter.data[begin : begin + rows] if fits else None
    return found


def quantized_layers(model: Any) -> Iterator[tuple[str, Any, list[tuple[str, Target]]]]:
    """Yields each layer that quantizes its loaded weights: its path, itself, and the names and targets of its weight's rows."""
    fused = getattr(model, "packed_modules_mapping", {})
    for path, layer in model.named_modules():
        if vllm_fp8.quantizes(layer):
            own = {"weight": layer.weight}
            yield path, layer, [(name, target) for name, target, _ in _parts_of_layer(path, layer, own, fused)]


def _parts(model: Any) -> Iterator[tuple[str, Target, Any]]:
    """Yields each tensor's name and target, with the parameter that holds it, for experts the part of it or None; None for quantized tensors."""
    fused = getattr(model, "packed_modules_mapping", {})
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = {name: p for name, p in module.named_parameters(recurse=False) if id(p) not in seen}
        seen |= {id(p) for p in own.values()}
        for name, target, parameter in _parts_of_layer(path, module, own, fused) if own else ():
            if not (tied and name == "lm_head.weight"):
                yield name, target, parameter


def _parts_of_layer(
    path: str, layer: Any, own: Mapping[str, Any], fused: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Target, Any]]:
    if vllm_experts.is_experts(layer):
        yield from vllm_experts.parts(path, layer, own)
        return
    kind, quantized = type(layer).__name__, vllm_fp8.quantizes(layer)
    unknown = sorted(own.keys() - {"weight", "bias"} - (vllm_fp8.SCALES if quantized else set()))
    if unknown:
        raise NotImplementedError(
            f"layer {path!r} ({kind}) has the parameters {unknown}: weights are published to models that are not quantized, or in fp8 by vLLM "
            "itself (--quantization fp8_per_channel, fp8_per_tensor or fp8_per_block)"
        )
    if kind.endswith("Norm"):
        for name, p in own.items():
            yield f"{path}.{name}", Target(shape=tuple(p.shape), box=whole_box(p.shape)), p
        return
    if kind not in _PARTS:
        raise NotImplementedError(f"layer {path!r} is of kind {kind}, not one of {', '.join(_PARTS)} or a norm")
    parent, _, leaf = path.rpartition(".")
    names = [f"{parent}.{part}" if parent else part for part in fused.get(leaf, [leaf])]
    for parameter, held in own.items():
        if parameter in vllm_fp8.SCALES:
            continue
        kept = None if quantized and parameter == "weight" else held
        for name, target in zip(names, _PARTS[kind](layer, parameter), strict=True):
            yield f"{name}.{parameter}", target, kept


def _rows(rows: int, start: int, stop: int, columns: int | None, counted: bool = True) -> Target:
    """Returns the target of some rows of a matrix, or of some elements of a bias where `columns` is None."""
    shape = (rows,) if columns is None else (rows, columns)
    return Target(shape=shape, box=(slice(start, stop), *whole_box(shape[1:])), counted=counted)


def _qkv(layer: Any, parameter: str) -> Iterator[Target]:
    columns = layer.input_size if parameter == "weight" else None
    replicas = layer.num_kv_head_replicas
    kv_heads = layer.total_num_kv_heads
    per_rank = layer.num_heads * layer.head_size
    first = layer.tp_rank * per_rank
    yield _rows(layer.total_num_heads * layer.head_size, first, first + per_rank, columns)
    for width in (layer.head_size, getattr(layer, "v_head_size", layer.head_size)):
        first = layer.tp_rank // replicas * layer.num_kv_heads * width
        counted = layer.tp_rank % replicas == 0
        yield _rows(kv_heads * width, first, first + layer.num_kv_heads * width, columns, counted)


def _merged(layer: Any, parameter: str) -> Iterator[Target]:
    for rows in layer.output_sizes:
        yield _share_of_rows(layer, parameter, rows)


def _column_parallel(layer: Any, parameter: str) -> Iterator[Target]:
    yield _share_of_rows(layer, parameter, layer.output_size)


def _share_of_rows(layer: Any, parameter: str, rows: int) -> Target:
    share = rows // layer.tp_size
    first = layer.tp_rank * share
    return _rows(rows, first, first + share, layer.input_size if parameter == "weight" else None)


def _row_parallel(layer: Any, parameter: str) -> Iterator[Target]:
    if parameter == "bias":
        yield Target(shape=(layer.output_size,), box=whole_box((layer.output_size,)))
        return
    share = layer.input_size // layer.tp_size
    columns = slice(layer.tp_rank * share, (layer.tp_rank + 1) * share)
    yield Target(shape=(layer.output_size, layer.input_size), box=(slice(0, layer.output_size), columns))


def _replicated(layer: Any, parameter: str) -> Iterator[Target]:
    shape = (layer.output_size, layer.input_size) if parameter == "weight" else (layer.output_size,)
    yield Target(shape=shape, box=whole_box(shape))


def _vocabulary(layer: Any, parameter: str) -> Iterator[Target]:
    indices = layer.shard_indices
    columns = layer.embedding_dim if parameter == "weight" else None
    rows = _rows(layer.org_vocab_size, indices.org_vocab_start_index, indices.org_vocab_end_index, columns)
    # Rows are padded first, so the first rank may hold all of a small vocabulary.
    yield replace(rows, divided=layer.tp_size > 1)


_PARTS = {
    "QKVParallelLinear": _qkv,
    "MergedColumnParallelLinear": _merged,
    "ColumnParallelLinear": _column_parallel,
    "RowParallelLinear": _row_parallel,
    "ReplicatedLinear": _replicated,
    "GateLinear": _replicated,
    "VocabParallelEmbedding": _vocabulary,
    "ParallelLMHead": _vocabulary,
}
