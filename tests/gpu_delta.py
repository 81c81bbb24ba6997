"""Checks and measures the gated delta rule on a GPU: against float64 token by token, then its time at the shape of a 2B hybrid.

    PYTHONPATH=. python tests/gpu_delta.py [--only=check,time,parts] [--how=columns=64,over=8 ...]

prints a JSON line a row. `check` takes a row of 4096 tokens in five segments, 16 heads with states of 128 x 128, keys at random and keys
that are nearly alike, and prints the relative norms of the errors of outputs, last state and gradients, and whether a second call gives the same
bits. `time` takes 8 such rows, forward, and forward and backward; `parts` each kernel of the Triton backend. Each --how adds other sizes of
its kernels, the warps of a kernel by its name. A row that fails says how, and the next one runs; exits 1 where a value is wrong or a call fails.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.kernels.delta_rule import api, definition, triton
from jaxrl_llm.kernels.timing import timed

HEADS, WIDTH, TOKENS, ROWS = 16, 128, 4096, 8
ENDS = (700, 701, 1500, 3100, TOKENS)  # of segments: one of a single token, and boundaries within chunks
LARGEST = 3e-5  # relative norm of an error; one product of TF32 has 5e-4
NAMES = ("out", "last", "q", "k", "v", "g", "beta", "state")
PRECISIONS = {
    "tf32": jax.lax.DotAlgorithmPreset.TF32_TF32_F32,
    "tf32x3": jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    "bf16x3": jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    "bf16x6": jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
}
Backends = dict[str, Callable[..., Any]]
BAD: list[str] = []


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def attempt(name: str, run: Callable[[], dict[str, Any]]) -> None:
    """Prints the row of `run`, or how it failed."""
    try:
        say(name=name, **run())
    except Exception as error:  # one failure must not hide the other rows
        BAD.append(name)
        say(name=name, failed=f"{type(error).__name__}: {error}"[:1500])


def arrays(rows: int, alike: float) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    """Tokens, segments and first states as a model has them; keys share `alike` of their direction."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(rows, TOKENS, HEADS, WIDTH)) for _ in range(3))
    k = alike * np.sqrt(WIDTH) * np.eye(WIDTH)[0] + (1 - alike) * k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    rates = rng.uniform(0.01, 16, HEADS) * np.log1p(np.exp(rng.normal(-3, 2, (rows, TOKENS, HEADS))))
    beta = 1 / (1 + np.exp(-rng.normal(size=rates.shape)))
    segments = np.searchsorted(np.array(ENDS), np.arange(TOKENS), side="right") + 1
    numbers = (q * WIDTH**-0.5, k, v, -rates, beta)
    state = rng.normal(size=(rows, HEADS, WIDTH, WIDTH))
    f32 = functools.partial(jnp.asarray, dtype=jnp.float32)
    return tuple(map(f32, numbers)), jnp.asarray(np.tile(segments, (rows, 1)), jnp.int32), f32(state)


