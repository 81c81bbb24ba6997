"""Compares what several devices compute with what one does, and times both: log-probs, entropies and their gradients.

    python -m jaxrl_llm.mesh_check --kernel=8192,2048,151936 --model=qwen2.5-1.5b --row_tokens=32768 --meshes=context=4

One JSON line a mesh. `--kernel` runs token_stats on random arrays over tensor and fsdp axes; `--model` runs a model of that
shape, forward and backward, on one packed row of three segments and padding. Errors of log-probs and entropies are in nats,
those of gradients the norm of the difference over the norm of one device's: over all leaves, and of the worst leaf.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm import xla_flags
from jaxrl_llm.kernels.token_stats.api import token_stats
from jaxrl_llm.mesh import MeshConfig, Partitioner
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.shapes import SHAPES

OUTPUTS = ("logprob", "entropy")
SEGMENTS = (8, 4, 3)  # sixteenths of a row; the last one is padding
Found = tuple[dict[str, np.ndarray], dict[str, np.ndarray], float]  # statistics, gradients by path, seconds


def kernel(tokens: int, width: int, vocabulary: int, sizes: dict[str, int], dtype: str = "bfloat16") -> Found:
    """token_stats of random arrays whose logits spread by 2, over a mesh of these axes; its gradients in hidden and head."""
    partitioner = mesh_of(sizes)
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (tokens, width), dtype)
    head = (jax.random.normal(keys[1], (vocabulary, width)) * (2 * width**-0.5)).astype(dtype)
    targets = jax.random.randint(keys[2], (tokens,), -1, vocabulary)
    g = jax.random.normal(keys[3], (2, tokens))
    hidden, targets, g = (jax.device_put(x, partitioner.replicated) for x in (hidden, targets, g))
    head = jax.device_put(head, partitioner.sharding(("vocabulary", None), head.shape))
    mesh = partitioner.mesh if partitioner.mesh.size > 1 else None

    def loss(arrays: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        out = token_stats(arrays["hidden"], arrays["head"], targets, outputs=OUTPUTS, mesh=mesh)
        return sum((out[name] * x).sum() for name, x in zip(OUTPUTS, g)), out  # type: ignore[return-value]

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return found(step, {"hidden": hidden, "head": head})


def model(architecture: Architecture, row_tokens: int, sizes: dict[str, int], dtype: str, remat: str) -> Found:
    """Statistics and gradients of a random model on one packed row, over a mesh of these axes."""
    partitioner = mesh_of(sizes)
    policy = Policy(architecture, partitioner, dtype, remat)
    tokens, positions, segments, targets = (
        jax.device_put(x, partitioner.sharding(("batch", "length"), x.shape))
        for x in row(row_tokens, architecture.vocabulary_size)
    )
    g = jax.random.normal(jax.random.key(1), (2, row_tokens)) / row_tokens
    mesh = partitioner.mesh if partitioner.mesh.size > 1 else None

    def loss(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        hidden = policy.hidden(params, tokens, positions, segments, max_segments=len(SEGMENTS))
        out = token_stats(hidden[0], policy.head(params), targets[0], outputs=OUTPUTS, mesh=mesh)
        return sum((out[name] * x).sum() for name, x in zip(OUTPUTS, g)), out  # type: ignore[return-value]

    params = policy.init(jax.random.key(0))
    own = jax.tree.map(lambda x: x.sharding, params)
    whole = partitioner.replicated
    step = jax.jit(jax.value_and_grad(loss, has_aux=True), out_shardings=((whole, whole), own))
    return found(step, params)


def row(tokens: int, vocabulary: int) -> tuple[np.ndarray, ...]:
    """Tokens, positions, segments and targets, int32 [1, T], of a packed row: segments of SEGMENTS, then padding."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocabulary, tokens + 1, dtype=np.int32)
    lengths = [tokens * share // 16 for share in SEGMENTS]
    segments, positions = np.zeros(tokens, np.int32), np.zeros(tokens, np.int32)
    targets = np.full(tokens, -1, np.int32)
    for number, (start, n) in enumerate(zip(np.cumsum([0, *lengths]), lengths), 1):
        segments[start : start + n] = number
        positions[start : start + n] = np.arange(n)
        targets[start : start + n - 1] = ids[start + 1 : start + n]  # a segment's last token has none
    return tuple(x[None] for x in (ids[:tokens], positions, segments, targets))


def mesh_of(sizes: dict[str, int]) -> Partitioner:
    """The first devices in a mesh of these axes, the others 1."""
    count = int(np.prod([*sizes.values(), 1]))
    return Partitioner.create(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[:count])


def found(step: Callable[[Any], Any], params: Any) -> Found:
    """What a step gives, on the host, and the median seconds of three calls after the first."""
    (_, out), gradients = jax.block_until_ready(step(params))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(step(params))
        seconds.append(time.perf_counter() - start)
    leaves = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(gradients)}
    return {name: np.asarray(x) for name, x in out.items()}, leaves, float(np.median(seconds))


