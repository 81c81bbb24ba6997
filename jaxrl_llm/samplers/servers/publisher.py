"""The learner's side of an update: writes weights under their Hugging Face names and layout as an orbax checkpoint that samplers read.

FOLDER/v00000012/ holds manifest.json (names, shapes, checksums, canary) and weights/, which appears complete or not at all, since orbax
renames it when everything is written. `store_publisher` writes to object storage (gs://, s3://). Export, cast, checksums and canary are
computed on the devices; each host writes the shards that it holds, nothing is gathered.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array, Float, Int

from jaxrl_llm.distributed import padding
from jaxrl_llm.distributed.mesh import to_host
from jaxrl_llm.distributed.tree_sums import word_sum
from jaxrl_llm.kernels.token_stats.api import token_stats
from jaxrl_llm.models import hf_config, hf_format
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.publication.canary import limit
from jaxrl_llm.publication.cuda_ipc import Memory, share
from jaxrl_llm.publication.forward import forward_of
from jaxrl_llm.publication.manifest import FILE, WEIGHTS, Canary, Manifest, TensorEntry, digits
from jaxrl_llm.publication.object_store import is_stored

DTYPES = ("bfloat16", "float32", "float16")
_NO_DATABASE = "Skipping merge of OCDBT checkpoints"  # orbax's warning for each version without a database
# The text on which servers and learner are compared after each update.
CANARY = (
    "Natalia sold 48 clips in April, and half as many in May. In May she sold 48 / 2 = 24 clips. Altogether she sold "
    "48 + 24 = 72 clips in April and May. The answer is 72. 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16."
)
_CANARY_ROW = 128  # positions; the sequence is padded to a multiple of this


@dataclass(eq=False, kw_only=True)
class Publisher:
    """Publishes versions of a policy's weights.

    Attributes:
      policy: the policy, without adapters.
      folder: folder of the versions; those that an earlier run left there are removed at the first one.
      dtype: element type that the samplers serve.
      keep: number of newest versions that are kept.
      canary: token ids of the fixed sequence, at least two; empty for none.
      quantization: how samplers quantize the weights that they load; empty where they keep them as published.
      driver: the driver of GPU memory, out of which samplers on this host copy the weights; None writes checkpoints.
      seconds: times of the last version: "blocked_s" until the learner may change its weights, "save_s" until it was written.
    """

    policy: Policy
    folder: Path
    dtype: str
    keep: int
    canary: np.ndarray
    quantization: str = ""
    driver: Memory | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._checkpointer: ocp.AsyncCheckpointer | None = None
        self._begin = 0.0
        self._described = ""
        if self.driver is None:
            self._prepare()

    def _prepare(self) -> None:
        """Makes the folder early, since an error now is better than one after data and servers have been prepared."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritten("the first version", error) from error

    @property
    def where(self) -> str:
        """The place of versions, as errors name it."""
        return str(self.folder)

    def start(self, params: Params, version: int) -> tuple[Path, Manifest]:
        """Copies the weights off the devices and begins to write them; the learner may change its weights when this returns.

        Raises:
          OSError: the folder cannot be written, or is full; earlier versions stay complete.
        """
        self._begin = time.perf_counter()
        path = self._path(version)
        stored, sums = exported(params, policy=self.policy, dtype=self.dtype)
        tensors = whole(stored, policy=self.policy)
        if self.driver is not None:
            # The version before stays too, since a late server may still be copying it; its canary detects a mixture.
            manifest = self._manifest(version, params, tensors, sums)
            self._described = share(jax.block_until_ready(tensors), manifest, self.driver, version % 2)
            self.seconds["blocked_s"] = time.perf_counter() - self._begin
            return path, manifest
        try:
            self._make_room(path, sum(x.nbytes for x in tensors.values()))
            manifest = self._manifest(version, params, tensors, sums)
            if jax.process_index() == 0:
                (path / FILE).write_text(manifest.to_json())
            self._writer().save(path / WEIGHTS, args=ocp.args.PyTreeSave(nested(tensors)))
        except (OSError, ValueError) as error:
            raise self._unwritten(f"version {version}", error) from error
        self.seconds["blocked_s"] = time.perf_counter() - self._begin
        return path, manifest

    async def finish(self, version: int) -> None:
        """Returns when the version is complete on disk; raises as `start` does."""
        if self.driver is not None:
            return
        try:
            await asyncio.to_thread(self._writer().wait_until_finished)
        except (OSError, ValueError) as error:
            raise self._unwritten(f"version {version}", error) from error
        self.seconds["save_s"] = time.perf_counter() - self._begin

    def place(self, version: int) -> str:
        """Returns the path or address at which samplers find a version."""
        return str(self._path(version))

    def _path(self, version: int) -> Path:
        return self.folder / f"v{version:08d}"

    def described(self) -> str:
        """Returns the description of the newest version's place in GPU memory, for samplers on this host; empty where it is a checkpoint."""
        return self._described

    def source(self, version: int) -> str:
        """Returns the path or address at which relays find a version."""
        return self.place(version)

    def blocks(self) -> str:
        """Returns the digest of the last finished version's list of blocks, for relays; empty where none are listed."""
        return ""

    def adapter(self, version: int) -> str:
        """Returns the name of a version's adapters; empty where all weights are published."""
        return ""

    async def prune(self, spared: Collection[int] = ()) -> None:
        """Removes all but the newest versions and `spared` ones, which servers still read; large ones take seconds, in which requests go on."""
        await asyncio.to_thread(self._remove_old, {self._path(version).name for version in spared})

    def _remove_old(self, spared: set[str]) -> None:
        for path in self._versions()[: -self.keep]:
            if path.name not in spared:
                shutil.rmtree(path, ignore_errors=True)

    def close(self, *, remove: bool) -> None:
        """Ends what is being written; with `remove`, removes all versions."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None
        if remove:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _versions(self) -> list[Path]:
        return sorted(self.folder.glob("v" + "[0-9]" * 8))

    def _writer(self) -> ocp.AsyncCheckpointer:
        if self._checkpointer is None:
            for path in self._versions() if jax.process_index() == 0 else ():
                shutil.rmtree(path)
            # Many threads write a file for each shard, where one thread would write a database.
            handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, use_compression=False)
            self._checkpointer = ocp.AsyncCheckpointer(handler)
            logging.getLogger("absl").addFilter(_worth_saying)
        return self._checkpointer

    def _make_room(self, path: Path, size: int) -> None:
        self._writer().wait_until_finished()
        if jax.process_index() == 0:  # another process may get here after the manifest is written
            shutil.rmtree(path, ignore_errors=True)  # of a version that is published once more
        path.mkdir(parents=True, exist_ok=True)
        self._check_room(size)

    def _check_room(self, size: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < size:
            raise OSError(f"it takes {size / 2**20:.0f} MiB and {free / 2**20:.0f} MiB are free")

    def _manifest(
        self, version: int, params: Params, tensors: Mapping[str, Array], sums: Mapping[str, Array]
    ) -> Manifest:
        sizes, own = self.policy.architecture, shapes(self.policy)
        found = jax.device_get(dict(sums))
        entries = {
            name: TensorEntry(shape=own[name], dtype=x.dtype.name, checksum=digits(int(found[name])))
            for name, x in tensors.items()
        }
        config = hf_config.write(sizes)
        return Manifest(
            version=version, model_type=str(config["model_type"]), tied=sizes.tied, tensors=entries, forward=forward_of(config),
            canary=self._canary(params),
        )  # fmt: skip

    def _canary(self, params: Params) -> Canary | None:
        tokens = self.canary
        if len(tokens) < 2:
            return None
        text, likely, likely_logprobs, spread = (
            to_host(x)[: len(tokens) - 1] for x in scored(params, self._row(tokens), policy=self.policy)
        )
        layers, dtypes = self.policy.architecture.layers, (self.dtype, self.policy.compute_dtype)
        most = limit(likely_logprobs, spread, layers, dtypes, fp8=bool(self.quantization))
        return Canary(
            tokens=tuple(tokens.tolist()), logprobs=tuple(text.astype(float).tolist()), likely=tuple(likely.tolist()),
            likely_logprobs=tuple(likely_logprobs.astype(float).tolist()), limit=most,
        )  # fmt: skip

    def _row(self, tokens: np.ndarray) -> np.ndarray:
        return np.pad(tokens.astype(np.int32), (0, -len(tokens) % _CANARY_ROW), constant_values=-1)

    def _unwritten(self, version: str, error: Exception) -> OSError:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return OSError(
            f"{version} of the weights could not be published to {self.where} ({lines[0][:300]}): free some "
            "space and allow writing there, or set the sampler's publication (such as vllm.VllmSampler.publication) to another folder that servers see"
        )


def _worth_saying(record: logging.LogRecord) -> bool:
    return _NO_DATABASE not in str(record.msg)


def check_published(policy: Policy, max_length: int, kind: str) -> None:
    """Checks that servers of a kind can sample a policy's texts of `max_length` tokens.

    Raises:
      ValueError: they cannot; the message says what to do.
    """
    sizes = policy.architecture
    if sizes.delta is not None:
        raise ValueError(
            f"a {type(sizes).__name__}, whose layers hold a recurrent state, is not published to {kind} servers: "
            "sample it with embedded.EmbeddedSampler"
        )
    if policy.bitwise:
        raise ValueError(
            f"{kind} servers have kernels of their own, whose log-probs are not the learner's bit for bit: set BITWISE = False, or include "
            "gin/samplers/embedded.gin"
        )
    if not 2 <= max_length <= sizes.max_positions:
        raise ValueError(
            f"max_length must be 2..{sizes.max_positions} tokens, the most of the model (got {max_length}): set the lengths of prompt and response"
        )


def canary_tokens(text: str, tokenizer: Any, vocabulary: int) -> np.ndarray:
    """Returns the ids of the canary's text, int32 [T]: fixed random ids where the tokenizer lacks its characters, none for no text."""
    if not text:
        return np.zeros(0, np.int32)
    try:
        ids = np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
    except Exception:  # the tokenizers library raises bare Exception for a character outside an alphabet
        ids = np.zeros(0, np.int32)
    if len(ids) < 2:
        ids = np.random.default_rng(0).integers(0, vocabulary, 64).astype(np.int32)
    return ids


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yields a folder to fill, which takes the place of `path` once it is; nothing of it is at `path` before."""
    partly = path.with_name(f".{path.name}.partial")
    for old in (partly, path):
        shutil.rmtree(old, ignore_errors=True)
    partly.mkdir(parents=True)
    yield partly
    os.replace(partly, path)


def default_folder(publication: str | None, run_dir: Path) -> Path:
    """Returns the folder to which a run writes versions: RUN/publication, or a folder of the run's own under `publication`."""
    if publication is None or is_stored(publication):
        return run_dir.absolute() / "publication"
    return Path(publication).expanduser().absolute() / f"{run_dir.name}-{os.stat(run_dir).st_ino}"


