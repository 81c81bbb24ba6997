"""Reads one rank's part of a published version and checks it, in the background of a vLLM server (tensorstore, no JAX)."""

import ctypes
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import tensorstore as ts

from jaxrl_llm.publication import object_store
from jaxrl_llm.publication.forward import differences
from jaxrl_llm.publication.manifest import FILE, WEIGHTS, Manifest, digits, element_type
from jaxrl_llm.publication.parts import Box, Kept, Target, in_one_block, summed, total

_THREADS = 8  # most threads that compute sums


class BadVersion(ValueError):
    """Raised for a published version that must not be loaded: incomplete, damaged, or of another model."""


@dataclass(frozen=True, kw_only=True)
class StagedVersion:
    """A version in host memory, checked as far as one rank can check it.

    Attributes:
      manifest: the version's manifest.
      parts: the rank's box of each tensor, by name, in the order in which the model loads them.
      sums: for tensors that the rank reads in part, its part's contribution to the checksum.
      totals: the sum of each part, counted in the checksum or not, 0 <= sum < 2^32.
      nbytes: number of bytes read.
      unchanged: number of bytes of parts that were there already.
    """

    manifest: Manifest
    parts: Mapping[str, np.ndarray]
    sums: Mapping[str, int]
    totals: Mapping[str, int]
    nbytes: int
    unchanged: int = 0


class OrbaxReader:
    """A reader of one published version."""

    def __init__(self, path: str, *, window_bytes: int = 1 << 29) -> None:
        """Opens a version; raises BadVersion where it does not exist, is incomplete, or its metadata cannot be read."""
        self.path = path.rstrip("/")
        # Some characters have another meaning in an address than in the name of a folder.
        self._address = self.path if "://" in self.path else f"file://{quote(str(Path(self.path).absolute()))}"
        self._window_bytes = window_bytes
        settings: dict[str, Any] = {"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": {"limit": 32}}
        if in_memory(self.path):  # a disk that fails under a memory-mapped file would end the process
            settings["file_io_mode"] = {"mode": "memmap"}
        self._context = ts.Context(settings | dict(object_store.RETRIES))
        self._store = ts.KvStore.open(object_store.spec(self._address), context=self._context).result()
        self._text(f"{WEIGHTS}/_CHECKPOINT_METADATA", "the checkpoint was never completed")
        metadata = json.loads(self._text(f"{WEIGHTS}/_METADATA", "orbax's list of tensors is missing"))
        self._driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
        self._database = self._store.read(f"{WEIGHTS}/manifest.ocdbt").result().state == "value"
        keys = [entry["key_metadata"] for entry in metadata["tree_metadata"].values()]
        self.names = {".".join(str(key["key"]) for key in path_of_keys) for path_of_keys in keys}
        try:
            self.manifest = Manifest.from_json(self._text(FILE, "the version has no manifest"))
        except ValueError as unreadable:
            raise BadVersion(f"{self.path}: {unreadable}") from unreadable

    def _text(self, file: str, missing: str) -> bytes:
        found = self._store.read(file).result()
        if found.state != "value":
            raise BadVersion(f"{self.path}: {missing} ({file}); publish the version again")
        return found.value

    def open(self, name: str) -> Any:
        """Returns a future of tensorstore's handle of one tensor."""
        kvstore: Any = object_store.spec(f"{self._address}/{WEIGHTS}/{name}")
        if self._database:
            base = object_store.spec(f"{self._address}/{WEIGHTS}")
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        # A missing file would read as zeros, which no checksum detects where another rank counts the same part.
        spec = {"driver": self._driver, "kvstore": kvstore, "fill_missing_data_reads": False}
        return ts.open(
            spec, open=True, read=True, context=self._context, recheck_cached_data=False, recheck_cached_metadata=False
        )

    def read_into(self, boxes: Mapping[str, tuple[Box, np.ndarray]]) -> Iterator[str]:
        """Copies each box of the stored tensors into its array; yields names, in order, as they are completed.

        At most `window_bytes` are in flight at a time. Raises BadVersion where a tensor cannot be read or differs in shape or type from
        the manifest.
        """
        opened = {name: self.open(name) for name in boxes}
        under_way: deque[tuple[str, int, Any]] = deque()
        free = self._window_bytes
        try:
            for name, (box, out) in boxes.items():
                while under_way and free < out.nbytes:
                    first, nbytes, copied = under_way.popleft()
                    free += nbytes
                    yield self._complete(first, copied)
                source = self._checked(name, opened.pop(name))
                target = ts.array(out, copy=False, write=True, context=self._context)
                copied = target.write(source[box][ts.d[:].translate_to[0]] if box else source)
                under_way.append((name, out.nbytes, copied))
                free -= out.nbytes
            while under_way:
                first, _, copied = under_way.popleft()
                yield self._complete(first, copied)
        finally:  # the caller may use the memory again when it gives up
            for _, _, copied in under_way:
                copied.exception()

    def _complete(self, name: str, copied: Any) -> str:
        try:
            copied.result()
        except Exception as failure:
            raise BadVersion(f"{self.path}: tensor {name!r} cannot be read: {_first_line(failure)}") from failure
        return name

    def _checked(self, name: str, opening: Any) -> Any:
        try:
            source = opening.result()
        except Exception as failure:
            raise BadVersion(f"{self.path}: tensor {name!r} cannot be opened: {_first_line(failure)}") from failure
        entry = self.manifest.tensors[name]
        stored = (tuple(source.shape), source.dtype.numpy_dtype)
        if stored != (entry.shape, element_type(entry.dtype)):
            raise BadVersion(
                f"{self.path}: tensor {name!r} is stored as {stored[1]} {stored[0]}, "
                f"the manifest says {entry.dtype} {entry.shape}; publish the version again"
            )
        return source


