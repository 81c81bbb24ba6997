"""Checks and measures grouped_matmul on a GPU: each backend against float64 loops, then the products of a 30B-A3B layer.

    PYTHONPATH=. python tests/gpu_grouped_matmul.py [--quick] [--only=check,balanced,ragged,one,small] [--tiles=rows=128,columns=128]

prints a JSON line a row. `check` draws random group sizes at four shapes: products, gradients and the whole expert MLP of each backend that
the GPU takes, their largest error in roundings of bfloat16, and whether a second call gives the same bits. The other names are how
262,144 rows (8,192 of `small`) spread over 128 experts: D 2048, M 768, bfloat16. TFLOP/s count 2 R K N, no padding; "dense" is one
product of as many FLOPs. A row that fails says how, and the next one runs; exits 1 where a value is wrong or a backend fails.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, __file__.rpartition("/")[0] + "/kernels")

from grouped_matmul_float64 import grouped, mlp, wide

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.grouped_matmul import api, definition, expert_mlp, mosaic_gpu, triton_rows, xla
from jaxrl_llm.kernels.timing import timed

EXPERTS, WIDTH, INNER, CHOSEN = 128, 2048, 768, 8
# R, E, A, B: few rows an expert, and many, whose blocks work in pairs.
SHAPES = ((1500, 16, 256, 384), (4096, 128, 256, 256), (3000, 4, 384, 256), (5000, 8, 256, 640))
NAMES = ("balanced", "check", "ragged", "small", "one")
BAD: list[str] = []


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def attempt(name: str, run: Callable[[], dict[str, Any]]) -> None:
    """Prints the row of `run`, or how it failed."""
    try:
        say(name=name, **run())
    except Exception as error:  # one backend's failure must not hide the others' rows
        BAD.append(name)
        say(name=name, failed=f"{type(error).__name__}: {error}"[:1500])


def random_sizes(rng: np.random.Generator, rows: int, experts: int) -> np.ndarray:
    """Sizes of one of several kinds, with a sum of at most `rows`."""
    kind = rng.integers(5)
    if kind == 0:  # all in one
        sizes = np.zeros(experts, int)
        sizes[rng.integers(experts)] = rows
    elif kind == 1:  # around the edges of tiles
        sizes = np.minimum(rng.choice([0, 1, 63, 64, 65, 127, 128, 129], experts), rows // experts)
    else:  # uneven, often empty
        share = rng.dirichlet(np.full(experts, [0.1, 1.0, 10.0][kind - 2]))
        sizes = np.floor(share * (rows - rng.integers(rows // 4))).astype(int)
    return sizes.astype(np.int32)


def roundings(got: Any, want: np.ndarray) -> float:
    """Largest error in units of bfloat16's rounding of the row's largest term."""
    ulp = 2.0 ** (np.floor(np.log2(np.abs(want).max(axis=-1, keepdims=True).clip(1e-30))) - 7)
    return float((np.abs(wide(got) - want) / ulp).max(initial=0))


def check_products(backend: str, draws: int) -> dict[str, Any]:
    """Errors of y, dx and dw over random sizes; rows that are nobody's are NaN."""
    rng, worst, same = np.random.default_rng(0), 0.0, True
    for rows, experts, a, b in SHAPES:

        @jax.jit
        def both(x: Any, w: Any, sizes: Any, dy: Any) -> Any:
            y, back = jax.vjp(lambda x, w: api.grouped_matmul(x, w, sizes, backend=backend), x, w)
            return y, *back(dy)

        w = jnp.asarray(rng.normal(size=(experts, a, b)), jnp.bfloat16)
        for _ in range(draws // len(SHAPES)):
            sizes = random_sizes(rng, rows, experts)
            used = sizes.sum()
            x, dy = (jnp.asarray(rng.normal(size=(rows, n)), jnp.bfloat16).at[used:].set(jnp.nan) for n in (a, b))
            got, again = both(x, w, jnp.asarray(sizes), dy), both(x, w, jnp.asarray(sizes), dy)
            same &= all(bool((p == q).all()) for p, q in zip(got, again))
            for found, want in zip(got, grouped(x[:used], w, sizes, dy[:used])):
                rest = found[used:] if found.ndim == 2 else found[sizes == 0]
                if bool((rest != 0).any()):
                    raise ValueError(f"rows or experts that are nobody's are not 0 (sizes {sizes.tolist()})")
                found = found[:used] if found.ndim == 2 else found
                worst = max(worst, roundings(found, want)) if bool(jnp.isfinite(found).all()) else float("inf")
    if worst > 1 or not same:
        raise ValueError(f"errors up to {worst} roundings, the same bits again: {same}")
    return {"draws": draws, "roundings": round(worst, 3), "repeats": same}


def check_mlp(backend: str, experts: int) -> dict[str, Any]:
    """Relative norms of the errors of the expert MLP's output and gradients."""
    rng, (tokens, chosen, width, inner) = np.random.default_rng(1), (800, 3, 256, 256)
    ids = np.stack([rng.choice(experts, chosen, replace=False) for _ in range(tokens)]).astype(np.int32)
    ids[7] = experts  # a token of none
    x, dy = (jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16) for _ in range(2))
    gate_up = jnp.asarray(rng.normal(size=(experts, width, 2, inner)) * width**-0.5, jnp.bfloat16)
    down = jnp.asarray(rng.normal(size=(experts, inner, width)) * inner**-0.5, jnp.bfloat16)
    weights = jnp.asarray(rng.uniform(0.1, 1, size=ids.shape), jnp.float32)

    @jax.jit
    def both(*args: Any) -> Any:
        def layer(x: Any, gate_up: Any, down: Any, weights: Any) -> Any:
            return api.expert_mlp(x, gate_up, down, jnp.asarray(ids), weights, backend=backend)

        y, back = jax.vjp(layer, *args)
        return y, *back(dy)

    got, again = (both(x, gate_up, down, weights) for _ in range(2))
    same = all(bool((p == q).all()) for p, q in zip(got, again))
    want = mlp(x, gate_up, down, ids, weights, dy)
    far = [float(np.linalg.norm(wide(a) - b) / np.linalg.norm(b)) for a, b in zip(got, want)]
    if not max(far) < 6e-3 or not same:
        raise ValueError(f"errors {far} of their norm, the same bits again: {same}")
    return {"errors": [round(value, 5) for value in far], "repeats": same}


