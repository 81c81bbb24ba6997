"""Reads and writes Hugging Face folders; safetensors are read in slices, so that each host holds only its own shards."""

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils
from safetensors.numpy import save_file

from jaxrl_llm.data.tokenizer import stop_ids
from jaxrl_llm.distributed import padding
from jaxrl_llm.models import hf_config, hf_format
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.hf_files import INDEX, Checkpoint
from jaxrl_llm.models.hf_format import Tensor
from jaxrl_llm.models.lora import AdaptedPolicy, LoRA
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.value import ValueModel

WRITABLE = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
WANTED_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
PEFT_PREFIX = "base_model.model."


def locate(pretrained: str) -> Path:
    """Returns a model's folder: `pretrained` itself, or the download of a Hugging Face id ("owner/name", "owner/name@COMMIT").

    Raises:
      FileNotFoundError: `pretrained` is neither a folder nor a model that can be downloaded.
    """
    folder = Path(pretrained).expanduser()
    if folder.is_dir():
        return folder
    advice = "set sources.PolicySource.pretrained to a folder with config.json and safetensors, or to an HF id"
    name, _, revision = pretrained.partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise FileNotFoundError(f"{pretrained!r} is no folder and no Hugging Face id: {advice}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(WANTED_FILES)))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"{pretrained!r} is no folder, and its download failed ({error}): {advice}") from error


def architecture(folder: Path, *, value: bool = False) -> Architecture:
    """Returns the architecture of the folder's config.json; with `value`, a sequence classifier's too.

    Raises:
      FileNotFoundError: the folder has no config.json.
      ValueError: config.json is not JSON, or its architecture is unsupported.
    """
    return hf_config.read(config_of(folder), str(folder / "config.json"), value=value)


def is_classifier(folder: Path) -> bool:
    """Returns whether the folder holds a sequence classifier; raises the errors of `architecture`."""
    return hf_config.is_classifier(config_of(folder))


def config_of(folder: Path) -> dict[str, Any]:
    """Reads the folder's config.json; raises FileNotFoundError where there is none, and ValueError where it is not JSON."""
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no config.json: it is no Hugging Face model folder")
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error


def load(policy: Policy, folder: Path) -> Params:
    """Reads the parameters of a folder as float32 on the policy's mesh; each device's shard is read separately.

    Raises:
      FileNotFoundError: there are no safetensors weights, or a file that the index names is absent.
      ValueError: tensors are missing, mis-shaped or unexpected, or of a dtype other than float32, bfloat16 and float16.
    """
    # Some tied checkpoints repeat the embedding as the head; a value model's layers need neither of the heads.
    unread = {"lm_head.weight", "score.weight"} if policy.architecture.tied else set()
    nested = policy.architecture.delta is not None
    return read(policy.abstract(), folder, sizes=policy.sizes(), unread=unread, nested=nested)


def load_adapters(policy: AdaptedPolicy, folder: Path) -> Params:
    """Reads the adapters of a folder in PEFT's format as float32 on the policy's mesh.

    Raises:
      FileNotFoundError: there is no adapter_config.json or no safetensors weights.
      ValueError: the adapters differ from the policy's in rank, weight or targets, or are not plain LoRA.
    """
    file, lora = folder / "adapter_config.json", policy.lora
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} has no adapter_config.json: set lora.LoRA.pretrained to a folder in PEFT's format"
        )
    config = json.loads(file.read_text())
    kinds = {"peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False, "fan_in_fan_out": False}
    if other := {name: config[name] for name, plain in kinds.items() if config.get(name, plain) != plain}:
        raise ValueError(f"{file} describes {other}; adapters are plain LoRA, without biases")
    theirs = {"rank": config["r"], "alpha": config["lora_alpha"], "targets": sorted(config["target_modules"])}
    ours = {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}
    if changed := [f"lora.LoRA.{name} = {theirs[name]!r}" for name in ours if ours[name] != theirs[name]]:
        raise ValueError(f"{file} is of other adapters than the run trains ({ours}): set {', '.join(changed)}")
    return read(policy.abstract(), folder, sizes=policy.sizes(), unread=set(), prefix=PEFT_PREFIX)


def read(
    abstract: Params,
    folder: Path,
    *,
    sizes: Params | None = None,
    unread: Set[str] | None = None,
    prefix: str = "",
    nested: bool = False,
) -> Params:
    """Reads the leaves of `abstract`, a tree of shapes with shardings like Params; see `load`.

    Args:
      sizes: the leaves' own shapes, as they are in the folder; None where none is padded (distributed/padding.py).
      unread: names of further tensors that the folder may hold; None allows any.
      prefix: prefix of all tensor names in the folder.
      nested: whether the folder may be a vision-language model's, of which the text model is read and the other parts are not.
    """
    by_leaf: dict[tuple[str, ...], list[Tensor]] = {}
    for tensor in hf_format.tensors(sizes or abstract):
        by_leaf.setdefault(tensor.path, []).append(tensor)
    checkpoint = Checkpoint(folder, prefix, nested)
    checkpoint.check([t for group in by_leaf.values() for t in group], unread)

    def read(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, own: jax.ShapeDtypeStruct) -> jax.Array:
        reader = _shard_reader(checkpoint, by_leaf[tuple(key.key for key in path)], own.shape)
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, partial(_filled_shard, reader, leaf.shape, own.shape)
        )

    return jax.tree_util.tree_map_with_path(read, abstract, sizes or abstract)


