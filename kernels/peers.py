"""Measures other projects' fused head losses in PyTorch at token_stats' shapes; `bench` runs it in a process of its own.

Liger's loss and cut-cross-entropy compute the log-prob alone; Liger's scaled loss also computes the entropy. The conventions and the
JSON lines are those of `bench`. For a peer that cannot be imported or fails, a line says so.
"""

import argparse
import importlib.util
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_llm.kernels.timing import timed
from jaxrl_llm.kernels.token_stats.specs import SPECS, Spec


def liger(hidden: Any, head: Any, targets: Any) -> tuple[Any, ...]:
    """Returns Liger's fused linear cross-entropy, the mean loss; its forward pass also computes the gradients."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return (liger_fused_linear_cross_entropy(hidden, head, targets),)


def liger_scaled(hidden: Any, head: Any, targets: Any) -> tuple[Any, ...]:
    """Returns Liger's per-token loss and entropy, by CuTe kernels on Hopper, elsewhere by chunks in PyTorch."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    out: tuple[Any, ...] = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, head, targets, 1.0, -100, 1, True)
    return out


def cut_cross_entropy(hidden: Any, head: Any, targets: Any) -> tuple[Any, ...]:
    """Returns Apple's cut cross-entropy, the per-token loss; its backward pass skips tiles of tiny gradients."""
    from cut_cross_entropy import linear_cross_entropy

    return (linear_cross_entropy(hidden, head, targets, reduction="none"),)


def product(hidden: Any, head: Any, targets: Any) -> tuple[Any, ...]:
    """Returns the bare product by PyTorch, that is by cuBLAS: the logits."""
    return (hidden @ head.T,)


PEERS: dict[str, tuple[str, Callable[..., tuple[Any, ...]]]] = {
    "bare product (PyTorch)": ("torch", product),
    "liger (log-prob)": ("liger_kernel", liger),
    "liger scaled (log-prob, entropy)": ("liger_kernel", liger_scaled),
    "cut-cross-entropy (log-prob)": ("cut_cross_entropy", cut_cross_entropy),
}


def tensors(spec: Spec, file: str | None) -> tuple[Any, Any, Any]:
    """Returns bfloat16 hidden states and head on the GPU, and int64 targets, from a file or random as in `bench`."""
    import torch

    if file is not None:
        with np.load(file) as found:
            hidden, head, targets = (torch.from_numpy(np.asarray(found[n])) for n in ("hidden", "head", "targets"))
    else:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(spec.tokens, spec.width, generator=generator)
        head = torch.randn(spec.vocabulary, spec.width, generator=generator) * (2 * spec.width**-0.5)
        targets = torch.randint(spec.vocabulary, (spec.tokens,), generator=generator)
    return hidden.cuda().bfloat16(), head.cuda().bfloat16(), targets.cuda().long()


def measure(function: Callable[..., tuple[Any, ...]], arrays: tuple[Any, ...], full: bool, runs: int) -> dict[str, Any]:
    """Returns the median milliseconds, rate and peak memory beyond the inputs of one peer and pass."""
    import torch

    hidden, head, targets = (x.clone().requires_grad_(full and x.is_floating_point()) for x in arrays)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    def call() -> Any:
        with torch.set_grad_enabled(full):
            out = function(hidden, head, targets)
            return torch.autograd.grad(out, (hidden, head), [torch.ones_like(x) for x in out]) if full else out

    median = timed(call, lambda _: torch.cuda.synchronize(), runs)
    flops = (8 if full else 2) * hidden.shape[0] * hidden.shape[1] * head.shape[0]
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    rate = round(flops / median / 1e12, 2)
    return {"pass": "full" if full else "forward", "ms": round(median * 1e3, 4), "TFLOP/s": rate, "peak_mib": peak}


def main() -> None:
    """Prints a line for each peer and pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", choices=SPECS, required=True)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--arrays")
    args = parser.parse_args()
    importable = {
        name: all(importlib.util.find_spec(module) for module in ("torch", package))
        for name, (package, _) in PEERS.items()
    }
    arrays, device = None, None
    for name, (package, function) in PEERS.items():
        row = {"op": "token_stats", "spec": args.arrays or args.spec, "dtype": "bfloat16", "backend": name}
        if not importable[name]:
            print(json.dumps(row | {"skipped": f"{package} or torch is not installed"}), flush=True)
            continue
        import torch

        if not torch.cuda.is_available():
            print(json.dumps(row | {"skipped": "no CUDA device"}), flush=True)
            continue
        arrays = arrays or tensors(SPECS[args.spec], args.arrays)
        device = torch.cuda.get_device_name()
        for full in (False,) if function is product else (False, True):
            try:
                found = measure(function, arrays, full, args.runs)
            except Exception as error:  # any error of a peer is a result of the benchmark
                found = {"pass": "full" if full else "forward", "failed": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps(row | {"device": device} | found), flush=True)


if __name__ == "__main__":
    main()