def sizes_of(name: str, rows: int) -> np.ndarray:
    """Rows of each expert: all equal, the largest twice the mean, or all in one."""
    if name == "one":
        return np.eye(1, EXPERTS, 5, dtype=np.int32)[0] * rows
    if name != "ragged":
        return np.full(EXPERTS, rows // EXPERTS, np.int32)
    logits = np.random.default_rng(0).normal(size=EXPERTS)
    low, high = 0.0, 3.0
    for _ in range(50):  # the spread whose largest load is twice the mean
        spread = (low + high) / 2
        share = np.exp(spread * logits) / np.exp(spread * logits).sum()
        low, high = (spread, high) if share.max() * EXPERTS < 2 else (low, spread)
    sizes = np.random.default_rng(1).multinomial(rows, share)
    return sizes.astype(np.int32)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * shape[-1] ** -0.5)()


def measured(flops: float, function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Milliseconds (median of groups of queued calls), TFLOP/s, and bytes of temporaries."""
    compiled = jax.jit(function).lower(*args).compile()
    seconds = timed(lambda: compiled(*args), jax.block_until_ready, 7)
    memory = compiled.memory_analysis()
    row = {"ms": round(seconds * 1e3, 4), "temp_mib": memory and round(memory.temp_size_in_bytes / 2**20)}
    return row | ({"tflops": round(flops / seconds / 1e12, 1)} if flops else {})


def kernels(rows: int, sizes: np.ndarray, tiles: mosaic_gpu.Tiles) -> Iterator[tuple[str, float, Any, tuple[Any, ...]]]:
    """(name, FLOPs, function, arrays) of each product of the layer by `mosaic_gpu` with these tiles."""
    plan = jax.jit(functools.partial(definition.plan_of_sizes, rows=rows, block=tiles.block))(jnp.asarray(sizes))
    blocks, padded = plan.blocks, len(plan.row)
    first, second = 2.0 * rows * WIDTH * 2 * INNER, 2.0 * rows * WIDTH * INNER
    used = jnp.arange(padded)[:, None] < blocks.used * tiles.block
    x, both, hidden = (jnp.where(used, normal(i, padded, n), 0) for i, n in enumerate((WIDTH, 2 * INNER, INNER)))
    w13, w2 = normal(4, EXPERTS, WIDTH, 2 * INNER), normal(5, EXPERTS, INNER, WIDTH)
    run, turn = (
        functools.partial(mosaic_gpu.products, blocks=blocks),
        functools.partial(mosaic_gpu.gradients, blocks=blocks),
    )
    fit = tiles.fitting
    yield "w13 gated, g u kept", first, functools.partial(run, tiles=tiles, gate=True, keep=True), (x, w13)
    yield "w13 gated", first, functools.partial(run, tiles=tiles, gate=True), (x, w13)
    yield "w13", first, functools.partial(run, tiles=fit(2 * INNER)), (x, w13)
    yield "w2", second, functools.partial(run, tiles=fit(WIDTH)), (hidden, w2)
    yield "dx of w13", first, functools.partial(run, tiles=fit(WIDTH), transposed=True), (both, w13)
    yield "dx of w2", second, functools.partial(run, tiles=fit(INNER), transposed=True), (x, w2)
    for dtype in (jnp.bfloat16, jnp.float32):
        kind = functools.partial(turn, dtype=jnp.dtype(dtype))
        yield f"dW of w13, {dtype.__name__}", first, functools.partial(kind, tiles=fit(2 * INNER, WIDTH)), (x, both)
        yield f"dW of w2, {dtype.__name__}", second, functools.partial(kind, tiles=fit(WIDTH, INNER)), (hidden, x)


def layer(rows: int, sizes: np.ndarray, backend: str) -> Iterator[tuple[str, float, Any, tuple[Any, ...]]]:
    """(name, FLOPs, function, arrays) of the whole MLP, forward, and forward and backward, and of the parts beside products."""
    order = np.random.default_rng(2).permutation(np.repeat(np.arange(EXPERTS), sizes)).astype(np.int32)
    ids = jnp.asarray(order.reshape(-1, CHOSEN))
    x, dy = normal(0, len(ids), WIDTH), normal(1, len(ids), WIDTH)
    weights = jnp.full(ids.shape, 1 / CHOSEN)
    gate_up, down = normal(4, EXPERTS, WIDTH, 2, INNER), normal(5, EXPERTS, INNER, WIDTH)
    flops = 6.0 * rows * WIDTH * INNER

    def forward(x: Any, gate_up: Any, down: Any, weights: Any) -> Any:
        return api.expert_mlp(x, gate_up, down, ids, weights, backend=backend)

    def full(x: Any, gate_up: Any, down: Any, weights: Any, dy: Any) -> Any:
        y, back = jax.vjp(forward, x, gate_up, down, weights)
        return y, *back(dy)

    yield f"mlp forward, {backend}", flops, forward, (x, gate_up, down, weights)
    yield f"mlp full, {backend}", 3 * flops, full, (x, gate_up, down, weights, dy)
    if backend != "mosaic_gpu":
        return
    block = mosaic_gpu.block_rows(api.call_of(x, rows, EXPERTS, INNER, gated=True))
    make = functools.partial(definition.plan_of_experts, count=EXPERTS, block=block)
    plan = jax.jit(make)(ids.reshape(-1))
    y, gate = normal(6, len(plan.row), WIDTH), normal(7, len(plan.row), 2 * INNER)
    yield "plan", 0, make, (ids.reshape(-1),)
    yield "spread", 0, triton_rows.spread, (x, plan)
    yield "gather", 0, definition.spread, (x, plan)
    combine = lambda y, w: expert_mlp._combine(y, plan, w, ids.shape, x.dtype)  # noqa: E731
    yield "combine", 0, combine, (y, weights)
    weight = jnp.full(len(plan.row), 1 / CHOSEN)
    yield "gradient of the activation", 0, definition.activation_gradient, (gate, y[:, :INNER], weight)


def others(rows: int, sizes: np.ndarray) -> Iterator[tuple[str, float, Any, tuple[Any, ...]]]:
    """Dense products of as many FLOPs, and JAX's own."""
    x, hidden, both = normal(0, rows, WIDTH), normal(2, rows, INNER), normal(1, rows, 2 * INNER)
    first, second = 2.0 * rows * WIDTH * 2 * INNER, 2.0 * rows * WIDTH * INNER
    yield "w13, dense", first, lambda x, w: x @ w, (x, normal(3, WIDTH, 2 * INNER))
    yield "w2, dense", second, lambda x, w: x @ w, (hidden, normal(4, INNER, WIDTH))
    yield "dW of w13, dense", first, lambda x, y: x.T @ y, (x, both)
    if rows <= 8192:  # JAX's own may take E times the memory
        yield (
            "w13, lax.ragged_dot",
            first,
            jax.lax.ragged_dot,
            (x, normal(5, EXPERTS, WIDTH, 2 * INNER), jnp.asarray(sizes)),
        )


def tiles_of(text: str) -> mosaic_gpu.Tiles:
    """Tiles of "rows=128,columns=128"."""
    return mosaic_gpu.Tiles(**{key: int(value) for key, value in (item.split("=") for item in text.split(","))})


def table(name: str, options: argparse.Namespace) -> None:
    """Prints the rows of one spread of the rows over experts."""
    rows = 8192 if name == "small" else 262144
    sizes = sizes_of(name, rows)
    call = api.call_of(jnp.zeros((1, WIDTH), jnp.bfloat16), rows, EXPERTS, INNER, gated=True)
    load = round(float(sizes.max() / sizes.mean()), 3)
    chosen = {"": mosaic_gpu.tiles_of(call)} if not options.tiles or "default" in options.tiles else {}
    named = {text: tiles_of(text) for text in options.tiles if text != "default"}
    work: list[tuple[str, Any]] = []
    if dispatch.supports("grouped_matmul", "mosaic_gpu", call):
        work += [(text, functools.partial(kernels, rows, sizes, tiles)) for text, tiles in (chosen | named).items()]
    if chosen:
        work += [
            ("", functools.partial(others, rows, sizes)),
            ("", functools.partial(layer, rows, sizes, "mosaic_gpu")),
        ]
    if chosen and not options.quick:
        work.append(("", functools.partial(layer, rows, sizes, "xla")))
    for text, cases in work:
        for part, flops, function, args in cases():
            if time.monotonic() > options.until:
                say(name=name, part=part, left_out="no time left")
                return
            if options.part and options.part not in part:
                continue
            row = {"rows": rows, "load": load, "part": part} | ({"tiles": text} if text else {})
            attempt(name, lambda: row | measured(flops, function, *args))  # noqa: B023


def check(options: argparse.Namespace) -> None:
    call = api.call_of(jnp.zeros((1, 128), jnp.bfloat16), 512, 4, 128, gated=True)
    backends = [b for b in ("mosaic_gpu", "xla") if dispatch.supports("grouped_matmul", b, call)]
    for backend in backends:
        attempt(f"check products, {backend}", functools.partial(check_products, backend, 40 if options.quick else 200))
        for experts in (4, 16):
            attempt(f"check mlp of {experts}, {backend}", functools.partial(check_mlp, backend, experts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="about a minute: fewer draws, and the balanced spread alone"
    )
    parser.add_argument("--only", default="", help=f"some of {','.join(NAMES)}")
    parser.add_argument("--part", default="", help="only parts whose name has this text")
    parser.add_argument(
        "--tiles", action="append", default=[], help="other tile sizes too; 'default' keeps the chosen ones"
    )
    parser.add_argument("--seconds", type=float, default=600, help="start no row after so many")
    options = parser.parse_args()
    options.until = time.monotonic() + options.seconds
    device = jax.devices()[0]
    block = xla.block_rows(api.call_of(jnp.zeros((1, WIDTH)), 262144, EXPERTS, INNER, gated=True))
    say(name="device", kind=device.device_kind, jax=jax.__version__, xla_block=block)
    for name in options.only.split(",") if options.only else NAMES[:2] if options.quick else NAMES:
        check(options) if name == "check" else table(name, options)
    return int(bool(BAD))


if __name__ == "__main__":
    sys.exit(main())
