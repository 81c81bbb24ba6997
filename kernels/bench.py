"""Measures the kernels at the shapes of real models: `python -m jaxrl_llm.kernels.bench --op=token_stats --spec=qwen2.5-3b`.

It prints one JSON line per backend and pass. Times are medians of short groups of queued calls, after warm-up. token_stats counts 2 T D V
FLOPs forward and 8 T D V forward and backward (logits once more, two gradients), however many a backend really computes; attention
counts half the square, and 3.5 forwards for both passes; grouped_matmul counts the experts' MLP, 6 R D M forward and 18 R D M forward
and backward; log_softmax_entropy counts the bytes that must be moved. Each op is compared with its ceiling: a bare product, or a copy.
`temp_mib` is the compiled program's memory beyond its inputs and outputs; `peak_mib` is the peak memory of the process so far. Peers
run first, in processes of their own. With --check each backend of token_stats gets a row with its errors against `reference` in
float32, a block of tokens at a time, and whether a second call gives the same bits.
"""

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import command_line
from jaxrl_llm.distributed import compilation_cache, xla_flags
from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.attention import api as attention_api
from jaxrl_llm.kernels.attention import specs as attention_specs
from jaxrl_llm.kernels.grouped_matmul import api as grouped_api
from jaxrl_llm.kernels.grouped_matmul import specs as grouped_specs
from jaxrl_llm.kernels.log_softmax_entropy import api as logits_api
from jaxrl_llm.kernels.log_softmax_entropy import specs as logits_specs
from jaxrl_llm.kernels.log_softmax_entropy import triton as logits_triton
from jaxrl_llm.kernels.timing import timed
from jaxrl_llm.kernels.token_stats import api as stats_api
from jaxrl_llm.kernels.token_stats import fused, mosaic_gpu
from jaxrl_llm.kernels.token_stats import specs as stats_specs


@dataclass(frozen=True, kw_only=True)
class Work:
    """A function to measure.

    Attributes:
      backend: its backend, or the name of the ceiling.
      passes: "forward", or "full" for forward and backward.
      function: the function, not yet compiled.
      args: the function's arguments.
      amount: FLOPs or bytes of one call by the module's convention.
      unit: "TFLOP/s" or "GB/s".
    """

    backend: str
    passes: str
    function: Callable[..., Any]
    args: tuple[jax.Array, ...]
    amount: float
    unit: str


def measure(work: Work, runs: int) -> dict[str, Any]:
    """Returns the row of one piece of work: milliseconds (median of `runs`), rate, and memory."""
    compiled = jax.jit(work.function).lower(*work.args).compile()
    median = timed(lambda: compiled(*work.args), jax.block_until_ready, runs)
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
    """Returns hidden states, head and targets: from a file with these names, or random ones whose logits have a standard deviation of 2.

    Raises:
      ValueError: the file lacks an array.
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


def token_stats_work(spec: stats_specs.Spec, dtype: str, file: str | None, tiles: Sequence[str] = ()) -> Iterator[Work]:
    """Yields token_stats of each backend that takes the call, `mosaic_gpu` with other `tiles`, and the bare product."""
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
    for backend, forward in token_stats_functions(spec, arrays, tiles):
        full = functools.partial(gradients, forward)
        yield Work(backend=backend, passes="forward", function=forward, args=arrays, amount=product, unit="TFLOP/s")
        yield Work(backend=backend, passes="full", function=full, args=(*arrays, g), amount=4 * product, unit="TFLOP/s")


def token_stats_functions(
    spec: stats_specs.Spec, arrays: tuple[jax.Array, ...], tiles: Sequence[str]
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields (name, forward) of each backend that takes the call, and of `mosaic_gpu` with each of `tiles`."""
    call = stats_api.call_of(*arrays[:2], soft_cap=spec.soft_cap)
    for backend in [b for b in stats_api.BACKENDS if dispatch.supports("token_stats", b, call)]:
        if backend == "reference" and call.tokens * call.vocabulary > 2**28:
            continue  # its logits and their gradients would take several GiB
        yield backend, functools.partial(stats_api.token_stats, soft_cap=spec.soft_cap, backend=backend)
    for text in tiles:
        kernels = mosaic_gpu.Kernels(tiles=tiles_of(mosaic_gpu.Tiles, text))

        def forward(hidden: Any, head: Any, targets: Any, kernels: Any = kernels) -> Any:
            return fused.compute(kernels, (hidden, head, targets), None, jnp.zeros(2, jnp.uint32), call, None)

        yield f"mosaic_gpu {text}", forward


