"""Counts the kernels, bytes and FLOPs of a program that is compiled for a GPU, and the seconds that they take at least on an H200.

    python tests/compiled_update.py h200:1 update.hlo --model=qwen3.5-2b --rows=8 --row_tokens=4096 --segments=1 --remat=full
    python tests/counted_gpu.py update.hlo [--largest=20]

A kernel takes its launch and the longer of its bytes at the memory's rate and its products' FLOPs at the rate of their dtype. Bytes are those of
operands and results; of an operand that a fusion reads by slices alone those of the slices, and of a result that it updates in place
those of the update. Kernels of Pallas and cuDNN count bytes alone. Prints one line of JSON, then the largest kernels.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxrl_llm.distributed.hlo import Instruction, Program, bytes_of

LAUNCH_S, BYTES_PER_S = 3e-6, 4.0e12
FLOPS_PER_S = {"bf16": 700e12, "f32": 45e12}
# Opcodes that launch nothing.
FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "call", "conditional", "after-all", "iota"
}  # fmt: skip
SLICES = ("dynamic-slice", "slice", "gather")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d",]*)')


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel of a program.

    Attributes:
      name: name of its instruction.
      shape: its result's shape.
      times: executions.
      bytes: bytes that one execution moves.
      flops: FLOPs of its products.
      dtype: dtype of their operands; "" without products.
    """

    name: str
    shape: str
    times: int
    bytes: int
    flops: int
    dtype: str

    @property
    def seconds(self) -> float:
        """The least seconds of all executions."""
        computing = self.flops / FLOPS_PER_S.get(self.dtype, math.inf)
        return self.times * (LAUNCH_S + max(self.bytes / BYTES_PER_S, computing))


def kernels(program: Program) -> list[Kernel]:
    """Returns the kernels of a program, the longest first."""
    found = []
    for place, one, times, _ in program.executed:
        if one.opcode not in FREE:
            around = program.computations[place]
            inside = program.computations[one.called[0]] if one.opcode == "fusion" else {}
            moved = fused_bytes(one, inside) if inside else plain_bytes(one, around)
            products = [product(i, inside) for i in inside.values() if i.opcode == "dot"] or [product(one, around)]
            flops, dtype = sum(n for n, _ in products), products[0][1]
            found.append(Kernel(name=one.name, shape=one.shape, times=times, bytes=moved, flops=flops, dtype=dtype))
    return sorted(found, key=lambda kernel: -kernel.seconds)


def size(shape: str) -> int:
    return sum(bytes_of(shape))


def plain_bytes(one: Instruction, around: Mapping[str, Instruction]) -> int:
    """Returns the bytes that an instruction outside fusions moves."""
    operands = [size(around[name].shape) for name in one.operands if name in around]
    if one.opcode in SLICES:
        return 2 * size(one.shape)
    if one.opcode == "dynamic-update-slice":
        return 2 * operands[1]
    return sum(operands) + size(one.shape)


def fused_bytes(one: Instruction, inside: Mapping[str, Instruction]) -> int:
    """Returns the bytes that a fusion moves."""
    total = size(one.shape)
    for update in (i for i in inside.values() if i.opcode in ("dynamic-update-slice", "scatter")):
        whole, part = size(update.shape), inside.get(update.operands[1 if update.opcode != "scatter" else -1])
        if part is not None and whole <= total:
            total += size(part.shape) - whole
    return total + sum(read(name, i, inside) for name, i in inside.items() if i.opcode == "parameter")


def read(name: str, one: Instruction, inside: Mapping[str, Instruction]) -> int:
    """Returns the bytes that a fusion reads of a parameter."""
    found = 0
    for user in (i for i in inside.values() if name in i.operands):
        if user.opcode in SLICES:
            found += size(user.shape)
        elif user.opcode in ("bitcast", "reshape"):
            found += read(user.name, user, inside)
        elif user.opcode not in ("dynamic-update-slice", "scatter") or user.operands[0] != name:
            return size(one.shape)
    return min(found, size(one.shape))


def product(one: Instruction, around: Mapping[str, Instruction]) -> tuple[int, str]:
    """Returns the FLOPs of an instruction that is a product, and the dtype of its operands; 0 and "" of others."""
    contracted = _CONTRACTED.search(one.rest)
    left = around.get(one.operands[0]) if contracted and one.operands else None
    if contracted is None or left is None:
        return 0, ""
    sizes, result = (dimensions(shape) for shape in (left.shape, one.shape))
    summed = math.prod(sizes[int(i)] for i in contracted[1].replace('"', "").split(",") if i)
    return 2 * math.prod(result) * summed, left.shape.split("[")[0]


def dimensions(shape: str) -> list[int]:
    """Returns the sizes of the first array of a shape as HLO writes it."""
    found = re.search(r"\w\[([\d,]*)\]", shape)
    return [int(n) for n in found[1].split(",") if n] if found else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hlo", type=Path, help="the text of the optimized program")
    parser.add_argument("--largest", type=int, default=0, help="kernels that are listed")
    given = parser.parse_args()
    found = kernels(Program(given.hlo.read_text()))
    total = {"s": sum(k.seconds for k in found), "gb": sum(k.times * k.bytes for k in found) / 1e9}
    print(json.dumps({n: round(x, 4) for n, x in total.items()} | {"kernels": sum(k.times for k in found)}))
    for k in found[: given.largest]:
        print(
            f"{k.seconds * 1e3:9.2f} ms {k.times:6d} x {k.bytes / 1e9:7.3f} GB {k.flops / 1e9:9.1f} GF {k.dtype:5s}{k.name} {k.shape}"
        )


if __name__ == "__main__":
    main()
