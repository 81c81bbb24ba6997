"""Measures the kernels at the shapes of real models: `python -m jaxrl_llm.kernels.bench --op=token_stats --spec=qwen2.5-3b`.

One JSON line a backend and pass on stdout. Times are medians of calls that wait for their result, after warm-up.
token_stats counts 2 T D V FLOPs forward and 8 T D V forward and backward (logits once more, two gradients), by whatever
number a backend really computes; attention half the square, and 3.5 forwards for both passes; log_softmax_entropy the
bytes that must be moved. Each op is set against its ceiling: a bare product, or a copy. `temp_mib` is what the compiled
program needs beyond its inputs and outputs; `peak_mib` the device's high-water mark of the process so far. Peers run
first, in a process of their own.
"""

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.attention import api as attention_api
from jaxrl_llm.kernels.attention import specs as attention_specs
from jaxrl_llm.kernels.log_softmax_entropy import api as logits_api
from jaxrl_llm.kernels.log_softmax_entropy import specs as logits_specs
from jaxrl_llm.kernels.token_stats import api as stats_api
from jaxrl_llm.kernels.token_stats import specs as stats_specs

WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Work:
    """One thing to measure.

    Attributes:
      backend: whose it is, or the name of the ceiling.
      passes: "forward", or "full" for forward and backward.
      function: the function, not yet compiled.
      args: its arrays.
      amount: FLOPs or bytes of one call by the convention.
      unit: "TFLOP/s" or "GB/s".
    """

    backend: str
    passes: str
    function: Callable[..., Any]
    args: tuple[jax.Array, ...]
    amount: float
    unit: str


def measure(work: Work, runs: int) -> dict[str, Any]:
    """The row of one piece of work: milliseconds (median of `runs`), rate, and memory."""
    compiled = jax.jit(work.function).lower(*work.args).compile()
    seconds = []
    for i in range(WARM_UP + runs):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*work.args))
        if i >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    median = float(np.median(seconds))
    memory, stats = compiled.memory_analysis(), jax.devices()[0].memory_stats()
    return {
        "backend": work.backend,
        "pass": work.passes,
        "ms": round(median * 1e3, 4),
        work.unit: round(work.amount / median / (1e12 if work.unit == "TFLOP/s" else 1e9), 2),
        "temp_mib": None if memory is None else round(memory.temp_size_in_bytes / 2**20, 1),
        "peak_mib": None if not stats else round(stats.get("peak_bytes_in_use", 0) / 2**20, 1),
    }