def save(
    policy: Policy | ValueModel,
    params: Params,
    folder: Path,
    tokenizer: Any = None,
    *,
    dtype: str = "float32",
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a folder that transformers loads; it appears whole or not at all. All processes call this, and the first writes.

    Args:
      policy: the model, whose architecture config.json describes; a value model becomes a sequence classifier with one label.
      params: the parameters.
      folder: folder to write; must not exist yet, or be empty.
      tokenizer: a transformers tokenizer to save beside the weights, or None.
      dtype: dtype of the written tensors: "float32", "bfloat16" or "float16".
      shard_bytes: largest number of bytes of tensors in one file; more are spread over several files with an index.

    Raises:
      FileExistsError: the folder is not empty.
      ValueError: the dtype is unknown.
      OSError: the disk is full or not writable; nothing is left behind.
    """
    with _written(folder, dtype) as partial_folder:
        if partial_folder is not None:
            describe(policy, partial_folder, tokenizer, dtype=dtype)
        _write_tensors(policy, params, partial_folder, dtype, shard_bytes)


def describe(policy: Policy | ValueModel, folder: Path, tokenizer: Any = None, *, dtype: str = "float32") -> None:
    """Writes a model's folder except for its weights: config.json, and the tokenizer's files where there is one."""
    _write_json(folder / "config.json", _config(policy, tokenizer, dtype))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
        ends = stop_ids(tokenizer)
        _write_json(
            folder / "generation_config.json",
            _special_ids(tokenizer) | ({"eos_token_id": list(ends)} if len(ends) > 1 else {}),
        )


def save_adapters(
    policy: AdaptedPolicy, adapters: Params, folder: Path, *, base_name: str | None, dtype: str = "float32"
) -> None:
    """Writes only the adapters in PEFT's format, adapter_config.json and adapter_model.safetensors, as `save` writes a model.

    Args:
      policy: the policy that the adapters belong to.
      adapters: the trained parameters.
      folder: folder to write; must not exist yet, or be empty.
      base_name: folder or Hugging Face id of the adapted model, where it has one.
      dtype: dtype of the written tensors: "float32", "bfloat16" or "float16".

    Raises:
      FileExistsError, ValueError, OSError: as for `save`.
    """
    with _written(folder, dtype) as partial_folder:
        tensors = hf_format.tensors(policy.sizes())
        found = {t.name: _gathered(policy, hf_format.leaf_of(adapters, t.path), t, dtype) for t in tensors}
        if partial_folder is not None:
            write_peft(policy.lora, found, partial_folder, base_name)


def write_peft(lora: LoRA, tensors: Mapping[str, np.ndarray], folder: Path, base_name: str | None) -> None:
    """Writes adapters under their names without PEFT's prefix, in its format, to an existing folder."""
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_name, "r": lora.rank,
        "lora_alpha": lora.alpha, "lora_dropout": 0.0, "target_modules": list(lora.targets), "bias": "none",
        "fan_in_fan_out": False, "use_rslora": False, "inference_mode": True,
    }  # fmt: skip
    named = {f"{PEFT_PREFIX}{name}": x for name, x in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "adapter_config.json", config)


@contextlib.contextmanager
def _written(folder: Path, dtype: str) -> Iterator[Path | None]:
    """Yields a folder to fill, which is renamed to `folder` at the end or deleted on errors; None in processes that must not write."""
    if dtype not in WRITABLE:
        raise ValueError(f"dtype must be one of {tuple(WRITABLE)} (got {dtype!r})")
    folder = folder.resolve()
    first = jax.process_index() == 0
    taken = first and folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if jax.process_count() > 1:
        taken = bool(multihost_utils.broadcast_one_to_all(np.array(taken)))
    if taken:
        raise FileExistsError(f"{folder} exists and is not empty: choose another folder, or remove it")
    partial_folder = folder.with_name(f".{folder.name}.partial")
    try:
        if first:
            shutil.rmtree(partial_folder, ignore_errors=True)
            partial_folder.mkdir(parents=True)
        yield partial_folder if first else None
        if first:
            os.replace(partial_folder, folder)
    except BaseException:
        if first:
            shutil.rmtree(partial_folder, ignore_errors=True)
        raise
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"saved {folder}")


