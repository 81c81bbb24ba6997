"""Compares the time of a layer policy's update with the whole model's: `python -m jaxrl_llm.tools.phase_times --out FILE`.

Let b be the time of a block and h that of the head, both forward and backward and measured alone. An update that reads layer k
of L should take ((k + 1) b + h) / (L b + h) of the whole one. The tool prints JSON; times are medians of rounds in which all run once.
"fixed_s" is the time of an update on eight tokens: the part that does not grow with the tokens.

On a CPU the seconds are the process's own, so that other work on the machine counts little, and freed memory is kept: glibc otherwise
returns large blocks to the kernel after each run, and the next run faults them in again page by page. That takes a quarter of an
update's time here, partly independent of the number of layers; "memory_kept" says whether it was avoided.
"""

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxrl_llm.algorithms.batch import MicroBatch
from jaxrl_llm.algorithms.sft import SFT
from jaxrl_llm.distributed import compilation_cache
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.kernels.token_stats.api import token_stats
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen3 import Qwen3
from jaxrl_llm.train.phases import BuPO

# The model is narrow and the tokens are many, so that work per parameter, mostly AdamW, is small beside the blocks.
SIZE = Qwen3(vocabulary_size=2048, width=128, layers=8, heads=4, kv_heads=2, head_width=32, mlp_width=384, tied=False)


def keep_freed_memory() -> bool:
    """Makes this process's allocator keep freed memory; returns False where the allocator is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # M_MMAP_MAX: no block gets a mapping of its own; M_TRIM_THRESHOLD: the heap's end is kept; M_ARENA_MAX: all threads share the heap.
    options = ((-4, 0), (-1, 2**31 - 1), (-8, 1))
    return mallopt is not None and all(mallopt(option, value) == 1 for option, value in options)


def rounds(runs: Mapping[str, Callable[[], Any]], times: int) -> dict[str, NDArray[np.float64]]:
    """Returns the seconds of each run in each round; each round runs all of them once, so that other load on the machine affects all alike."""
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    for run in runs.values():
        jax.block_until_ready(run())  # compiles
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(times):
        for name, run in runs.items():
            begin = clock()
            jax.block_until_ready(run())
            found[name].append(clock() - begin)
    return {name: np.array(seconds) for name, seconds in found.items()}


def batch_of(rows: int, tokens: int) -> MicroBatch:
    """Returns random rows, each of one sequence that is learned from in full."""
    random = np.random.default_rng(0)
    shape = (rows, tokens)
    ids = random.integers(0, SIZE.vocabulary_size, shape).astype(np.int32)
    zeros, ones = np.zeros(shape, np.float32), np.ones(shape, np.int32)
    positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), shape)
    numbers = np.broadcast_to(np.arange(rows, dtype=np.int32)[:, None], shape)
    counts = {
        "tokens": np.float32(rows * tokens),
        "sequences": np.float32(rows),
        "pairs": np.float32(1),
        "constant": np.float32(1),
        "one": np.float32(1),
    }
    batch = MicroBatch(
        tokens=ids, targets=ids, positions=positions, segments=ones, sequence=numbers, mask=ones.astype(bool), sampler_logprobs=zeros,
        old_logprobs=zeros, advantages=zeros + 1, ref_logprobs=None, old_values=None, returns=None, weights=None, aux={},
        group=numbers[:, 0], side=0 * numbers[:, 0], counts=counts,
    )  # fmt: skip
    return jax.tree.map(jnp.asarray, batch)


def measured(layer: int, rows: int, tokens: int, times: int) -> dict[str, float]:
    """Measures seconds of a block, of the head and of both updates, their ratio and the expected ratio; each is a median of rounds."""
    partitioner = Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1])
    batch, few = batch_of(rows, tokens), batch_of(1, 8)
    places = (batch.tokens, batch.positions, batch.segments)

    def of_layers(count: int) -> Callable[[], Any]:
        policy = Policy(replace(SIZE, layers=count), partitioner)
        params = policy.init(jax.random.key(0))
        gradient = jax.jit(jax.grad(lambda p: jnp.sum(policy.hidden(p, *places) ** 2)))
        return lambda: gradient(params)

    hidden = jax.random.normal(jax.random.key(1), (rows * tokens, SIZE.width))
    head = 0.02 * jax.random.normal(jax.random.key(2), (SIZE.vocabulary_size, SIZE.width))

    def of_head(x: Array, w: Array) -> tuple[Array, Array]:
        stats = token_stats(x, w, batch.targets.reshape(-1))  # the loss uses the log-prob, the metrics use the entropy
        return jnp.sum(stats["logprob"]), jnp.sum(stats["entropy"])

    head_gradient = jax.jit(jax.grad(of_head, argnums=(0, 1), has_aux=True))
    whole = Learner(
        models={"policy": Policy(SIZE, partitioner)}, algorithm=SFT(), optimizers={"policy": Optimizer()}, updates=100
    )
    phase = BuPO(layer=layer).phases[0]
    inner = replace(whole, capture=phase.view, trainable=phase.trainable)
    state = whole.init({"policy": whole.policy.init(jax.random.key(0))})

    def update(learner: Learner, batch: MicroBatch = batch) -> Any:
        nonlocal state
        state, metrics = learner.update(state, [batch])
        return metrics

    runs = {
        "two": of_layers(2), "six": of_layers(6), "head": lambda: head_gradient(hidden, head),
        "whole": lambda: update(whole), "layer": lambda: update(inner), "fixed": lambda: update(whole, few),
    }  # fmt: skip
    found = rounds(runs, times)
    # A scan over one layer is compiled without a loop, so it costs less than extrapolation from more layers predicts.
    block, of_the_head = np.median(found["six"] - found["two"]) / 4, np.median(found["head"])
    expected = ((layer + 1) * block + of_the_head) / (SIZE.layers * block + of_the_head)
    ratio = np.median(found["layer"] / found["whole"])
    return {
        "layer": layer, "layers": SIZE.layers, "block_s": float(block), "head_s": float(of_the_head),
        "whole_s": float(np.median(found["whole"])), "layer_s": float(np.median(found["layer"])),
        "fixed_s": float(np.median(found["fixed"])),
        "ratio": float(ratio), "expected": float(expected), "off_by": float(ratio / expected - 1),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.tools.phase_times", description=__doc__)
    parser.add_argument("--layer", type=int, default=2, help="k, from 0")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a row")
    parser.add_argument("--times", type=int, default=9, help="rounds, each with one run of everything")
    parser.add_argument("--out", type=Path, help="file that the JSON is written to as well")
    given = parser.parse_args(argv)
    compilation_cache.keep()
    kept = keep_freed_memory()
    found = measured(given.layer, given.rows, given.tokens, given.times)
    text = json.dumps({**found, "memory_kept": kept}, indent=1)
    if given.out is not None:
        given.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
