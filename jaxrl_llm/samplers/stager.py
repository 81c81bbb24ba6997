"""Reads published versions in the background, inside a vLLM server; numpy and tensorstore alone."""

import ctypes
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.samplers.orbax_reader import BadVersion, StagedVersion, Target, read_version, uninitialised

UNKNOWN = -1  # the version of weights that the learner did not publish, or of a model that a commit left half loaded


class Stager:
    """Reads versions in the background and keeps the last one until it is committed or dropped."""

    def __init__(self, allocate: Callable[[int], np.ndarray] = uninitialised) -> None:
        """`allocate` gives the block that a version is read into; it may give the same one again."""
        self._allocate = allocate
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # one read at a time: an older one may still write into the block
        self._job = 0
        self._began = 0.0
        self._path = ""
        self._state: dict[str, Any] = {}
        self._staged: StagedVersion | None = None
        self.drop()

    def stage(self, path: str, version: int, targets: Mapping[str, Target]) -> None:
        """Starts to read a version and returns; whatever else was being read, or was staged, is given up for it."""
        with self._lock:
            if self._state["state"] == "staging" and (self._path, self._state["version"]) == (path, version):
                return
        job = self._begin(path, version, "staging")
        threading.Thread(target=self._read, args=(job, path, version, targets), daemon=True, name="stage").start()

    def read(self, path: str, version: int, targets: Mapping[str, Target]) -> None:
        """As `stage`, and returns when `status` is staged or failed."""
        self._read(self._begin(path, version, "staging"), path, version, targets)

    def _begin(self, path: str, version: int, state: str, error: str = "") -> int:
        with self._lock:
            self._job += 1
            self._began, self._path, self._staged = time.perf_counter(), path, None
            self._state = {"version": version, "state": state, "error": error, "seconds": 0.0, "bytes": 0}
            return self._job

    def _read(self, job: int, path: str, version: int, targets: Mapping[str, Target]) -> None:
        staged, error, size = None, "", 0
        with self._reading:
            try:
                staged = read_version(path, version, targets, lambda: self._job != job, self._allocate)
                size = staged.nbytes
            except Exception as failure:
                error = str(failure) if isinstance(failure, BadVersion) else f"{path}: {failure!r}"
        with self._lock:
            if self._job == job:
                self._staged = staged
                seconds = time.perf_counter() - self._began
                state = "failed" if error else "staged"
                self._state = {"version": version, "state": state, "error": error, "seconds": seconds, "bytes": size}
        del staged
        give_memory_back()

    def status(self) -> dict[str, Any]:
        """version, state (idle, staging, staged or failed), error, seconds and bytes."""
        with self._lock:
            return dict(self._state)

    def take(self, version: int) -> StagedVersion:
        """The staged version; BadVersion where it is not this one, or is not whole."""
        with self._lock:
            if self._staged is None or self._state["version"] != version:
                raise BadVersion(
                    f"version {version} is not staged: {self._state}; stage it, and wait until it is staged"
                )
            return self._staged

    def refuse(self, version: int, error: str) -> None:
        """Forgets a staged version that turned out to be bad; `status` says why."""
        self._begin("", version, "failed", error)

    def drop(self) -> None:
        """Forgets what was staged and gives its memory back."""
        self._begin("", UNKNOWN, "idle")
        give_memory_back()


def give_memory_back() -> None:
    """Returns freed pages to the system: tensorstore's threads each leave an arena of the allocator fragmented."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