def compared(got: Found, want: Found) -> dict[str, float]:
    """Errors of one result against another, and the seconds of both."""
    rows: dict[str, float] = {"s": got[2], "one_device_s": want[2]}
    for name, x in want[0].items():
        gap = np.abs(got[0][name] - x)
        rows |= {f"{name} error": float(gap.max()), f"{name} mean error": float(gap.mean())}
    squares = {name: (square(got[1][name] - x.astype(np.float32)), square(x)) for name, x in want[1].items()}
    rows["gradient error"] = float(np.sqrt(sum(a for a, _ in squares.values()) / sum(b for _, b in squares.values())))
    rows["worst leaf's error"] = max(float(np.sqrt(a / b)) for a, b in squares.values() if b)
    return rows


def square(x: np.ndarray) -> float:
    """The sum of squares, in float64 a part at a time."""
    flat = x.astype(np.float32).reshape(-1)
    return sum(
        float(np.vdot(p, p)) for p in (flat[i : i + 2**24].astype(np.float64) for i in range(0, flat.size, 2**24))
    )


def axes_of(text: str) -> dict[str, int]:
    """{"fsdp": 2, "tensor": 2} of "fsdp=2+tensor=2"."""
    return {name: int(size) for name, size in (part.split("=") for part in text.split("+"))}


def rows_of(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row a mesh that the machine has devices for."""
    runs: list[tuple[str, list[str], Callable[[dict[str, int]], Found]]] = []
    if arguments.kernel:
        tokens, width, vocabulary = (int(n) for n in arguments.kernel.split(","))
        meshes = [f"{axis}={n}" for axis in ("tensor", "fsdp") for n in (2, 4, 8)]
        runs.append((f"token_stats {arguments.kernel}", meshes, lambda axes: kernel(tokens, width, vocabulary, axes)))
    if arguments.model:
        known = (SHAPES[arguments.model], arguments.row_tokens)
        run = lambda axes: model(*known, axes, arguments.dtype, arguments.remat)  # noqa: E731
        runs.append((f"{arguments.model} {arguments.row_tokens}", arguments.meshes.split(","), run))
    for what, meshes, run in runs:
        meshes = [text for text in meshes if np.prod([*axes_of(text).values()]) <= jax.device_count()]
        want = run({}) if meshes else None
        for text in meshes:
            head = {"check": what, "mesh": text, "device": jax.devices()[0].device_kind, "jax": jax.__version__}
            assert want is not None
            yield head | {n: float(f"{x:.4g}") for n, x in compared(run(axes_of(text)), want).items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the rows; the exit code is 1 where an error is above its limit."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.mesh_check", description=__doc__)
    parser.add_argument("--kernel", help="tokens,width,vocabulary of token_stats")
    parser.add_argument("--model", choices=SHAPES, help="shape of the model")
    parser.add_argument("--meshes", default="context=2,context=4", help="of --model: context=4,fsdp=2+tensor=2")
    parser.add_argument("--row_tokens", type=int, default=32768, help="of --model")
    parser.add_argument("--dtype", default="bfloat16", help="of --model's activations")
    parser.add_argument("--remat", default="full", help="of --model")
    parser.add_argument("--most", type=float, default=0.05, help="largest allowed error of a gradient")
    arguments = parser.parse_args(argv)
    xla_flags.apply()
    failed = False
    for found_row in rows_of(arguments):
        failed |= not found_row["gradient error"] <= arguments.most
        print(json.dumps(found_row), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
