"""Checks and measures the gated delta rule on a GPU: against float64 token by token, then its time at the shape of a 2B hybrid.

    PYTHONPATH=. python tests/gpu_delta.py [--only=check,time,parts] [--how=states=32,sides=64:4:2 ...]

prints a JSON line a row. `check` takes a row of 4096 tokens in five segments, 16 heads with states of 128 x 128, keys at random and keys
that are nearly alike, in float32 and bfloat16, and prints the relative norms of the errors of outputs, last state and gradients, and whether
a second call gives the same bits; then the distances of the kernels of `delta_inputs` and `delta_step` from their references. `time` takes 8 such rows in bfloat16, forward, and forward and backward; `parts` each kernel of the Triton
backend. Each --how adds other sizes of its kernels, columns, warps and stages by a kernel's name; `parts` takes those that differ from the first.
A row that fails says how, and the next one runs; exits 1 where a value is wrong or a call fails.
"""

import argparse
import concurrent.futures
import functools
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.kernels.delta_inputs.api import delta_inputs
from jaxrl_llm.kernels.delta_rule import api, definition, triton
from jaxrl_llm.kernels.delta_step.api import delta_step
from jaxrl_llm.kernels.timing import timed

HEADS, WIDTH, TOKENS, ROWS = 16, 128, 4096, 8
ENDS = (700, 701, 1500, 3100, TOKENS)  # of segments: one of a single token, and boundaries within chunks
LARGEST = 3e-5  # relative norm of an error; one product of TF32 has 5e-4
NAMES = ("out", "last", "q", "k", "v", "g", "beta", "state")
ROUNDED = 4e-3  # of a gradient that is given in bfloat16
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


def arrays(rows: int, alike: float, dtype: Any) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    """Tokens, segments and first states as a model has them, the tokens in `dtype`; keys share `alike` of their direction."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(rows, TOKENS, HEADS, WIDTH)) for _ in range(3))
    k = alike * np.sqrt(WIDTH) * np.eye(WIDTH)[0] + (1 - alike) * k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    rates = rng.uniform(0.01, 16, HEADS) * np.log1p(np.exp(rng.normal(-3, 2, (rows, TOKENS, HEADS))))
    beta = 1 / (1 + np.exp(-rng.normal(size=rates.shape)))
    segments = np.searchsorted(np.array(ENDS), np.arange(TOKENS), side="right") + 1
    state = rng.normal(size=(rows, HEADS, WIDTH, WIDTH))
    f32 = functools.partial(jnp.asarray, dtype=jnp.float32)
    numbers = (*(f32(x).astype(dtype) for x in (q * WIDTH**-0.5, k, v)), f32(-rates), f32(beta))
    return numbers, jnp.asarray(np.tile(segments, (rows, 1)), jnp.int32), f32(state)


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
    """The sizes of "states=32,sides=64:4:2"."""
    items = dict(item.split("=") for item in text.split(",") if item)
    return triton.How(**{name: triton.Size(*map(int, size.split(":"))) for name, size in items.items()})


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
    for alike, dtype in itertools.product((0.0, 0.9), (jnp.float32, jnp.bfloat16)):
        values = arrays(1, alike, dtype)
        rng = np.random.default_rng(1)
        slopes = tuple(
            jnp.asarray(rng.normal(size=values[2].shape if last else values[0][2].shape), jnp.float32)
            for last in (0, 1)
        )
        given = (*values, slopes)
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: x if x.dtype == jnp.int32 else x.astype(jnp.float64), given)
            want = [np.asarray(x) for x in results(exact)(*wide)]
        said = {"alike": alike, "dtype": jnp.dtype(dtype).name}
        for name, rule in rules.items():
            attempt(f"check {name}", functools.partial(errors, rule, given, want, said))


def errors(rule: Callable[..., Any], given: Any, want: Any, said: dict[str, Any]) -> dict[str, Any]:
    """Relative norms of the errors of one call."""
    run = results(rule)
    got, again = run(*given), run(*given)
    far = [float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)) for a, b in zip(got, want)]
    same = all(bool((p == q).all()) for p, q in zip(got, again))
    if any(not x < (ROUNDED if a.dtype == jnp.bfloat16 else LARGEST) for x, a in zip(far, got)) or not same:
        raise ValueError(f"errors {dict(zip(NAMES, far))} of their norm, the same bits again: {same}")
    return {**said, "errors": {n: float(f"{x:.2g}") for n, x in zip(NAMES, far)}, "repeats": same}


def beside(run: Callable[[str], Any]) -> dict[str, Any]:
    """Relative norms of the distances of what `run` gives by `triton` from what it gives by `reference`."""
    got, again, want = (jax.tree.leaves(run(backend)) for backend in ("triton", "triton", "reference"))
    far = [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in zip(got, want)]
    same = all(bool((p == q).all()) for p, q in zip(got, again))
    if not max(far) < LARGEST or not same:
        raise ValueError(f"distances {far} of their norm, the same bits again: {same}")
    return {"distances": [float(f"{x:.2g}") for x in far], "repeats": same}


def check_inputs() -> dict[str, Any]:
    """Queries, keys and values, and gradients of the projection and the taps."""
    _, segments, _ = arrays(2, 0.0, jnp.float32)
    keys = jax.random.split(jax.random.key(0), 5)
    x, taps = (
        jax.random.normal(keys[0], (2, TOKENS, 3 * HEADS * WIDTH)),
        jax.random.normal(keys[1], (3 * HEADS * WIDTH, 4)),
    )
    slopes = tuple(jax.random.normal(key, (2, TOKENS, HEADS, WIDTH)) for key in keys[2:])
    sizes = {"key_heads": HEADS, "key_width": WIDTH, "value_width": WIDTH}

    def run(backend: str) -> Any:
        def both(x: Any, taps: Any, slopes: Any) -> Any:
            found, back = jax.vjp(lambda x, taps: delta_inputs(x, taps, segments, backend=backend, **sizes), x, taps)
            return found, back(slopes)

        return jax.jit(both)(x, taps, slopes)

    return beside(run)


def check_step() -> dict[str, Any]:
    """Outputs and states of one token of 64 slots in the second of three layers."""
    tokens, _, _ = arrays(1, 0.0, jnp.float32)
    tokens = tuple(x[0, :64] for x in tokens)
    states = jax.random.normal(jax.random.key(0), (3, 64, HEADS, WIDTH, WIDTH))
    return beside(
        lambda backend: jax.jit(functools.partial(delta_step, backend=backend))(*tokens, states, jnp.int32(1))
    )


def measured(compiled: Any, *args: Any) -> dict[str, Any]:
    """Milliseconds (median of groups of queued calls), and MiB of temporaries."""
    seconds, memory = timed(lambda: compiled(*args), jax.block_until_ready, 5), compiled.memory_analysis()
    return {"ms": round(seconds * 1e3, 3), "temp_mib": memory and round(memory.temp_size_in_bytes / 2**20)}


def all_measured(calls: list[tuple[str, Callable[..., Any], tuple[Any, ...]]]) -> None:
    """Compiles all calls side by side, then measures one after the other."""
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = [pool.submit(lambda one=one: jax.jit(one[1]).lower(*one[2]).compile()) for one in calls]
    for (name, _, args), compiled in zip(calls, found):
        attempt(name, lambda args=args, compiled=compiled: measured(compiled.result(), *args))


def times(rules: Backends) -> None:
    """Milliseconds of a layer's rule."""
    tokens, segments, state = arrays(ROWS, 0.0, jnp.bfloat16)
    both = (tokens, segments, state, (tokens[2].astype(jnp.float32), state))
    all_measured(
        [(f"time {name}, forward", rule, (tokens, segments, state)) for name, rule in rules.items()]
        + [(f"time {name}, both", results(rule), both) for name, rule in rules.items()]
    )