def _first_line(failure: Exception) -> str:
    return str(failure).partition("\n")[0][:500]


def check_forward(source: str, published: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    """Raises BadVersion where the server's settings of the forward pass differ from the published ones."""
    if apart := differences(published, held):
        raise BadVersion(
            f"{source}: the server's model computes otherwise than the learner's: {apart}; serve the learner's config.json, with no "
            "--hf-overrides of these"
        )


def check_names(reader: OrbaxReader, version: int, targets: Mapping[str, Target]) -> None:
    """Raises BadVersion where the version, the stored names, the manifest's names and those of the model do not agree."""
    manifest = reader.manifest
    if manifest.version != version:
        raise BadVersion(f"{reader.path}: holds version {manifest.version}, asked for was {version}")
    _same_names(reader.path, "the checkpoint", reader.names, "the manifest lists", set(manifest.tensors))
    _same_names(reader.path, "the version", set(manifest.tensors), "the server's model has", set(targets))
    for name, target in targets.items():
        if manifest.tensors[name].shape != target.shape:
            raise BadVersion(
                f"{reader.path}: tensor {name!r} has shape {manifest.tensors[name].shape}, the server's model has "
                f"{target.shape}: the server and the learner hold different architectures"
            )


def _same_names(path: str, what: str, names: set[str], whose: str, others: set[str]) -> None:
    missing, extra = sorted(others - names), sorted(names - others)
    if missing or extra:
        raise BadVersion(
            f"{path}: {what} lacks {len(missing)} tensors {missing[:3]} and holds {len(extra)} {extra[:3]} too many, "
            f"against what {whose}"
        )


def in_memory(path: str) -> bool:
    """Returns whether a path of this host is in a file system in memory (tmpfs)."""
    mounts = Path("/proc/self/mounts")
    if "://" in path or not mounts.exists():
        return False
    kinds = {place: kind for _, place, kind, *_ in (line.split() for line in mounts.read_text().splitlines())}
    real = Path(path).resolve()
    return next((kinds[str(p)] == "tmpfs" for p in (real, *real.parents) if str(p) in kinds), False)


def uninitialised(nbytes: int) -> np.ndarray:
    """Returns a block of uninitialised memory, of which pages are allocated when they are written."""
    return np.empty(nbytes, np.uint8)


def read_version(
    path: str,
    version: int,
    targets: Mapping[str, Target],
    cancelled: Callable[[], bool] = lambda: False,
    allocate: Callable[[int], np.ndarray] = uninitialised,
    forward: Mapping[str, Any] | None = None,
) -> StagedVersion:
    """Reads one rank's parts of a version into memory, in the order of `targets`, and checks them.

    Tensors that the rank reads whole are compared with the manifest's checksums; sums of parts are returned, because only the ranks
    together can compare them (`check_sums`).

    Args:
      path: the version's folder or address.
      version: the number it must have.
      targets: the rank's parts by name.
      cancelled: called after each tensor; reading ends with BadVersion where it returns True.
      allocate: returns a block of the given number of bytes, which then belongs to the parts; parts that the block of a `Kept` holds
        already are not read.
      forward: settings of the forward pass of the model that loads the version; None leaves them unchecked.

    Raises:
      BadVersion: the version is incomplete, damaged, or of a model that computes differently.
    """
    reader = OrbaxReader(path)
    check_names(reader, version, targets)
    if forward is not None:
        check_forward(path, reader.manifest.forward, forward)
    kept = allocate if isinstance(allocate, Kept) else Kept(allocate)
    parts, adding = in_one_block(reader.manifest, targets, kept), {}
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        same = kept.take(reader.manifest, parts, targets, threads)
        boxes = {name: (target.box, parts[name]) for name, target in targets.items() if name not in same}
        for name in reader.read_into(boxes):
            if cancelled():
                raise BadVersion(f"{path}: reading was given up for another version")
            adding[name] = summed(threads, parts[name], targets[name])
    read = {name: total(blocks) for name, blocks in adding.items()}
    totals = {name: same[name] if name in same else read[name] for name in targets}
    check_sums(path, reader.manifest, {name: total for name, total in totals.items() if targets[name].whole})
    divided = {name: target for name, target in targets.items() if not target.whole}
    sums = {name: totals[name] if target.counted else 0 for name, target in divided.items()}
    kept.hold(reader.manifest, targets, totals)
    nbytes, unchanged = (sum(parts[name].nbytes for name in names) for names in (boxes, same))
    return StagedVersion(
        manifest=reader.manifest, parts=parts, sums=sums, totals=totals, nbytes=nbytes, unchanged=unchanged
    )


def check_sums(path: str, manifest: Manifest, totals: Mapping[str, int]) -> None:
    """Raises BadVersion where a tensor's sum over all ranks is not the manifest's checksum."""
    wrong = [name for name, total in totals.items() if digits(total) != manifest.tensors[name].checksum]
    if wrong:
        got, said = digits(totals[wrong[0]]), manifest.tensors[wrong[0]].checksum
        raise BadVersion(
            f"{path}: {len(wrong)} tensors differ from what was published, the first is {wrong[0]!r} "
            f"(checksum {got}, the manifest says {said}); publish the version again"
        )


UNKNOWN = -1  # the version of weights that the learner did not publish, or of a model that a commit left partly loaded


class Stager:
    """Reads versions in the background and keeps the last one until it is committed or dropped."""

    def __init__(
        self, allocate: Callable[[int], np.ndarray] = uninitialised, forward: Mapping[str, Any] | None = None
    ) -> None:
        """Creates an idle stager; `allocate` returns the block into which a version is read, maybe the same one again; `forward` is
        that of `read_version`."""
        self._kept, self._forward = Kept(allocate), forward
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # one read at a time, since an older one may still write into the block
        self._job = 0
        self._began = 0.0
        self._path = ""
        self._state: dict[str, Any] = {}
        self._staged: StagedVersion | None = None
        self.drop()

    def stage(self, path: str, version: int, targets: Mapping[str, Target]) -> None:
        """Starts to read a version and returns; a read in progress or a staged version is given up for it."""
        with self._lock:
            if self._state["state"] == "staging" and (self._path, self._state["version"]) == (path, version):
                return
        job = self._begin(path, version, "staging")
        threading.Thread(target=self._read, args=(job, path, version, targets), daemon=True, name="stage").start()

    def read(self, path: str, version: int, targets: Mapping[str, Target]) -> None:
        """Reads as `stage` does, and returns when `status` is staged or failed."""
        self._read(self._begin(path, version, "staging"), path, version, targets)

    def _begin(self, path: str, version: int, state: str, error: str = "") -> int:
        with self._lock:
            self._job += 1
            self._began, self._path, self._staged = time.perf_counter(), path, None
            self._state = {
                "version": version,
                "state": state,
                "error": error,
                "seconds": 0.0,
                "bytes": 0,
                "unchanged": 0,
            }
            return self._job

    def _read(self, job: int, path: str, version: int, targets: Mapping[str, Target]) -> None:
        staged, error, size = None, "", {"bytes": 0, "unchanged": 0}
        with self._reading:
            try:
                staged = read_version(path, version, targets, lambda: self._job != job, self._kept, self._forward)
                size = {"bytes": staged.nbytes, "unchanged": staged.unchanged}
            except Exception as failure:
                error = str(failure) if isinstance(failure, BadVersion) else f"{path}: {failure!r}"
        with self._lock:
            if self._job == job:
                self._staged = staged
                seconds = time.perf_counter() - self._began
                state = "failed" if error else "staged"
                self._state = {"version": version, "state": state, "error": error, "seconds": seconds, **size}
        del staged
        give_memory_back()

    def status(self) -> dict[str, Any]:
        """Returns version, state (idle, staging, staged or failed), error, seconds, bytes read, and bytes unchanged since the last version."""
        with self._lock:
            return dict(self._state)

    def take(self, version: int) -> StagedVersion:
        """Returns the staged version; raises BadVersion where it is another one or incomplete."""
        with self._lock:
            if self._staged is None or self._state["version"] != version:
                raise BadVersion(
                    f"version {version} is not staged: {self._state}; stage it, and wait until it is staged"
                )
            return self._staged

    def refuse(self, version: int, error: str) -> None:
        """Drops a staged version that turned out to be bad, of which nothing is kept; `status` then returns the error."""
        self._kept.clear()
        self._begin("", version, "failed", error)

    def drop(self) -> None:
        """Drops the staged version and frees its memory."""
        self._begin("", UNKNOWN, "idle")
        give_memory_back()


def give_memory_back() -> None:
    """Returns freed pages to the system, since each of tensorstore's threads leaves a fragmented arena of the allocator."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