def tiles_of(kind: Callable[..., Any], text: str) -> Any:
    """Parses tiles such as "rows=128,columns=128": fields of `kind`, a backend's Tiles; the others keep their defaults.

    Raises:
      ValueError: a field is unknown, or the tiles do not fit.
    """
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    pairs = dict(item.partition("=")[::2] for item in text.split(","))
    if not set(pairs) <= known:
        raise ValueError(f"unknown tile sizes {sorted(set(pairs) - known)}: use {sorted(known)}")
    return kind(**{name: int(value) for name, value in pairs.items()})


def gradients(forward: Callable[..., Any], hidden: Any, head: Any, targets: Any, g: Any) -> tuple[Any, Any]:
    """Returns ({output: [T]}, gradients in hidden and head) of log-probs and entropies weighted by g [2, T]."""

    def loss(hidden: Any, head: Any) -> tuple[jax.Array, Any]:
        out = forward(hidden, head, targets)
        return (out["logprob"] * g[0] + out["entropy"] * g[1]).sum(), out

    (_, out), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)
    return out, grads


def expected(arrays: tuple[jax.Array, ...], g: jax.Array, soft_cap: float | None) -> tuple[Any, Any]:
    """Returns the results of `gradients` by `reference` in float32 products, a block of tokens at a time."""
    hidden, head, targets = arrays
    forward = functools.partial(stats_api.token_stats, soft_cap=soft_cap, backend="reference")
    size = max(min(2**26 // head.shape[0], len(targets)), 1)
    block = jax.jit(functools.partial(gradients, forward))
    outs, dhidden, dhead = [], [], jnp.zeros(head.shape, jnp.float32)
    with jax.default_matmul_precision("highest"):
        for i in range(0, len(targets), size):
            part = hidden[i : i + size].astype(jnp.float32), head.astype(jnp.float32), targets[i : i + size]
            out, (dx, dw) = block(*part, g[:, i : i + size])
            outs.append(out)
            dhidden.append(dx)
            dhead = dhead + dw
    return {name: jnp.concatenate([out[name] for out in outs]) for name in outs[0]}, (jnp.concatenate(dhidden), dhead)


def check(spec: stats_specs.Spec, dtype: str, file: str | None, tiles: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields a row per backend: largest errors of the outputs, relative norms of the gradients' errors, and repeatability."""
    arrays = token_stats_arrays(spec, dtype, file)
    g = jax.random.normal(jax.random.key(1), (2, len(arrays[2])))
    want = expected(arrays, g, spec.soft_cap)
    for backend, forward in token_stats_functions(spec, arrays, tiles):
        yield attempt({"backend": backend, "pass": "check"}, errors, forward, (*arrays, g), want)


def errors(forward: Callable[..., Any], args: tuple[jax.Array, ...], want: Any) -> dict[str, Any]:
    """Returns the errors of the function's `gradients` against `want`, and whether a second call gives the same bits."""
    compiled = jax.jit(functools.partial(gradients, forward))
    first, second = compiled(*args), compiled(*args)
    same = all(bool(jnp.array_equal(a, b)) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second)))
    row: dict[str, Any] = {"repeats": same}
    for name, x in want[0].items():
        row[f"{name} error"] = float(jnp.abs(first[0][name] - x).max())
    for name, got, x in zip(("hidden", "head"), first[1], want[1]):
        row[f"d{name} error"] = float(jnp.linalg.norm(got.astype(jnp.float32) - x) / jnp.linalg.norm(x))
    return row


def log_softmax_entropy_work(
    spec: logits_specs.Spec, dtype: str, file: str | None, tiles: Sequence[str] = ()
) -> Iterator[Work]:
    """Yields log_softmax_entropy of each backend, `triton` with other `tiles`, and a copy of its logits."""
    logits = jax.random.normal(jax.random.key(0), (spec.tokens, spec.vocabulary), dtype) * 2
    targets = jax.random.randint(jax.random.key(1), (spec.tokens,), 0, spec.vocabulary)
    size = float(logits.size * logits.dtype.itemsize)
    # Negation reads and writes everything, and cannot be elided.
    yield Work(backend="copy", passes="forward", function=lambda x: -x, args=(logits,), amount=2 * size, unit="GB/s")
    call = logits_api.call_of(logits, 1.0)
    functions: list[tuple[str, Callable[..., Any]]] = [
        (backend, functools.partial(logits_api.log_softmax_entropy, backend=backend))
        for backend in logits_api.BACKENDS
        if dispatch.supports("log_softmax_entropy", backend, call)
    ]
    for text in tiles:
        sizes = tiles_of(logits_triton.Tiles, text)
        functions.append((f"triton {text}", functools.partial(logits_triton.compute, call=call, tiles=sizes)))
    for backend, forward in functions:

        def loss(logits: Any, targets: Any, forward: Any = forward) -> jax.Array:
            logprob, entropy = forward(logits, targets)
            total: jax.Array = (logprob + 0.1 * entropy).sum()
            return total

        args = (logits, targets)
        full = jax.value_and_grad(loss)
        yield Work(backend=backend, passes="forward", function=forward, args=args, amount=size, unit="GB/s")
        yield Work(backend=backend, passes="full", function=full, args=args, amount=3 * size, unit="GB/s")


def attention_work(
    spec: attention_specs.Spec, dtype: str, file: str | None, tiles: Sequence[str] = ()
) -> Iterator[Work]:
    """Yields attention over packed rows of each backend that takes the call."""
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


def grouped_matmul_work(
    spec: grouped_specs.Spec, dtype: str, file: str | None, tiles: Sequence[str] = ()
) -> Iterator[Work]:
    """Yields the MLP of experts of each backend that takes the call, with tokens at random experts, and a dense product of its rows."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [
        (spec.tokens, spec.width),
        (spec.experts, spec.width, 2, spec.inner),
        (spec.experts, spec.inner, spec.width),
    ]
    scales = (1.0, spec.width**-0.5, spec.inner**-0.5)
    x, gate_up, down = (
        (jax.random.normal(key, shape, dtype) * scale).astype(dtype) for key, shape, scale in zip(keys, shapes, scales)
    )
    rows = spec.tokens * spec.chosen
    amount = 6.0 * rows * spec.width * spec.inner
    wide = jax.random.normal(keys[3], (rows, spec.width), dtype)
    yield Work(
        backend="bare product",
        passes="forward",
        function=lambda x, w: x @ w,
        args=(wide, gate_up[0].reshape(spec.width, -1)),
        amount=4.0 * rows * spec.width * spec.inner,
        unit="TFLOP/s",
    )
    first = jax.random.randint(keys[4], (spec.tokens, 1), 0, spec.experts)
    experts = (first + jnp.arange(spec.chosen) * (spec.experts // spec.chosen)) % spec.experts
    args = (x, gate_up, down, jnp.full(experts.shape, 1 / spec.chosen))
    call = grouped_api.call_of(x, rows, spec.experts, spec.inner, gated=True)
    for backend in [b for b in grouped_api.BACKENDS if dispatch.supports("grouped_matmul", b, call)]:

        def forward(x: Any, gate_up: Any, down: Any, weights: Any, backend: str = backend) -> jax.Array:
            return grouped_api.expert_mlp(x, gate_up, down, experts, weights, backend=backend)

        full = jax.value_and_grad(lambda *a, f=forward: f(*a).astype(jnp.float32).sum(), argnums=(0, 1, 2, 3))
        yield Work(backend=backend, passes="forward", function=forward, args=args, amount=amount, unit="TFLOP/s")
        yield Work(backend=backend, passes="full", function=full, args=args, amount=3 * amount, unit="TFLOP/s")


OPS: dict[str, tuple[Callable[..., Iterator[Work]], dict[str, Any]]] = {
    "token_stats": (token_stats_work, stats_specs.SPECS),
    "log_softmax_entropy": (log_softmax_entropy_work, logits_specs.SPECS),
    "attention": (attention_work, attention_specs.SPECS),
    "grouped_matmul": (grouped_matmul_work, grouped_specs.SPECS),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line; argparse exits with a message for a wrong op, spec or dtype."""
    parser = command_line.parser("kernels.bench", __doc__)
    parser.add_argument("--op", choices=OPS, default="token_stats")
    parser.add_argument("--spec", default="quickstart", help="shapes of the op's specs.py, with commas")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--runs", type=int, default=10, help="timed calls, at least 10")
    parser.add_argument("--arrays", help="token_stats: an .npz with hidden [T, D], head [V, D], targets [T]")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="measure peers too")
    parser.add_argument("--check", action="store_true", help="token_stats: errors against reference in float32")
    parser.add_argument(
        "--tiles",
        action="append",
        default=[],
        help="other sizes: rows=128,columns=128 of mosaic_gpu, depth=16 of triton",
    )
    parser.add_argument("--output", help="a file that gets all rows as one JSON list")
    args = parser.parse_args(argv)
    specs = OPS[args.op][1]
    for name in args.spec.split(","):
        if name not in specs:
            parser.error(f"unknown --spec={name} of {args.op}: use some of {', '.join(specs)}")
    if args.runs < 10:
        parser.error(f"--runs={args.runs} is too few for a median: use at least 10")
    if (args.op != "token_stats" and args.check) or (args.op in ("attention", "grouped_matmul") and args.tiles):
        parser.error("--check is of --op=token_stats, --tiles of it and of --op=log_softmax_entropy")
    return args


