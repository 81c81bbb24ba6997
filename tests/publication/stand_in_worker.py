"""A stand-in for a worker of vLLM with the extension mixed in, and for several of them."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from published import SERVED
from served_model import SHAPES, Served

from jaxrl_llm.publication import vllm_plugin
from jaxrl_llm.publication.vllm_plugin import OrbaxWorkerExtension


def weights(seed: int, dtype: type = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


class Worker(OrbaxWorkerExtension):
    """A worker whose model is a dict, and with `dtype` tensors too; it can be told to fail after a number of tensors.

    `spoils` changes the model after each load, as a fault of a loader would. `config` is what it serves by, read at the first use.
    """

    def __init__(self, rank: int = 0, ranks: int = 1, dtype: torch.dtype | None = None):
        served = Served(rank, ranks, dtype=dtype)
        self.served, self.dtype = served, dtype
        self.spoils: Callable[[Served], None] = lambda model: None
        self.device = torch.device("cpu")
        self.model_runner = SimpleNamespace(get_model=lambda: served)
        self.config: dict[str, Any] = dict(SERVED)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: self.config)),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1, world_size=ranks),
        )
        self.loaded: dict[str, np.ndarray] = {}
        self.fails_after: int | None = None
        self.reloads = 0

    def reload_weights(self, weights_iterator):
        self.reloads += 1
        for i, (name, tensor) in enumerate(weights_iterator):
            if i == self.fails_after:
                self.fails_after = None
                raise MemoryError("no memory left on the device")
            if self.dtype is None:
                self.loaded[name] = tensor.numpy().copy()
            if self.dtype is not None or "norm" in name:
                self.model_runner.get_model().load(name, tensor)
        self.spoils(self.served)


def on_every_rank(monkeypatch: pytest.MonkeyPatch, workers: list[Worker], method: str, *args: str) -> list:
    """Calls a method on all workers at once; their sums meet as over a process group."""
    barrier = threading.Barrier(len(workers))
    given, local = {}, threading.local()

    def summed(numbers):
        given[local.rank] = numbers
        barrier.wait(20)
        total = [sum(column) for column in zip(*given.values(), strict=True)]
        barrier.wait(20)
        return total

    monkeypatch.setattr(vllm_plugin, "sum_over_ranks", summed)
    results: list = [None] * len(workers)

    def call(rank):
        local.rank = rank
        results[rank] = getattr(workers[rank], method)(*args)

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results
