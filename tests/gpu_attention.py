"""Checks on a GPU what the test suite checks on the CPU: each attention backend gives what `reference` gives.

    PYTHONPATH=. python tests/gpu_attention.py

prints a JSON line a case: outputs and gradients of packed rows, by each backend that the GPU takes, against `reference` in float32 on the same arrays; seconds
of a forward and backward pass, median of five; and the bytes that the compiled program needs beside its arguments. Exits 1 where a difference exceeds
what the dtype rounds. `cudnn_segments` serves Ampere and Ada; its cuDNN kernels run on later GPUs too, so it is called by name there.
"""

import json
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.attention.api import Call

FAR = {"float32": 2e-5, "bfloat16": 1.2e-2}
CASES = (  # batch, tokens, segments, heads, kv heads, width, window
    (2, 2048, 4, 14, 2, 64, None),
    (2, 4096, 8, 12, 2, 128, None),
    (1, 4096, 4, 16, 8, 128, 1024),
)
BACKENDS = {"float32": ("blocked",), "bfloat16": ("blocked", "cudnn", "cudnn_segments")}


def arrays(case: tuple[Any, ...], dtype: str) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """q, k, v and a cotangent; positions and segments of rows whose last 5% are padding."""
    batch, tokens, segments, heads, kv_heads, width, _ = case
    shapes = [(batch, tokens, n, width) for n in (heads, kv_heads, kv_heads, heads)]
    values = [jax.random.normal(jax.random.key(n), shape, jnp.float32).astype(dtype) for n, shape in enumerate(shapes)]
    used = tokens - tokens // 20
    cuts = np.sort(np.random.default_rng(0).choice(np.arange(1, used), segments - 1, replace=False))
    row = np.zeros(tokens, np.int32)
    position = np.zeros(tokens, np.int32)
    for number, (begin, end) in enumerate(zip([0, *cuts], [*cuts, used], strict=True), 1):
        row[begin:end], position[begin:end] = number, np.arange(end - begin)
    return values, jnp.asarray(np.tile(position, (batch, 1))), jnp.asarray(np.tile(row, (batch, 1)))


def measured(backend: str, case: tuple[Any, ...], dtype: str) -> tuple[list[np.ndarray], float, int]:
    """Output and gradients in float64, seconds of a call, and the program's bytes of temporaries."""
    batch, tokens, segments, heads, kv_heads, width, window = case
    (*qkv, cotangent), positions, rows = arrays(case, "bfloat16")
    qkv, cotangent = [x.astype(dtype) for x in qkv], cotangent.astype(dtype)
    call = Call(
        platform="gpu", dtype=dtype, batch=batch, queries=tokens, keys=tokens, heads=heads, kv_heads=kv_heads,
        width=width, window=window, scale=width**-0.5, max_segments=segments,
    )  # fmt: skip
    attend = dispatch.backend_module("attention", backend).attend

    @jax.jit
    def step(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
        out, back = jax.vjp(lambda *x: attend(*x, (positions, positions), (rows, rows), call), q, k, v)
        return out, *back(cotangent)

    program = step.lower(*qkv, cotangent).compile()
    found = [np.asarray(x, np.float64) for x in program(*qkv, cotangent)]
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(program(*qkv, cotangent))
        seconds.append(time.perf_counter() - began)
    return found, statistics.median(seconds), program.memory_analysis().temp_size_in_bytes


def main() -> int:
    well = True
    with jax.default_matmul_precision("highest"):
        for case in CASES:
            wanted, wanted_s, wanted_bytes = measured("reference", case, "float32")
            print(
                json.dumps(
                    {
                        "case": case,
                        "backend": "reference",
                        "dtype": "float32",
                        "ms": round(wanted_s * 1e3, 2),
                        "MiB": wanted_bytes >> 20,
                    }
                )
            )
            for dtype, backends in BACKENDS.items():
                for backend in backends:
                    try:
                        found, seconds, temp = measured(backend, case, dtype)
                    except Exception as error:  # a refusal by cuDNN is a finding of the check
                        print(json.dumps({"case": case, "backend": backend, "dtype": dtype, "error": str(error)[:300]}))
                        well = False
                        continue
                    apart = [
                        float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found, wanted, strict=True)
                    ]
                    good = all(np.isfinite(apart)) and max(apart) <= FAR[dtype]
                    well &= good
                    row = {
                        "case": case,
                        "backend": backend,
                        "dtype": dtype,
                        "out,dq,dk,dv": [f"{x:.2e}" for x in apart],
                    }
                    print(
                        json.dumps({**row, "ms": round(seconds * 1e3, 2), "MiB": temp >> 20, "well": good}), flush=True
                    )
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
