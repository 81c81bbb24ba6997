"""Whether the gradients of the bitwise mode have the same bits at every call, on the device at hand; of tests/gpu_bitwise.py.

    PYTHONPATH=. python tests/bitwise_gradients.py as_run|scattered [--model=qwen2.5-0.5b --layers=4 --row_tokens=1024 ...]

prints a JSON line for each work: how many numbers differ in any bit between calls in one process, and the median seconds. `as_run` is what a run does;
`scattered` sums the embedding's gradient as the default mode does.
More flags are those of tools.bench.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

KINDS = ("as_run", "scattered")
SHAPE = ("--model=qwen2.5-0.5b", "--layers=4", "--rows=16", "--micro_rows=8", "--row_tokens=1024", "--segments=4")
CALLS = 4


def rows() -> Iterator[dict[str, Any]]:
    """The rows of each kind, by a process of its own."""
    for kind in KINDS:
        done = subprocess.run([sys.executable, __file__, kind], capture_output=True, text=True, timeout=400)
        yield from map(json.loads, done.stdout.splitlines())
        if done.returncode:
            raise RuntimeError(f"{kind}: {done.stderr[-1500:]}")


def told(flags: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for gradients of several micro-batches, for the gradient of one alone, and for whole updates, each made CALLS times."""
    import jax
    import numpy as np

    from jaxrl_llm.tools import bench_case

    given = {n: d for n, (_, d, _) in bench_case.SWEPT.items()} | {"bitwise": "1"}
    given |= dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    case = bench_case.Case(flags={n: bench_case.SWEPT[n][0](value) for n, value in given.items()}, repeats=1)
    learner, batch = case.learner, bench_case.full_rows(case)
    batches = bench_case.micro_batches(case, batch, {})
    params = {"policy": case.policy.init(jax.random.key(0))}
    place = lambda number: (np.int32(0), np.uint32(number))  # noqa: E731

    def summed() -> Any:
        total = learner._zeros()
        for number, one in enumerate(batches):
            total, _ = learner._accumulate(total, params, one, {}, place(number))
        return total

    def updated() -> Any:
        own = {"policy": case.policy.init(jax.random.key(0))}
        return learner.update(learner.init(own), batches)[0].params

    shape = {"tokens": sum(bench_case.lengths_of(batch)), "micro_batches": len(batches)}
    yield shape | {"of": "all micro-batches"} | compared(summed)
    yield shape | {"of": "one micro-batch"} | compared(lambda: learner._only(params, batches[0], {}, place(0))[0])
    yield shape | {"of": "parameters after an update"} | compared(updated)


def compared(call: Callable[[], Any]) -> dict[str, Any]:
    """How many numbers of the later calls differ from those of the first in any bit, and in which leaves."""
    import jax
    import numpy as np

    found: list[dict[str, np.ndarray]] = []
    seconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        tree = jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        found.append({jax.tree_util.keystr(path): np.asarray(x).view(np.uint8) for path, x in leaves})
    by_leaf = {n: max(int((x != other[n]).sum()) for other in found[1:]) for n, x in found[0].items()}
    numbers = sum(x.size for x in found[0].values()) // 4
    where = [n for n, bits in by_leaf.items() if bits]
    return {
        "numbers": numbers, "differing": sum(by_leaf.values()), "where": where[:6], "ms": 1e3 * float(np.median(seconds[1:])),
    }  # fmt: skip


def main(kind: str, flags: Sequence[str]) -> None:
    from jaxrl_llm.distributed import xla_flags
    from jaxrl_llm.models import linear

    if kind not in KINDS:
        raise SystemExit(f"{kind!r} is no kind: use one of {', '.join(KINDS)}")
    if kind == "scattered":
        linear._ordered_rows_of = linear._rows_of
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    xla_flags.apply()
    for row in told([*SHAPE, *flags]):
        print(json.dumps({"kind": kind} | row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
