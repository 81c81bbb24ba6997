"""Checks and measures the gated delta rule on a GPU: against float64 token by token, then its time at the shape of a 2B hybrid.

    PYTHONPATH=. python tests/gpu_delta.py [--only=check,time]

prints a JSON line a row. `check` takes a row of 4096 tokens in five segments, 16 heads with states of 128 x 128, keys at random and keys
that are nearly alike, and prints the relative norms of the errors of outputs, last state and gradients, and whether a second call gives the same
bits. `time` takes 8 such rows, forward, and forward and backward. Exits 1 where a value is wrong or a call fails.
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

from jaxrl_llm.kernels.delta_rule import api, xla
from jaxrl_llm.kernels.timing import timed

HEADS, WIDTH, TOKENS, ROWS = 16, 128, 4096, 8
ENDS = (700, 701, 1500, 3100, TOKENS)  # of segments: one of a single token, and boundaries within chunks
LARGEST = 3e-5  # relative norm of an error; one product of TF32 has 5e-4
NAMES = ("out", "last", "q", "k", "v", "g", "beta", "state")
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


def rule(tokens: Any, segments: Any, state: Any) -> Any:
    return api.delta_rule(*tokens, segments, state)


def check() -> None:
    """Errors against float64."""
    for alike in (0.0, 0.9):
        values = arrays(1, alike)
        rng = np.random.default_rng(1)
        slopes = tuple(jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in (values[0][2], values[2]))
        given = (*values, slopes)
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, given)
            want = [np.asarray(x) for x in results(exact)(*wide)]

        def errors(given: Any = given, want: Any = want, alike: float = alike) -> dict[str, Any]:
            run = results(rule)
            got, again = run(*given), run(*given)
            far = [float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)) for a, b in zip(got, want)]
            same = all(bool((p == q).all()) for p, q in zip(got, again))
            if not max(far) < LARGEST or not same:
                raise ValueError(f"errors {dict(zip(NAMES, far))} of their norm, the same bits again: {same}")
            return {"alike": alike, "errors": {n: float(f"{x:.2g}") for n, x in zip(NAMES, far)}, "repeats": same}

        attempt("check", errors)


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


def times() -> None:
    """Milliseconds of a layer's rule."""
    tokens, segments, state = arrays(ROWS, 0.0)
    attempt("time, forward", lambda: measured(rule, tokens, segments, state))
    attempt("time, both", lambda: measured(results(rule), tokens, segments, state, (tokens[2], state)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="check,time", help="check, time or both")
    options = parser.parse_args()
    device = jax.devices()[0]
    say(name="device", kind=device.device_kind, jax=jax.__version__, precision=str(xla.PRECISION))
    for part in options.only.split(","):
        {"check": check, "time": times}[part]()
    return int(bool(BAD))


if __name__ == "__main__":
    sys.exit(main())