def default_address(publication: str | None, run_dir: Path) -> str:
    """Returns the address at which samplers find a run's versions in object storage; empty where `publication` is not in object storage."""
    if publication is None or not is_stored(publication):
        return ""
    mark = hashlib.blake2b(f"{socket.gethostname()}:{run_dir.absolute()}".encode(), digest_size=4).hexdigest()
    return f"{publication.rstrip('/')}/{run_dir.name}-{mark}"


def nested(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Turns {"a.b": x} into {"a": {"b": x}}: since orbax names the arrays of a nested dict by its keys joined with dots."""
    tree: dict[str, Any] = {}
    for name, x in tensors.items():
        *folders, last = name.split(".")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = x
    return tree


def named(params: Params) -> dict[str, Array]:
    """Returns every tensor in Hugging Face's layout; a layer's experts are fused: gate and up [E, 2, M, D], down [E, D, M]."""
    found: dict[str, Array] = {}
    for tensor in hf_format.tensors(params):
        leaf = hf_format.leaf_of(params, tensor.path)
        if tensor.fused is None:
            found[tensor.name] = tensor.to_hf(tensor.of(leaf))
        elif tensor.fused not in found:
            found[tensor.fused] = jnp.moveaxis(leaf[tensor.layer], 1, -1)
    return found


@partial(jax.jit, static_argnames=("policy", "dtype"))
def exported(params: Params, *, policy: Policy, dtype: str) -> tuple[dict[str, Array], dict[str, Array]]:
    """Returns every tensor under its Hugging Face name, in that layout and in `dtype`, and its checksum (publication.manifest).

    The experts of a layer are two tensors, in the layout of `publication.vllm_experts`. Tensors are padded with zeros where the mesh
    stores them so; their checksums are those of the tensors after `whole` has cut them.
    """
    tensors, own = {name: x.astype(dtype) for name, x in named(params).items()}, shapes(policy)
    return tensors, {name: word_sum(x, own[name]) for name, x in tensors.items()}


def shapes(policy: Policy) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor by its Hugging Face name."""
    return {name: x.shape for name, x in jax.eval_shape(named, policy.sizes()).items()}


def whole(tensors: dict[str, Array], *, policy: Policy) -> dict[str, Array]:
    """Cuts exported tensors to their own shapes; those that are padded are then replicated on every device."""
    own = shapes(policy)
    filled = {name: x for name, x in tensors.items() if x.shape != own[name]}
    return {**tensors, **_cut(filled, policy=policy)} if filled else tensors


@partial(jax.jit, static_argnames=("policy",))
def _cut(tensors: dict[str, Array], *, policy: Policy) -> dict[str, Array]:
    own, replicated = shapes(policy), policy.partitioner.replicated
    return {
        name: jax.lax.with_sharding_constraint(padding.cut(x, own[name]), replicated) for name, x in tensors.items()
    }


@partial(jax.jit, static_argnames=("policy",))
def scored(
    params: Params, row: Int[Array, " T"], *, policy: Policy
) -> tuple[Float[Array, " T"], Int[Array, " T"], Float[Array, " T"], Float[Array, " T"]]:
    """Scores each position of one sequence by the policy, at temperature 1.

    Args:
      params: the policy's parameters.
      row: token ids, padded with -1.
      policy: the policy.

    Returns:
      The log-prob of the next token, 0 where there is none; the most likely token; its log-prob; and the standard deviation of the
      logits over the vocabulary.
    """
    targets = jnp.append(row[1:], -1)
    rows = policy.partitioner.batch_shards  # equal rows, one a shard, so that any mesh divides them
    tokens = jnp.broadcast_to(jnp.maximum(row, 0), (rows, len(row)))
    places = jnp.broadcast_to(jnp.arange(len(row), dtype=jnp.int32), tokens.shape)
    segments = jnp.broadcast_to((row >= 0).astype(jnp.int32), tokens.shape)
    hidden = policy.hidden(params, tokens, places, segments, max_segments=1)
    mesh, head = policy.partitioner.mesh, policy.head(params)
    logits = jnp.einsum("td,vd->tv", hidden[0], head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    likely = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    found = []
    for wanted in (targets, likely):
        stats = token_stats(
            hidden.reshape(-1, hidden.shape[-1]), head, jnp.tile(wanted, rows), outputs=("logprob",),
            mesh=mesh if mesh.size > 1 else None,
        )  # fmt: skip
        found.append(stats["logprob"].reshape(rows, -1)[0])
    return found[0], likely, found[1], jnp.std(logits, axis=-1)


def still_there(params: Params) -> bool:
    """Returns whether parameters can be written once more: this process alone holds them, and the learner has not donated them."""
    leaves = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
    return jax.process_count() == 1 and not any(leaf.is_deleted() for leaf in leaves)
