"""token_stats on TPU by two Pallas kernels: running sums, and the logits' gradient a buffer at a time.

Grid: blocks of tokens (independent) and blocks of the vocabulary; a block holds the whole width. Logits are computed as z.T = head @
hidden.T, a chunk of entries at a time, so that entries are along the sublanes and each number of a token is in one lane: nothing is
reduced or broadcast across lanes. A step of the grid is straight-line code in which the compiler overlaps the arithmetic of a chunk
with the products of the next. A chunk ends in one of

    sums       z -> max z, sum e, sum e x, (sum e^2), x = (z - max) / temperature, e = exp x; 8 running sums per token, one per
               sublane, which XLA merges after the last block
    gradients  z -> dz.T of `fused`, bfloat16, to a buffer of some blocks of the vocabulary; XLA then takes dz @ head into a
               float32 sum and dz.T @ hidden, and the buffer is reused

FLOPs: 2 T D V forward, 6 T D V backward. HBM: the head is read once per block of tokens; dz is written once and read twice. It is
tested in interpret mode and compiled for TPUs without one (`kernels.tpu_cycles`), and was not run on TPU hardware.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt32

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.token_stats import fused
from jaxrl_llm.kernels.token_stats.definition import Call
from jaxrl_llm.kernels.token_stats.fused import FLOOR, Inputs, Tree

RUNS_ON = ("tpu", "TPUs")
LANES, SUBLANES = 128, 8
# Most entries and tokens of one product of the sums, and entries of one of the gradients, which takes all tokens of the block: sizes
# that the compiler overlaps best, by its own estimate.
CHUNK, GROUP = 256, 256
GRADIENT_CHUNK = 512
STRIP = 32  # entries whose gradients are in registers at once
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
MIB = 2**20
# By the beginning of a device's kind: bytes of VMEM for a kernel (the chips have 128, 64, 64, 128 and, any other, at least 16 MiB; XLA
# keeps arrays in the rest), and the most tokens of a block. A head's entry is read once per block of tokens: v6e computes 560 FLOP in
# the time of a byte, the others at most 240.
CHIPS = {
    "TPU v6": (48 * MIB, 1024),
    "TPU v5p": (24 * MIB, 512),
    "TPU v5": (24 * MIB, 512),
    "TPU v5 lite": (48 * MIB, 512),
}
OTHER_CHIP = (10 * MIB, 512)
# Most elements of a block of the head, since the straight-line code, and the time to compile it, grow with them.
ELEMENTS = 2816 * 1024


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of the kernels' blocks.

    Attributes:
      rows: tokens of a block, a multiple of 128.
      columns: vocabulary entries of a block, a multiple of 128.
      buffer: bytes of the logits' gradient in HBM.
      vmem: bytes of VMEM that a kernel may use; the rest is XLA's.
    """

    rows: int = 512
    columns: int = 512
    buffer: int = 128 * MIB
    vmem: int = 10 * MIB

    def __post_init__(self) -> None:
        """Refuses blocks that the compiler cannot lay out."""
        if self.rows % LANES or self.columns % LANES:
            raise ValueError(f"rows and columns must be multiples of {LANES} (got {self})")

    @classmethod
    def of(cls, kind: str, tokens: int, width: int) -> "Tiles | None":
        """Returns the largest blocks of the chip `kind` that hold the whole width, or None where none does."""
        name = max((name for name in CHIPS if kind.startswith(name)), key=len, default=None)
        memory, most = CHIPS[name] if name else OTHER_CHIP
        most = min(most, -(-tokens // LANES) * LANES)
        for rows in (most, 512, 256, 128):
            for columns in (1024, 512, 256, 128):
                tiles = cls(rows=rows, columns=columns, vmem=memory)
                small = columns * width <= ELEMENTS or columns == LANES
                if rows <= most and small and tiles.taken(width) <= tiles.vmem:
                    return tiles
        return None

    def taken(self, width: int) -> int:
        """Returns the bytes of VMEM of both kernels' blocks, of those in flight, and of logits with as much again for spilled registers."""
        blocks = 2 * (self.rows + self.columns) * width + 2 * self.columns * self.rows
        return 2 * blocks + 3 * 4 * min(GRADIENT_CHUNK, self.columns) * self.rows


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if reason := fused.refusal(call):
        return reason
    if Tiles.of(dispatch.device().device_kind, call.tokens, call.width) is None:
        return f"no block of width {call.width} fits the VMEM of {dispatch.device().device_kind}"
    return None


def compute(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " T"],
    bias: Float[Array, " V"] | None,
    words: UInt32[Array, "2"],
    call: Call,
    mesh: jax.sharding.Mesh | None = None,
) -> dict[str, Float[Array, " T"]]:
    """Returns the statistics named by `call.outputs`, as defined in `reference`."""
    tiles = Tiles.of(dispatch.device().device_kind, call.tokens, call.width)
    if tiles is None:
        raise ValueError(refusal(call))
    return fused.compute(Kernels(tiles=tiles), (hidden, head, targets), bias, words, call, mesh)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The two passes of `fused`'s backends.

    Attributes:
      tiles: sizes of the kernels' blocks.
      interpret: whether the kernels run in interpret mode, on a CPU.
    """

    tiles: Tiles
    interpret: bool = False

    def forward(self, inputs: Inputs, call: Call) -> tuple[dict[str, jax.Array], None]:
        """Returns the sums over the shard's vocabulary of each token."""
        names = ["maximum", "total", "first", *(["square"] if "sum_p2" in call.outputs else [])]
        sums = dict(zip(names, self._run(inputs, call, names=tuple(names))))
        sums["first"] *= LN2
        maximum = sums["maximum"].max(axis=0)
        merged = jax.vmap(lambda own: fused.rescale(own, maximum, call))(sums)
        sums = {name: maximum if name == "maximum" else merged[name].sum(axis=0) for name in names}
        sums = {name: x[: call.tokens] for name, x in sums.items()}
        if "logprob" in call.outputs:
            sums["target"] = fused.target_logits(inputs, call.vocabulary)
        if "uniform_logprob" in call.outputs:
            # A bias is 0, or -inf in a mesh's padding.
            head = inputs.head if inputs.finite is None else jnp.where(inputs.finite[:, None], inputs.head, 0)
            sums["logit_sum"] = fused.logit_sums(inputs.hidden, head)
        return sums, None

    def backward(
        self, inputs: Inputs, rows: Tree, saved: None, call: Call, dhead: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns the gradients of hidden (float32), head (written into `dhead`) and bias (0, in a mesh's padding)."""
        names = tuple(rows)
        targets = (inputs.targets - inputs.first_entry)[None]
        numbers = jnp.stack([rows[name] for name in names]), targets

        def add(first: Any, entries: int, carry: Any) -> Any:
            dhidden, dhead = carry
            dz = self._run(inputs, call, names, (first, entries), numbers)[:entries, : call.tokens]
            weights = lax.dynamic_slice_in_dim(inputs.head, first, entries).astype(dz.dtype)
            dhidden += lax.dot_general(dz, weights, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
            dw = lax.dot_general(dz, inputs.hidden, (((1,), (0,)), ((), ())), preferred_element_type=dhead.dtype)
            return dhidden, fused.put(dhead, dw, first, call)

        carry = jnp.zeros(inputs.hidden.shape, jnp.float32), dhead
        most = self.tiles.buffer // (call.tokens * 2)
        dhidden, dhead = fused.over_buffers(add, carry, call.vocabulary, self.tiles.columns, most)
        return dhidden, dhead, None if inputs.bias is None else jnp.zeros(call.vocabulary, jnp.float32)

    def _run(
        self,
        inputs: Inputs,
        call: Call,
        names: tuple[str, ...],
        part: tuple[Any, int] | None = None,
        numbers: tuple[jax.Array, ...] = (),
    ) -> Any:
        """Runs the kernel of the sums `names`, [8, T] each, or of dz.T of `part` = (first entry, entries) by the `numbers` with these names."""
        tiles, rows, columns = self.tiles, self.tiles.rows, self.tiles.columns
        hidden = jnp.pad(inputs.hidden, ((0, -call.tokens % rows), (0, 0)))
        numbers = tuple(jnp.pad(x, ((0, 0), (0, hidden.shape[0] - x.shape[1]))) for x in numbers)
        first, entries = part or (0, call.vocabulary)
        last = pl.cdiv(call.vocabulary, columns) - 1
        # A mesh pads the vocabulary at its end, with a bias of -inf.
        bound = jnp.int32(call.vocabulary) if inputs.finite is None else inputs.finite.sum(dtype=jnp.int32)
        scalars = jnp.stack([jnp.int32(first) // columns, bound])
        step = functools.partial(_Step, call=call, tiles=tiles, last=last, padded=inputs.finite is not None)
        if part:
            body: Any = functools.partial(_gradients, step, names)
            out_shape: Any = jax.ShapeDtypeStruct((entries, hidden.shape[0]), hidden.dtype)
            out_specs: Any = pl.BlockSpec((columns, rows), lambda t, v, _: (v, t))
        else:
            body = functools.partial(_sums, step)
            out_shape = [jax.ShapeDtypeStruct((SUBLANES, hidden.shape[0]), jnp.float32)] * len(names)
            out_specs = [pl.BlockSpec((SUBLANES, rows), lambda t, v, _: (0, t))] * len(names)
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(hidden.shape[0] // rows, pl.cdiv(entries, columns)),
            in_specs=[
                pl.BlockSpec((rows, call.width), lambda t, v, _: (t, 0)),
                pl.BlockSpec((columns, call.width), lambda t, v, s: (jnp.minimum(s[0] + v, last), 0)),
                *(pl.BlockSpec((x.shape[0], rows), lambda t, v, _: (0, t)) for x in numbers),
            ],
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM((math.gcd(GRADIENT_CHUNK if part else CHUNK, columns), rows), jnp.float32)] * 2,
        )
        run: Callable[..., Any] = pl.pallas_call(
            body,
            out_shape=out_shape,
            grid_spec=spec,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=tiles.vmem
            ),
            interpret=self.interpret,
        )
        return run(scalars, hidden, inputs.head.astype(hidden.dtype), *numbers)


@dataclass(frozen=True)
class _Step:
    """One step of the grid, with the chunks of logits that it computes; the arguments are the kernel's references."""

    scalars: Any
    hidden: Any
    head: Any
    logits: tuple[Any, Any]
    call: Call
    tiles: Tiles
    last: int
    padded: bool

    def each(self, take: Callable[[Any, int, int, Any], None], *, group: int, floor: bool) -> None:
        """Calls `take(z, first column, first token, first entry)` for each chunk and 128 tokens.

        Args:
          take: receives the reference of a chunk's logits [entries, tokens].
          group: tokens of one product.
          floor: whether entries beyond the vocabulary are set to FLOOR.
        """
        rows, columns, chunk = self.tiles.rows, self.tiles.columns, self.logits[0].shape[0]
        block = self.scalars[0] + pl.program_id(1)

        @pl.when(block <= self.last)
        def _inside() -> None:
            for number, column in enumerate(range(0, columns, chunk)):
                entry = block * columns + column
                z = self.logits[number % 2]
                for token in range(0, rows, group):
                    place = pl.ds(0, chunk), pl.ds(token, group)
                    x = lax.dot_general(
                        self.head[pl.ds(column, chunk), :],
                        self.hidden[pl.ds(token, group), :],
                        (((1,), (1,)), ((), ())),
                        preferred_element_type=jnp.float32,
                    )
                    if floor:
                        index = lax.broadcasted_iota(jnp.int32, x.shape, 0)
                        x = jnp.where(index < self.scalars[1] - entry, x, FLOOR)
                    z[place] = x
                    for lane in range(token, token + group, LANES):
                        take(z, column, lane, entry)


def _after(earlier: list[Any], x: Any) -> Any:
    """Returns `x`, such that the compiler sees a dependency on `earlier`, numbers that are never negative.

    Otherwise it begins the arithmetic of all tokens at once, for which there are not enough registers.
    """
    return jnp.where(earlier[-1] < -1.0, earlier[-1], x) if earlier else x


def _sums(step: Any, scalars: Any, hidden: Any, head: Any, *refs: Any) -> None:
    here = step(scalars, hidden, head, refs[-2:])
    out, k = refs[:-2], LOG2E / here.call.temperature
    start = pl.program_id(1) == 0
    earlier: list[Any] = []

    def take(z: Any, column: int, token: int, entry: Any) -> None:
        place = pl.ds(0, SUBLANES), pl.ds(token, LANES)
        strips = [(pl.ds(i, SUBLANES), pl.ds(token, LANES)) for i in range(0, z.shape[0], SUBLANES)]
        before, total, first, *square = (
            jnp.where(start, 0.0 if i else FLOOR, x[place]) if column == 0 else x[place] for i, x in enumerate(out)
        )
        before = _after(earlier, before)
        maximum = before
        for strip in strips:
            maximum = jnp.maximum(maximum, z[strip])
        shift = (before - maximum) * k
        factor = jnp.exp2(shift)
        first = (first + shift * total) * factor
        total = total * factor
        square = [x * factor**2 for x in square]
        for strip in strips:
            x = (z[strip] - maximum) * k
            e = jnp.exp2(x)
            total, first = total + e, first + e * x
            square = [q + e * e for q in square]
        earlier[:] = [total]
        for ref, value in zip(out, (maximum, total, first, *square)):
            ref[place] = value

    here.each(take, group=math.gcd(here.tiles.rows, GROUP), floor=True)


def _gradients(step: Any, names: tuple[str, ...], scalars: Any, hidden: Any, head: Any, *refs: Any) -> None:
    here = step(scalars, hidden, head, refs[-2:])
    numbers, targets, dz = refs[:3]
    k = LOG2E / here.call.temperature
    earlier: list[Any] = []

    def take(z: Any, column: int, token: int, entry: Any) -> None:
        lanes = pl.ds(token, LANES)
        strip = math.gcd(z.shape[0], STRIP)
        c = {name: jnp.broadcast_to(numbers[i : i + 1, lanes], (strip, LANES)) for i, name in enumerate(names)}
        target = jnp.broadcast_to(targets[:, lanes], (strip, LANES)) - entry
        log_total, slope = c["log_total"] * LOG2E, c.get("slope", 0.0) * LN2
        maximum = _after(earlier, c["maximum"])
        index = lax.broadcasted_iota(jnp.int32, (strip, LANES), 0)
        for i in range(0, z.shape[0], strip):
            logp = (z[pl.ds(i, strip), lanes] - maximum) * k - log_total
            p = jnp.exp2(logp)
            weight = c["constant"]
            if "slope" in c:
                weight = weight + slope * logp
            if "square" in c:
                weight = weight + c["square"] * p
            out = p * weight
            if "uniform" in c:
                out = out + c["uniform"]
            if "target" in c:
                out = jnp.where(index + i == target, out + c["target"], out)
            if here.padded:
                out = jnp.where(index + i < here.scalars[1] - entry, out, 0.0)
            dz[pl.ds(column + i, strip), lanes] = out.astype(dz.dtype)
        earlier[:] = [p]

    here.each(take, group=here.tiles.rows, floor=False)