def peer_rows(spec: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the peers' rows, measured in a process of their own."""
    options = [f"--spec={spec}", f"--runs={args.runs}", *([f"--arrays={args.arrays}"] if args.arrays else [])]
    command = [sys.executable, "-m", "jaxrl_llm.kernels.peers", *options]
    found = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    yield from (json.loads(line) for line in found.stdout.splitlines() if line.startswith("{"))
    if found.returncode:
        yield {"op": args.op, "spec": spec, "backend": "peers", "failed": f"exit status {found.returncode}"}


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields every row of the command line; peers come first, since they need the device's memory."""
    work, specs = OPS[args.op]
    names = args.spec.split(",")
    if args.peers and args.op == "token_stats":
        for name in names:
            yield from peer_rows(name, args)
    for name in names:
        head = {"op": args.op, "spec": args.arrays or name, "dtype": args.dtype}
        head |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        asked = (specs[name], args.dtype, args.arrays, tuple(args.tiles))
        for row in check(*asked) if args.check else ():
            yield head | row
        for item in work(*asked):
            yield head | attempt({"backend": item.backend, "pass": item.passes}, measure, item, args.runs)


def attempt(row: dict[str, Any], function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Returns `row` with the function's results, or with its error, so that one backend's error does not end the measurements."""
    try:
        return row | function(*args)
    except Exception as error:  # an error of any kind is a result; the exit status reports it
        return row | {"failed": f"{type(error).__name__}: {error}"[:2000]}


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the rows of the command line, and writes the output file after each row.

    Raises:
      SystemExit: a backend of this project failed; the status is 1.
    """
    xla_flags.apply()
    args = parse(argv)
    compilation_cache.keep()
    rows = []
    for row in rows_of(args):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.output:
            Path(args.output).write_text(json.dumps(rows, indent=1) + "\n")
    if any("failed" in row and "jax" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
