"""The learner's side of an update through object storage: every process writes the shards that it holds, straight from its memory.

ADDRESS/v00000012/ holds manifest.json and weights/, whose tensors are zarr arrays (publication/zarr_shards.py). Nothing is gathered, no
process reads what another wrote, and no folder has to be shared. A process writes an object of its own when its shards are written;
when all have, process 0 writes the marker that completes the version.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.models.policy import Params
from jaxrl_llm.publication import zarr_shards
from jaxrl_llm.publication.manifest import FILE, Manifest
from jaxrl_llm.publication.object_store import TREE, Store
from jaxrl_llm.samplers.servers.publisher import Publisher, exported, shapes


@dataclass(eq=False, kw_only=True)
class StorePublisher(Publisher):
    """Publishes versions through object storage.

    Attributes:
      address: the folder of versions there, which a "file://" address names on this host; versions that an earlier run left in it are
        removed at the first one.
      relayed: whether the digests of all blocks are listed, for relays.
      wait_s: most seconds that process 0, once its own shards are written, waits for those of the others.
      process: number of this process.
      processes: number of processes.
    """

    address: str
    relayed: bool = False
    wait_s: float = 600.0
    process: int = field(default_factory=jax.process_index)
    processes: int = field(default_factory=jax.process_count)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._store = Store(self.address)
        self._names: list[str] = []
        self._blocks = ""
        self._objects: dict[str, Callable[[], bytes]] = {}
        self._cleared = False
        self._storing = threading.Lock()  # a thread goes on even where nobody waits for it any more

    @property
    def where(self) -> str:
        return self.address

    def start(self, params: Params, version: int) -> tuple[Path, Manifest]:
        """Copies this process's shards off its devices; the learner may change its weights when this returns.

        Raises:
          OSError: versions of an earlier run cannot be removed.
        """
        self._begin, path = time.perf_counter(), self._path(version)
        tensors, sums = exported(params, policy=self.policy, dtype=self.dtype)
        manifest = self._manifest(version, params, tensors, sums)
        self._clear()
        held, own = [(name, x, shard) for name, x in tensors.items() for shard in self.held(x)], shapes(self.policy)
        for _, _, shard in held:
            shard.data.copy_to_host_async()
        self._objects = {}
        for name, x, shard in held:
            length = x.sharding.shard_shape(x.shape)
            make = partial(zarr_shards.encoded, np.asarray(shard.data), zarr_shards.pieces(own[name], length))
            self._objects[zarr_shards.shard_key(name, shard.index, length)] = make
        if self.process == 0:
            texts = {FILE: manifest.to_json().encode(), TREE: zarr_shards.tree_text(tensors)}
            for name, x in tensors.items():
                length = x.sharding.shard_shape(x.shape)
                texts[zarr_shards.array_key(name)] = zarr_shards.array_text(own[name], length, x.dtype.name)
            self._objects |= {key: partial(bytes, text) for key, text in texts.items()}
        self.seconds["blocked_s"] = time.perf_counter() - self._begin
        return path, manifest

    def held(self, x: jax.Array) -> Iterable[jax.Shard]:
        """Returns the shards of an array that this process writes: of copies on several devices, the first."""
        return [shard for shard in x.addressable_shards if shard.replica_id == 0]

    async def finish(self, version: int) -> None:
        """Returns when this process's shards are written, and on process 0 when the version is complete; raises as `start` does."""
        try:
            await asyncio.to_thread(self._write, self._path(version).name)
        except OSError as error:
            raise self._unwritten(f"version {version}", error) from error
        self.seconds["save_s"] = time.perf_counter() - self._begin

    def place(self, version: int) -> str:
        """Returns the path or address at which samplers find a version."""
        source = self.source(version)
        return unquote(urlsplit(source).path) if source.startswith("file://") else source

    def source(self, version: int) -> str:
        """Returns the address at which relays find a version."""
        return f"{self.address}/{self._path(version).name}"

    def blocks(self) -> str:
        """Returns the digest of the last finished version's list of blocks, on process 0; empty where none are listed."""
        return self._blocks

    def close(self, *, remove: bool) -> None:
        """Ends what is being written; with `remove`, removes all versions."""
        super().close(remove=remove)
        if remove and self.process == 0:
            with self._storing:
                for name in self._names:
                    self._store.remove(name)

    def _prepare(self) -> None:
        """Does nothing, since no version is written to a folder."""

    def _clear(self) -> None:
        """Removes versions of an earlier run, before any process writes."""
        if self._cleared:
            return
        try:
            for old in self._store.versions() if self.process == 0 else ():
                self._store.remove(old)
        except OSError as error:
            raise self._unwritten("the first version", error) from error
        finally:  # other processes do not wait for one that fails
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices(f"cleared {self.address}")
        self._cleared = True

    def _write(self, name: str) -> None:
        with self._storing:
            if name in self._names:  # the version is published once more, which a single process does
                self._store.remove(name)
            else:
                self._names.append(name)  # before it is written, so that parts of an incomplete version are removed too
            objects, self._objects = self._objects, {}
            self._store.write(name, objects, self.process, listed=self.relayed)
            if self.process == 0:
                self._blocks = self._store.complete(name, self.processes, self.wait_s)

    def _remove_old(self, spared: Collection[str]) -> None:
        with self._storing:
            for name in [name for name in self._names[: -self.keep] if name not in spared]:
                if self.process == 0:
                    self._store.remove(name)
                self._names.remove(name)
