"""Checks on several GPUs what the test suite checks on simulated devices: a mesh gives what one device gives.

    PYTHONPATH=. python tests/gpu_meshes.py [--small]

prints a JSON line a check: token_stats with its gradients, vocabulary and tokens divided, against one device on the same bfloat16 arrays
(sizes of Qwen2.5-3B's head); and log-probs, loss and gradient norm of an update of Qwen2.5-1.5B's shape, rows of 32,768 tokens in packed
segments, over fsdp, tensor and context. Exits 1 where a relative difference exceeds its limit.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.distributed import xla_flags
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner, to_host
from jaxrl_llm.kernels.token_stats.api import token_stats
from jaxrl_llm.learner.batch import bare, to_device
from jaxrl_llm.tools.bench import lengths_of
from jaxrl_llm.tools.bench_case import SWEPT, Case, full_rows, micro_batches

OUTPUTS = ("logprob", "entropy")
FAR = {"value": 1e-3, "gradient": 1e-2, "logprob": 5e-2, "loss": 1e-2, "grad_norm": 1e-2}


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """|a - b| / |b|, of norms."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


def say(row: Mapping[str, Any], **found: float) -> bool:
    """Prints a check; whether all of it is near enough."""
    well = all(value <= FAR[name] for name, value in found.items())
    print(json.dumps({**row, **{n: float(f"{x:.3g}") for n, x in found.items()}, "well": well}), flush=True)
    return well


def stats(sizes: tuple[int, int, int], config: MeshConfig, devices: int, repeats: int = 5) -> tuple[Any, float]:
    """Values and gradients of token_stats on a mesh, and seconds of one call."""
    tokens, width, vocabulary = sizes
    partitioner = Partitioner.create(config, jax.devices()[:devices])
    mesh = partitioner.mesh
    keys = jax.random.split(jax.random.key(0), 3)
    place = lambda x, *spec: jax.device_put(np.asarray(x), NamedSharding(mesh, P(*spec)))  # noqa: E731
    hidden = place(jax.random.normal(keys[0], (tokens, width), jnp.bfloat16), ("data", "fsdp", "context"))
    divided = "tensor" if vocabulary % mesh.shape["tensor"] == 0 else None
    head = place(0.02 * jax.random.normal(keys[1], (vocabulary, width), jnp.bfloat16), divided)
    targets = place(jax.random.randint(keys[2], (tokens,), -1, vocabulary), ("data", "fsdp", "context"))
    weights = jnp.cos(jnp.arange(tokens, dtype=jnp.float32))

    @jax.jit
    def both(hidden: jax.Array, head: jax.Array) -> Any:
        def total(hidden: jax.Array, head: jax.Array) -> Any:
            found = token_stats(hidden, head, targets, outputs=OUTPUTS, mesh=mesh)
            return jnp.sum(weights * (found["logprob"] + 0.3 * found["entropy"])), found

        return jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, head)

    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        found = jax.block_until_ready(both(hidden, head))
        seconds.append(time.perf_counter() - begin)
    (_, values), gradients = found
    return jax.tree.map(to_host, (values, gradients)), float(np.median(seconds[1:]))


def check_stats(sizes: tuple[int, int, int]) -> bool:
    (values, gradients), alone = stats(sizes, MeshConfig(), 1)
    well = True
    for axis in ("tensor", "fsdp", "context"):
        for n in (2, 4):
            if n > jax.device_count():
                continue
            config = MeshConfig(**{"fsdp": 1, axis: n})
            (others, slopes), seconds = stats(sizes, config, n)
            value = max(float(np.abs(others[name] - values[name]).max()) for name in OUTPUTS)
            gradient = max(apart(a, b) for a, b in zip(slopes, gradients, strict=True))
            row = {"check": "token_stats", "mesh": f"{axis}={n}", "sizes": sizes, "s": seconds, "one_device_s": alone}
            well &= say(row, value=value, gradient=gradient)
    return well


def learned(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Log-probs, loss and gradient norm of the first update, and its rate."""
    defaults = {name: kind(default) for name, (kind, default, _) in SWEPT.items()}
    case = Case(flags=defaults | dict(flags), repeats=1)
    learner, batch = case.learner, full_rows(case)
    state = learner.init({"policy": case.policy.init(jax.random.key(0))})
    rows = to_device(bare(batch.rows[0]), learner.partitioner)
    logprob = to_host(learner.score(state.params, rows)["policy"]["logprob"])
    stats = {"old_logprobs": batch.unpack([logprob])}
    batches = micro_batches(case, batch, stats)
    state, metrics = learner.update(state, batches)
    first = {name: float(to_host(x)) for name, x in metrics.items()}
    begin = time.perf_counter()
    state, metrics = learner.update(state, batches)
    jax.block_until_ready(metrics)
    rate = sum(lengths_of(batch)) / (time.perf_counter() - begin)
    return {"logprob": logprob, "loss": first["loss/total"], "grad_norm": first["grad_norm/policy"], "rate": rate}


def check_updates(small: bool) -> bool:
    common = {"model": "qwen2.5-1.5b", "rows": 1, "row_tokens": 32768, "segments": 5, "remat": "full", "fsdp": 1}
    if small:
        common |= {"model": "tiny", "row_tokens": 256, "dtype": "float32"}
    one = learned({**common, "devices": 1})
    well = True
    for axes in ({"context": 2}, {"context": 4}, {"tensor": 2}, {"tensor": 2, "context": 2}, {"fsdp": 2, "context": 2}):
        n = int(np.prod(list(axes.values())))
        if n > jax.device_count():
            continue
        found = learned({**common, **axes, "devices": n})
        row = {"check": "update", "mesh": axes, "tokens_per_s": round(found["rate"]), "one_device": round(one["rate"])}
        well &= say(
            row, logprob=apart(found["logprob"], one["logprob"]), loss=abs(found["loss"] - one["loss"]),
            grad_norm=abs(found["grad_norm"] / one["grad_norm"] - 1),
        )  # fmt: skip
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for simulated devices")
    parser.add_argument("--only", choices=["token_stats", "update"])
    given = parser.parse_args()
    xla_flags.apply()
    well = given.only == "update" or check_stats((64, 32, 512) if given.small else (8192, 2048, 151936))
    return 0 if (given.only == "token_stats" or check_updates(given.small)) and well else 1


if __name__ == "__main__":
    sys.exit(main())
