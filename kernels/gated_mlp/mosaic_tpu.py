"""gated_mlp on TPU by one Pallas kernel: gate and up are made again beside the gradient of what they are gated to, and never lie in HBM.

Grid: blocks of tokens and blocks of the gated width; a block holds the whole width of the input. A step makes three products of a
chunk of its tokens after the other, so that the compiler puts what lies between products and results beneath the next chunk's products.

FLOPs: 6 N D M. HBM: the weights are read once a block of tokens, the three results are written once. XLA, which would write gate
and up and read them back, takes 1.8 times as long by the compiler's estimate (docs/measured/topologies.md).
Tested in interpret mode and compiled for TPUs without one (`kernels.tpu_cycles`); not run on TPU hardware.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.gated_mlp.api import Call
from jaxrl_llm.kernels.gated_mlp.xla import between

RUNS_ON = ("tpu", "TPUs")
LANES = 128
UNIT = 256  # tokens of the smallest block, and columns of each
MIB = 2**20
# By the beginning of a device's kind: bytes of VMEM for the kernel, and the fewest and the most tokens of a block. Weights are read once a
# block of tokens, so a block has as many FLOPs a byte as tokens; v6e multiplies 560 in the time of a byte, v5p 166. Fewer than 512 are no two chunks.
CHIPS = {
    "TPU v6": (48 * MIB, 512, 2048),
    "TPU v5p": (24 * MIB, 512, 1024),
    "TPU v5": (24 * MIB, 512, 1024),
    "TPU v5 lite": (0, 0, 0),  # not tried
}


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of the kernel's blocks.

    Attributes:
      rows: tokens of a block.
      columns: gated values of a block.
      chunk: tokens of one product; it divides `rows`.
      vmem: bytes of VMEM that the kernel may use.
    """

    rows: int
    columns: int = UNIT
    chunk: int
    vmem: int = 48 * MIB

    @classmethod
    def of(cls, kind: str, tokens: int, width: int) -> "Tiles | None":
        """The largest blocks of the chip `kind` that divide the tokens, or None where none fits that memory does not bound."""
        name = max((name for name in CHIPS if kind.startswith(name)), key=len, default=None)
        memory, least, most = CHIPS[name] if name else (0, 0, 0)
        for rows in range(most, max(least, UNIT) - 1, -UNIT):
            tiles = cls(rows=rows, chunk=UNIT if rows % (2 * UNIT) or rows == 2 * UNIT else 2 * UNIT, vmem=memory)
            if tokens % rows == 0 and tiles.taken(width) <= memory:
                return tiles
        return None

    def taken(self, width: int) -> int:
        """Bytes of VMEM of the blocks, of those on their way, and of two chunks' products."""
        blocks = 2 * (2 * self.rows + 3 * self.columns) * width + 2 * 3 * self.rows * self.columns
        return 2 * blocks + 2 * 3 * 4 * self.chunk * self.columns


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    kind = dispatch.device().device_kind
    if call.dtype != "bfloat16":
        return f"it takes bfloat16 (got {call.dtype})"
    if call.width % LANES or call.inner % LANES:
        return f"widths must be multiples of {LANES} (got {call.width} and {call.inner})"
    if call.tokens % UNIT:
        return f"a device's tokens must be a multiple of {UNIT} (got {call.tokens})"
    if Tiles.of(kind, call.tokens, call.width) is None:
        return f"no block of {call.tokens} tokens of width {call.width} fits the VMEM of {kind} and pays for its weights, or none was tried there"
    return None


def gradients(
    x: Any, g: Any, gate: Any, up: Any, down: Any, *, tiles: Tiles | None = None, interpret: bool = False
) -> Any:
    """Computes `api.gradients`; `tiles` stand in place of the device's own, and `interpret` runs the kernel on a CPU."""
    (tokens, width), inner = x.shape, gate.shape[1]
    tiles = tiles or Tiles.of(dispatch.device().device_kind, tokens, width)
    assert tiles is not None, "the backend was not asked whether it takes the call"
    rows, columns = tiles.rows, tiles.columns
    own = pl.BlockSpec((rows, width), lambda t, m: (t, 0))
    inputs = pl.BlockSpec((width, columns), lambda t, m: (0, m))
    return pl.pallas_call(
        functools.partial(_kernel, chunk=tiles.chunk),
        out_shape=[jax.ShapeDtypeStruct((tokens, inner), x.dtype)] * 3,
        grid=(tokens // rows, pl.cdiv(inner, columns)),
        in_specs=[own, own, inputs, inputs, inputs],
        out_specs=[pl.BlockSpec((rows, columns), lambda t, m: (t, m))] * 3,
        scratch_shapes=[pltpu.VMEM((tiles.chunk, columns), jnp.float32)] * 6,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=tiles.vmem
        ),
        interpret=interpret,
    )(x, g, gate, up, down.T)  # so it lies where devices gathered it by its width, and no copy turns it


def _kernel(x: Any, g: Any, gate: Any, up: Any, down: Any, *refs: Any, chunk: int) -> None:
    out, scratch = refs[:3], refs[3:]
    operands = ((x, gate), (x, up), (g, down))
    for number, first in enumerate(range(0, x.shape[0], chunk)):
        here = pl.ds(first, chunk)
        products = scratch[3 * (number % 2) :][:3]
        for product, (rows, weights) in zip(products, operands):
            product[...] = lax.dot_general(
                rows[here, :], weights[...], (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
        rounded = (product[...].astype(x.dtype).astype(jnp.float32) for product in products)
        for ref, value in zip(out, between(*rounded)):
            ref[here, :] = value.astype(ref.dtype)