def results(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Outputs and last state of a rule, and its gradients by tokens and first state for given gradients of both."""

    def run(tokens: Any, segments: Any, state: Any, slopes: Any) -> Any:
        found, back = jax.vjp(lambda tokens, state: rule(tokens, segments, state), tokens, state)
        of_tokens, of_state = back(slopes)
        return (*found, *of_tokens, of_state)

    return jax.jit(run)


def exact(tokens: Any, segments: Any, state: Any) -> Any:
    """The recurrence token by token, in the dtype of its arguments."""

    def one(carry: Any, inputs: Any) -> Any:
        (state, owner), (q, k, v, g, beta, segment) = carry, inputs
        state = jnp.where((segment == owner)[:, None, None, None], state, 0) * jnp.exp(g)[..., None, None]
        change = beta[..., None] * (v - jnp.einsum("bhij,bhi->bhj", state, k, precision="highest"))
        state = state + k[..., None] * change[..., None, :]
        return (state, segment), jnp.einsum("bhij,bhi->bhj", state, q, precision="highest")

    inputs = tuple(jnp.moveaxis(x, 1, 0).reshape(64, -1, *x.shape[:1], *x.shape[2:]) for x in (*tokens, segments))
    part = jax.checkpoint(lambda carry, inputs: jax.lax.scan(one, carry, inputs))
    (state, _), out = jax.lax.scan(part, (state, segments[:, 0]), inputs)
    return jnp.moveaxis(out.reshape(-1, *out.shape[2:]), 0, 1), state


def how_of(text: str) -> triton.How:
    """The sizes of "columns=64,over=8,precision=tf32"."""
    items = dict(item.split("=") for item in text.split(",") if item)
    whole = {n: int(items.pop(n)) for n in ("columns", "strip") if n in items}
    exact = {n: PRECISIONS[items.pop(n)] for n in ("precision", "inverting") if n in items}
    return triton.How(**whole, **exact, **{part: (int(warps), 1) for part, warps in items.items()})


def call_of(rows: int) -> api.Call:
    sizes = {"key_heads": HEADS, "value_heads": HEADS, "key_width": WIDTH, "value_width": WIDTH}
    return api.Call(platform="gpu", rows=rows, tokens=TOKENS, size=definition.CHUNK, **sizes)


def backends(hows: list[str]) -> Backends:
    """The rule by XLA, and by Triton with each of the sizes."""

    def by_xla(tokens: Any, segments: Any, state: Any) -> Any:
        return api.delta_rule(*tokens, segments, state, backend="xla")

    def by_triton(how: triton.How) -> Callable[..., Any]:
        return lambda tokens, segments, state: triton.rule(tokens, segments, state, call_of(len(segments)), how)

    return {"xla": by_xla} | {f"triton {text}".strip(): by_triton(how_of(text)) for text in hows}


def check(rules: Backends) -> None:
    """Errors of each backend against float64."""
    for alike in (0.0, 0.9):
        values = arrays(1, alike)
        rng = np.random.default_rng(1)
        slopes = tuple(jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in (values[0][2], values[2]))
        given = (*values, slopes)
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, given)
            want = [np.asarray(x) for x in results(exact)(*wide)]

        def errors(
            rule: Callable[..., Any], given: Any = given, want: Any = want, alike: float = alike
        ) -> dict[str, Any]:
            run = results(rule)
            got, again = run(*given), run(*given)
            far = [float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)) for a, b in zip(got, want)]
            same = all(bool((p == q).all()) for p, q in zip(got, again))
            if not max(far) < LARGEST or not same:
                raise ValueError(f"errors {dict(zip(NAMES, far))} of their norm, the same bits again: {same}")
            return {"alike": alike, "errors": {n: float(f"{x:.2g}") for n, x in zip(NAMES, far)}, "repeats": same}

        for name, rule in rules.items():
            attempt(f"check {name}", functools.partial(errors, rule))


def measured(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Milliseconds (median of groups of queued calls), and MiB of temporaries."""
    start = time.monotonic()
    compiled = jax.jit(function).lower(*args).compile()
    compiling = time.monotonic() - start
    seconds = timed(lambda: compiled(*args), jax.block_until_ready, 5)
    memory = compiled.memory_analysis()
    return {
        "ms": round(seconds * 1e3, 3),
        "temp_mib": memory and round(memory.temp_size_in_bytes / 2**20),
        "compile_s": round(compiling),
    }


def times(rules: Backends) -> None:
    """Milliseconds of a layer's rule."""
    tokens, segments, state = arrays(ROWS, 0.0)
    for name, rule in rules.items():
        attempt(f"time {name}, forward", functools.partial(measured, rule, tokens, segments, state))
        both = (tokens, segments, state, (tokens[2], state))
        attempt(f"time {name}, both", functools.partial(measured, results(rule), *both))


def parts(text: str) -> None:
    """Milliseconds of each kernel of the Triton backend."""
    how, call, (tokens, segments, state) = how_of(text), call_of(ROWS), arrays(ROWS, 0.0)
    places, given = (segments, definition.owners(segments, definition.CHUNK)), (call, how)
    found = jax.jit(functools.partial(triton.local, *given))(tokens, places)
    *run, _ = jax.jit(functools.partial(triton.states, *given))(tokens[1], found, state)
    *of_run, _ = jax.jit(functools.partial(triton.slopes, *given))(tokens, found, (tokens[2], state))
    every = (*run, *of_run, tokens[2])
    sides = jax.jit(functools.partial(triton.sides, *given))(tokens, found, every)
    for name, *arguments in (
        ("local", tokens, places), ("states", tokens[1], found, state), ("outputs", tokens[0], found, run),
        ("slopes", tokens, found, (tokens[2], state)), ("sides", tokens, found, every),
        ("gradients", tokens, places, sides, every),
    ):  # fmt: skip
        kernel = functools.partial(getattr(triton, name), *given)
        attempt(f"{name}, {text}", functools.partial(measured, kernel, *arguments))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="check,time,parts", help="some of check, time and parts")
    parser.add_argument("--how", action="append", default=[""], help="other sizes of the Triton kernels too")
    options = parser.parse_args()
    device = jax.devices()[0]
    say(name="device", kind=device.device_kind, jax=jax.__version__)
    rules = backends(options.how)
    if "check" in options.only:
        check(rules)
    if "time" in options.only:
        times(rules)
    if "parts" in options.only:
        for text in options.how:
            attempt(f"parts {text}", lambda text=text: parts(text) or {})
    return int(bool(BAD))


if __name__ == "__main__":
    sys.exit(main())
