"""Publishes versions of the weights as folders of safetensors, which SGLang servers read.

FOLDER/v00000012/ holds model.safetensors, with every tensor under its Hugging Face name, and manifest.json; it appears complete or not
at all. The learner copies its weights on its devices and goes on; a thread takes the copy to the host and writes it.
"""

import asyncio
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxrl_llm.models.policy import Params
from jaxrl_llm.publication.manifest import FILE, Manifest
from jaxrl_llm.samplers.servers.publisher import Publisher, appearing, exported, whole

WEIGHTS = "model.safetensors"


@dataclass(eq=False, kw_only=True)
class FolderPublisher(Publisher):
    """Publishes versions of a policy's weights as folders of safetensors; the learner is one process."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tensors: dict[str, jax.Array] = {}
        self._manifest_text = ""
        self._begun = False

    def start(self, params: Params, version: int) -> tuple[Path, Manifest]:
        self._begin, path = time.perf_counter(), self._path(version)
        stored, sums = exported(params, policy=self.policy, dtype=self.dtype)
        tensors = whole(stored, policy=self.policy)
        manifest = self._manifest(version, params, tensors, sums)
        try:
            if not self._begun:
                for old in self._versions():
                    shutil.rmtree(old)
            self._begun = True
            self._check_room(sum(x.nbytes for x in tensors.values()))
        except OSError as error:
            raise self._unwritten(f"version {version}", error) from error
        self._tensors, self._manifest_text = tensors, manifest.to_json()
        self.seconds["blocked_s"] = time.perf_counter() - self._begin
        return path, manifest

    async def finish(self, version: int) -> None:
        try:
            await asyncio.to_thread(self._write, self._path(version))
        except OSError as error:
            raise self._unwritten(f"version {version}", error) from error
        self.seconds["save_s"] = time.perf_counter() - self._begin

    def _write(self, path: Path) -> None:
        tensors, self._tensors = self._tensors, {}
        for x in tensors.values():
            x.copy_to_host_async()
        with appearing(path) as partly:
            save_file({name: np.asarray(x) for name, x in tensors.items()}, partly / WEIGHTS, metadata={"format": "pt"})
            (partly / FILE).write_text(self._manifest_text)