def token_stats_arrays(spec: stats_specs.Spec, dtype: str, file: str | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hidden states, head and targets: of a file with these names, or random ones whose logits spread by 2.

    Raises:
      ValueError: a file that lacks an array.
    """
    if file is not None:
        with np.load(file) as found:
            missing = {"hidden", "head", "targets"} - set(found)
            if missing:
                raise ValueError(f"{file} lacks {sorted(missing)}: it needs hidden [T, D], head [V, D], targets [T]")
            hidden, head, targets = (jnp.asarray(found[name]) for name in ("hidden", "head", "targets"))
        return hidden.astype(dtype), head.astype(dtype), targets.astype(jnp.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    head = jax.random.normal(keys[1], (spec.vocabulary, spec.width), dtype) * (2 * spec.width**-0.5)
    targets = jax.random.randint(keys[2], (spec.tokens,), 0, spec.vocabulary)
    return jax.random.normal(keys[0], (spec.tokens, spec.width), dtype), head.astype(dtype), targets


def token_stats_work(spec: stats_specs.Spec, dtype: str, file: str | None) -> Iterator[Work]:
    """token_stats of each backend that takes the call, and the bare product of its shape."""
    arrays = token_stats_arrays(spec, dtype, file)
    (tokens, width), entries = arrays[0].shape, arrays[1].shape[0]
    product = 2.0 * tokens * width * entries
    yield Work(
        backend="bare product",
        passes="forward",
        function=lambda hidden, head: hidden @ head.T,
        args=arrays[:2],
        amount=product,
        unit="TFLOP/s",
    )
    g = jax.random.normal(jax.random.key(1), (2, tokens))
    call = stats_api.call_of(*arrays[:2], soft_cap=spec.soft_cap)
    for backend in [b for b in stats_api.BACKENDS if dispatch.supports("token_stats", b, call)]:
        if backend == "reference" and tokens * entries > 2**28:
            continue  # its logits and their gradients would take several GiB
        forward = functools.partial(stats_api.token_stats, soft_cap=spec.soft_cap, backend=backend)

        def loss(hidden: Any, head: Any, targets: Any, g: Any, forward: Any = forward) -> jax.Array:
            out = forward(hidden, head, targets)
            total: jax.Array = (out["logprob"] * g[0] + out["entropy"] * g[1]).sum()
            return total

        full = jax.value_and_grad(loss, argnums=(0, 1))
        yield Work(backend=backend, passes="forward", function=forward, args=arrays, amount=product, unit="TFLOP/s")
        yield Work(backend=backend, passes="full", function=full, args=(*arrays, g), amount=4 * product, unit="TFLOP/s")


def log_softmax_entropy_work(spec: logits_specs.Spec, dtype: str, file: str | None) -> Iterator[Work]:
    """log_softmax_entropy of each backend, and a copy of its logits."""
    logits = jax.random.normal(jax.random.key(0), (spec.tokens, spec.vocabulary), dtype) * 2
    targets = jax.random.randint(jax.random.key(1), (spec.tokens,), 0, spec.vocabulary)
    size = float(logits.size * logits.dtype.itemsize)
    # Negation reads and writes all, and cannot be elided.
    yield Work(backend="copy", passes="forward", function=lambda x: -x, args=(logits,), amount=2 * size, unit="GB/s")
    for backend in logits_api.BACKENDS:
        forward = functools.partial(logits_api.log_softmax_entropy, backend=backend)

        def loss(logits: Any, targets: Any, forward: Any = forward) -> jax.Array:
            logprob, entropy = forward(logits, targets)
            total: jax.Array = (logprob + 0.1 * entropy).sum()
            return total

        args = (logits, targets)
        full = jax.value_and_grad(loss)
        yield Work(backend=backend, passes="forward", function=forward, args=args, amount=size, unit="GB/s")
        yield Work(backend=backend, passes="full", function=full, args=args, amount=3 * size, unit="GB/s")


def attention_work(spec: attention_specs.Spec, dtype: str, file: str | None) -> Iterator[Work]:
    """Attention over packed rows of each backend that takes the call."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(spec.batch, spec.length, n, spec.width) for n in (spec.heads, spec.kv_heads, spec.kv_heads)]
    args = tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes))
    each = spec.length // spec.segments
    index = jnp.broadcast_to(jnp.arange(spec.length, dtype=jnp.int32), (spec.batch, spec.length))
    seen = min(each, spec.window or each)
    pairs = spec.batch * spec.segments * (seen * each - seen**2 / 2)
    amount = 4.0 * pairs * spec.heads * spec.width
    for backend in attention_api.BACKENDS:
        forward = functools.partial(
            attention_api.attention,
            q_positions=index % each,
            k_positions=index % each,
            q_segments=index // each + 1,
            k_segments=index // each + 1,
            window=spec.window,
            max_segments=spec.segments,
            backend=backend,
        )
        try:
            jax.eval_shape(forward, *args)
        except ValueError as refusal:
            print(f"{backend}: {refusal}", file=sys.stderr)
            continue
        full = jax.value_and_grad(lambda *a, f=forward: f(*a).astype(jnp.float32).sum(), argnums=(0, 1, 2))
        yield Work(backend=backend, passes="forward", function=forward, args=args, amount=amount, unit="TFLOP/s")
        yield Work(backend=backend, passes="full", function=full, args=args, amount=3.5 * amount, unit="TFLOP/s")


OPS: dict[str, tuple[Callable[..., Iterator[Work]], dict[str, Any]]] = {
    "token_stats": (token_stats_work, stats_specs.SPECS),
    "log_softmax_entropy": (log_softmax_entropy_work, logits_specs.SPECS),
    "attention": (attention_work, attention_specs.SPECS),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; argparse's exit names a wrong op, spec or dtype."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.kernels.bench", description=__doc__)
    parser.add_argument("--op", choices=OPS, default="token_stats")
    parser.add_argument("--spec", default="quickstart", help="a shape of the op's specs.py")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--runs", type=int, default=10, help="timed calls, at least 10")
    parser.add_argument("--arrays", help="token_stats: an .npz with hidden [T, D], head [V, D], targets [T]")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="measure peers too")
    args = parser.parse_args(argv)
    specs = OPS[args.op][1]
    if args.spec not in specs:
        parser.error(f"unknown --spec={args.spec} of {args.op}: use one of {', '.join(specs)}")
    if args.runs < 10:
        parser.error(f"--runs={args.runs} is too few for a median: use at least 10")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the rows that the command line asks for."""
    args = parse(argv)
    work, specs = OPS[args.op]
    if args.peers and args.op == "token_stats":
        options = [f"--spec={args.spec}", f"--runs={args.runs}", *([f"--arrays={args.arrays}"] if args.arrays else [])]
        subprocess.run([sys.executable, "-m", "jaxrl_llm.kernels.peers", *options], check=False)
    head = {"op": args.op, "spec": args.arrays or args.spec, "dtype": args.dtype}
    head |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    for item in work(specs[args.spec], args.dtype, args.arrays):
        print(json.dumps(head | measure(item, args.runs)), flush=True)


if __name__ == "__main__":
    main()