def parts(texts: list[str]) -> None:
    """Milliseconds of each kernel of the Triton backend, of the first sizes and of others by those kernels that they change."""
    first, call, (tokens, segments, state) = how_of(texts[0]), call_of(ROWS), arrays(ROWS, 0.0, jnp.bfloat16)
    places = (segments, definition.owners(segments, definition.CHUNK))
    taken = triton._taken(tokens, first)
    of_out = triton._whole(tokens[2].astype(jnp.float32), first.limbs)
    found = jax.jit(lambda *args: triton.local(call, first, *args))(taken, places)
    *run, _ = jax.jit(lambda *args: triton.states(call, first, *args))(taken[1], found, state)
    *of_run, _ = jax.jit(lambda *args: triton.slopes(call, first, *args))(taken, found, of_out, state)
    every, dtype = (*run, *of_run, of_out), tokens[0].dtype
    sides = jax.jit(lambda *args: triton.sides(call, first, *args, dtype))(taken, found, every)
    kernels: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "local": (lambda how, *args: triton.local(call, how, *args), (taken, places)),
        "states": (lambda how, *args: triton.states(call, how, *args), (taken[1], found, state)),
        "outputs": (lambda how, *args: triton.outputs(call, how, *args), (taken[0], found, run)),
        "slopes": (lambda how, *args: triton.slopes(call, how, *args), (taken, found, of_out, state)),
        "sides": (lambda how, *args: triton.sides(call, how, *args, dtype), (taken, found, every)),
        "gradients": (
            lambda how, *args: triton.gradients(call, how, *args, dtype), (taken, found, sides, every)
        ),
    }  # fmt: skip
    calls = []
    for text in texts:
        how = how_of(text)
        for name, (kernel, args) in kernels.items():
            if text == texts[0] or getattr(how, name) != getattr(first, name):
                calls.append((f"{name}, {text}", functools.partial(kernel, how), args))
    all_measured(calls)


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
        attempt("check delta_inputs", check_inputs)
        attempt("check delta_step", check_step)
    if "time" in options.only:
        times(rules)
    if "parts" in options.only:
        attempt("parts", lambda: parts(options.how) or {})
    return int(bool(BAD))


if __name__ == "__main__":
    sys.exit(main())
