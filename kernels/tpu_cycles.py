"""Prints the TPU compiler's estimates of the kernels, on a machine without a TPU: cycles, share of peak, seconds.

    pip install "libtpu==0.0.42.*"
    python -m jaxrl_llm.kernels.tpu_cycles --chips=v6e,v5p --widths=896,2048
    python -m jaxrl_llm.kernels.tpu_cycles --chips=v6e,v5p --op=gated_mlp --widths=1536 --inner=8960 --tokens=4096

Cycles are the compiler's static estimates, which include waits for memory; nothing is run. They serve to compare kernels, and do not
predict seconds. A share counts 2 T D V FLOPs, the products of one pass, or the 6 T D M of gated_mlp, against the peak of the chip's matrix units.
"""

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Topologies of one shape each; one host is the smallest that the compiler knows.
TOPOLOGIES = {"v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "v5e": "v5e:2x2"}
# FLOPs per cycle.
PEAKS = {"v6e": 524288, "v5p": 262144, "v5e": 131072}


def environment(folder: str) -> dict[str, str]:
    """Returns environment variables that must be set before JAX starts: no TPU is looked for, and Pallas calls report their cycles."""
    flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_static_llo_profile_to={folder}"
    names = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return names | {"LIBTPU_INIT_ARGS": flags.strip()}


def pallas_cycles(text: str) -> list[int]:
    """Reads the estimated cycles of each Pallas call in a compiled program's text, in the text's order."""
    found = []
    for line in text.splitlines():
        if "tpu_custom_call" in line:
            cycles = re.search(r'"bundle_analysis_data":\{"estimated_cycles":"(\d+)"', line)
            if cycles:
                found.append(int(cycles[1]))
    return found


def compiled(chip: str, function: Callable[..., Any], *shapes: Any) -> tuple[str, float]:
    """Compiles `function` for one chip; returns the program's text and the compiler's CPU seconds."""
    import jax
    from jax.experimental import topologies

    from jaxrl_llm.kernels import dispatch

    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    with dispatch.target(device):
        traced = jax.jit(function, in_shardings=sharding, out_shardings=sharding).trace(*shapes)
        lowered = traced.lower(lowering_platforms=("tpu",))
    start = time.process_time()
    text: str = lowered.compile().as_text()
    return text, time.process_time() - start


def rows(chip: str, width: int, tokens: int, vocabulary: int) -> Iterator[dict[str, Any]]:
    """Yields a row per kernel of token_stats with log-prob and entropy."""
    import jax
    import jax.numpy as jnp

    from jaxrl_llm.kernels.token_stats.api import token_stats

    hidden, head = (jax.ShapeDtypeStruct((n, width), jnp.bfloat16) for n in (tokens, vocabulary))
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    # A log-prob needs the same sums, and a gather that libtpu's profile refuses at widths such as 3584.
    def forward(hidden: Any, head: Any, targets: Any, outputs: Sequence[str] = ("entropy",)) -> Any:
        return token_stats(hidden, head, targets, outputs=outputs, backend="mosaic_tpu")

    def full(hidden: Any, head: Any, targets: Any) -> Any:
        def total(hidden: Any, head: Any) -> Any:
            return sum(x.sum() for x in forward(hidden, head, targets, ("logprob", "entropy")).values())

        return jax.grad(total, (0, 1))(hidden, head)

    peak = 2 * tokens * width * vocabulary / PEAKS[chip]
    for name, function in (("forward", forward), ("full", full)):
        text, seconds = compiled(chip, function, hidden, head, targets)
        cycles = pallas_cycles(text)
        if len(cycles) != (1 if name == "forward" else 2):
            raise RuntimeError(
                f"{name} at width {width} on {chip} has Pallas calls of {cycles} cycles: one a kernel is expected"
            )
        kernel = "sums" if name == "forward" else "gradients"
        row = {"chip": chip, "tokens": tokens, "width": width, "vocabulary": vocabulary, "kernel": kernel}
        yield row | {"cycles": cycles[-1], "share": round(peak / cycles[-1], 3), "cpu_seconds": round(seconds, 1)}


def gated_rows(chip: str, width: int, tokens: int, inner: int) -> Iterator[dict[str, Any]]:
    """The row of gated_mlp."""
    import jax
    import jax.numpy as jnp

    from jaxrl_llm.kernels.gated_mlp.api import gradients

    def run(x: Any, g: Any, gate: Any, up: Any, turned: Any) -> Any:
        return gradients(x, g, gate, up, turned.T, backend="mosaic_tpu")

    # The last weights lie as devices gather them.
    shapes = [jax.ShapeDtypeStruct((n, width), jnp.bfloat16) for n in (tokens, tokens)]
    shapes += [jax.ShapeDtypeStruct((width, inner), jnp.bfloat16)] * 3
    text, seconds = compiled(chip, run, *shapes)
    (cycles,) = pallas_cycles(text)
    share = 6 * tokens * width * inner / PEAKS[chip] / cycles
    row = {"chip": chip, "tokens": tokens, "width": width, "inner": inner, "kernel": "gated_mlp", "cycles": cycles}
    yield row | {"share": round(share, 3), "cpu_seconds": round(seconds, 1)}


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a JSON line per kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chips", default="v6e", help=f"some of {', '.join(TOPOLOGIES)}")
    parser.add_argument("--widths", default="896,2048", help="columns of the hidden states")
    parser.add_argument("--op", default="token_stats", choices=("token_stats", "gated_mlp"))
    parser.add_argument("--inner", type=int, default=8960, help="columns of the gated values, for gated_mlp")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=8192)
    args = parser.parse_args(argv)
    for chip in args.chips.split(","):
        if chip not in TOPOLOGIES:
            parser.error(f"unknown chip {chip!r}: use some of {', '.join(TOPOLOGIES)}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(environment(folder))
        for chip in args.chips.split(","):
            for width in map(int, args.widths.split(",")):
                found = (
                    gated_rows(chip, width, args.tokens, args.inner)
                    if args.op == "gated_mlp"
                    else rows(chip, width, args.tokens, args.vocabulary)
                )
                for row in found:
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