def _shard_reader(checkpoint: Checkpoint, group: Sequence[Tensor], shape: tuple[int, ...]) -> Callable[..., np.ndarray]:
    """Returns the callback that reads one shard of a leaf; `group` holds the leaf's tensors in layer order."""
    done: dict[tuple[tuple[int, int], ...], np.ndarray] = {}  # replicas request the same shard again

    def read(index: tuple[slice, ...]) -> np.ndarray:
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape))
        if bounds not in done:
            out = np.empty([stop - start for start, stop in bounds], np.float32)
            for tensor in group:
                places = list(zip(tensor.index, bounds, strict=True))
                if any(i is not None and not start <= i < stop for i, (start, stop) in places):
                    continue
                inner = tuple(slice(*b) for i, b in places if i is None)
                local = tuple(s.stop - s.start for s in inner)
                values = tensor.from_hf(checkpoint.part(tensor, tensor.hf_slices(inner)), local)
                out[tuple(slice(None) if i is None else i - start for i, (start, _) in places)] = values
            done[bounds] = out
        return done[bounds]

    return read


def _filled_shard(
    reader: Callable[..., np.ndarray], stored: tuple[int, ...], own: tuple[int, ...], index: tuple[slice, ...]
) -> np.ndarray:
    """Returns a shard of a leaf in its stored shape: the values that `reader` gives for the leaf's own part, and zeros."""
    bounds = [s.indices(n)[:2] for s, n in zip(index, stored)]
    shape = [stop - start for start, stop in bounds]
    inside = tuple(slice(start, min(stop, n)) for (start, stop), n in zip(bounds, own))
    if any(part.start >= part.stop for part in inside):
        return np.zeros(shape, np.float32)
    return padding.filled(reader(inside), shape)


def _write_tensors(
    policy: Policy | ValueModel, params: Params, folder: Path | None, dtype: str, shard_bytes: int
) -> None:
    shards = list(_shards(hf_format.tensors(policy.sizes()), WRITABLE[dtype].itemsize, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # All processes take part in gathering; only the first writes.
        arrays = {t.name: _gathered(policy, hf_format.leaf_of(params, t.path), t, dtype) for t in shard}
        weight_map |= dict.fromkeys(arrays, file)
        if folder is not None:
            save_file(arrays, folder / file, metadata={"format": "pt"})
    if folder is not None and len(shards) > 1:
        total = sum(math.prod(t.hf_shape) for shard in shards for t in shard) * WRITABLE[dtype].itemsize
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(tensors: Sequence[Tensor], itemsize: int, shard_bytes: int) -> Iterator[list[Tensor]]:
    """Yields consecutive tensors of at most `shard_bytes` together (or one tensor that is larger)."""
    shard: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        size = math.prod(tensor.hf_shape) * itemsize
        if shard and filled + size > shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(tensor)
        filled += size
    yield shard


def _gathered(policy: Policy | ValueModel, leaf: jax.Array, tensor: Tensor, dtype: str) -> np.ndarray:
    index = tuple(None if i is None else jnp.int32(i) for i in tensor.index)
    form = Tensor(name="", path=(), layer=None, shape=tensor.shape, inputs=tensor.inputs)  # one program for all layers
    return np.ascontiguousarray(_replicated(leaf, index, policy, dtype, form))


@partial(jax.jit, static_argnames=("policy", "dtype", "form"))
def _replicated(
    leaf: jax.Array, index: tuple[jax.Array | None, ...], policy: Policy | ValueModel, dtype: str, form: Tensor
) -> jax.Array:
    """Returns the values of a leaf in the checkpoint's layout, on every device, at an index for each axis; None takes the whole axis."""
    values = leaf
    for axis, i in reversed(list(enumerate(index))):
        values = values if i is None else jax.lax.dynamic_index_in_dim(values, i, axis, keepdims=False)
    own = form.to_hf(padding.cut(values, form.shape).astype(dtype))
    return jax.lax.with_sharding_constraint(own, policy.partitioner.replicated)


def _config(policy: Policy | ValueModel, tokenizer: Any, dtype: str) -> dict[str, Any]:
    # Without a version transformers takes the folder for an old one, and some of its releases warn that the tokenizer is wrong.
    written = {"torch_dtype": dtype, "transformers_version": metadata.version("transformers")}
    config = hf_config.write(policy.architecture, value=isinstance(policy, ValueModel)) | written
    return config if tokenizer is None else config | _special_ids(tokenizer)


def _special_ids(tokenizer: Any) -> dict[str, int]:
    ids = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {name: value for name, value in ids.items() if value is not None}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
