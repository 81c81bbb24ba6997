"""token_stats on TPU by two Pallas kernels: running sums, and the logits' gradient a buffer at a time.

Grid: blocks of tokens (independent), blocks of the vocabulary, pieces of the width. Products add up in a float32 block
of VMEM; after the last piece the block of logits z ends in one of

    sums       z -> max z, sum e, sum e x, (sum e^2), x = (z - max) / temperature, e = exp x: a row of VMEM a token
    gradients  z -> dz of `fused`, bfloat16, to a buffer of some blocks of the vocabulary; XLA then takes dz @ head into a
               float32 sum and dz.T @ hidden, and the buffer is used again

FLOPs: 2 T D V forward, 6 T D V backward. HBM: the head is read once a block of tokens; dz is written once and read twice.
Tested in interpret mode and lowered for TPU on a CPU; not run on TPU hardware.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt32

from jaxrl_llm.kernels.token_stats import fused
from jaxrl_llm.kernels.token_stats.definition import Call
from jaxrl_llm.kernels.token_stats.fused import FLOOR, Inputs, Tree

LANES = 128


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of the kernels' blocks.

    Attributes:
      rows: tokens of a block, a multiple of 16.
      columns: vocabulary entries of a block, a multiple of 128.
      depth: most columns of hidden states and head that are moved at once.
      buffer: bytes of the logits' gradient in HBM.
      vmem: bytes of VMEM that a kernel may use; the blocks and their successors on their way need about half of it.
    """

    rows: int = 512
    columns: int = 1024
    depth: int = 2048
    buffer: int = 128 * 2**20
    vmem: int = 48 * 2**20

    def __post_init__(self) -> None:
        """Refuses blocks that the compiler cannot lay out."""
        if self.rows % 16 or self.columns % LANES:
            raise ValueError(f"rows must be a multiple of 16 and columns of {LANES} (got {self})")

    def piece(self, width: int) -> int:
        """Columns moved at once: the whole width, else its largest divisor of at most `depth` that fills lanes, else 0."""
        if width <= self.depth:
            return width
        return next((n for n in range(self.depth // LANES * LANES, 0, -LANES) if width % n == 0), 0)


TILES = Tiles()


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if call.platform != "tpu":
        return f"it runs on TPUs (got {call.platform})"
    if reason := fused.refusal(call):
        return reason
    if not TILES.piece(call.width):
        return f"a width beyond {TILES.depth} must be a multiple of {LANES} (got {call.width})"
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
    """Returns the statistics named by `call.outputs`, as `reference` states them."""
    return fused.compute(Kernels(tiles=TILES), (hidden, head, targets), bias, words, call, mesh)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The two passes of `fused`'s backends.

    Attributes:
      tiles: sizes of the kernels' blocks.
      interpret: run the kernels on a CPU.
    """

    tiles: Tiles
    interpret: bool = False

    def forward(self, inputs: Inputs, call: Call) -> tuple[dict[str, jax.Array], None]:
        """Returns the sums over the shard's vocabulary of each token."""
        names = ["maximum", "total", "first", *(["square"] if "sum_p2" in call.outputs else [])]
        out = self._run(inputs, (), call, names)
        sums = {name: x[: call.tokens, 0] for name, x in zip(names, out)}
        if "logprob" in call.outputs:
            sums["target"] = fused.target_logits(inputs, call.vocabulary)
        if "uniform_logprob" in call.outputs:
            # A bias is 0, or the -inf of a mesh's padding.
            head = inputs.head if inputs.finite is None else jnp.where(inputs.finite[:, None], inputs.head, 0)
            sums["logit_sum"] = fused.logit_sums(inputs.hidden, head)
        return sums, None

    def backward(
        self, inputs: Inputs, rows: Tree, saved: None, call: Call, dhead: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns the gradients of hidden (float32), head (put into `dhead`) and bias (0: a mesh's padding)."""
        names = tuple(rows)
        targets = (inputs.targets - inputs.first_entry)[:, None]
        numbers = jnp.stack([rows[name] for name in names], axis=1)

        def add(first: Any, entries: int, carry: Any) -> Any:
            dhidden, dhead = carry
            dz = self._run(inputs, names, call, (first, entries), (numbers, targets))[: call.tokens, :entries]
            weights = lax.dynamic_slice_in_dim(inputs.head, first, entries).astype(dz.dtype)
            dhidden += lax.dot_general(dz, weights, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
            dw = lax.dot_general(dz, inputs.hidden, (((0,), (0,)), ((), ())), preferred_element_type=dhead.dtype)
            return dhidden, fused.put(dhead, dw, first, call)

        carry = jnp.zeros(inputs.hidden.shape, jnp.float32), dhead
        most = self.tiles.buffer // (call.tokens * 2)
        dhidden, dhead = fused.over_buffers(add, carry, call.vocabulary, self.tiles.columns, most)
        return dhidden, dhead, None if inputs.bias is None else jnp.zeros(call.vocabulary, jnp.float32)

    def _run(self, inputs: Inputs, names: Any, call: Call, out: Any, numbers: tuple[jax.Array, ...] = ()) -> Any:
        """Returns the kernel of the sums named `out`, or of dz of `out` = (first entry, entries)."""
        tiles, width = self.tiles, call.width
        piece = tiles.piece(width)
        hidden = jnp.pad(inputs.hidden, ((0, -call.tokens % tiles.rows), (0, 0)))
        numbers = tuple(jnp.pad(x, ((0, hidden.shape[0] - x.shape[0]), (0, 0))) for x in numbers)
        first, entries = (0, call.vocabulary) if not numbers else out
        start = jnp.reshape(jnp.int32(first) // tiles.columns, 1)
        steps = width // piece
        grid = hidden.shape[0] // tiles.rows, pl.cdiv(entries, tiles.columns), steps
        row = functools.partial(pl.BlockSpec, index_map=lambda t, v, d, start: (t, 0))
        bias = [] if inputs.bias is None else [inputs.bias[None, :]]
        place = functools.partial(_Place, call=call, tiles=tiles, steps=steps, biased=bool(bias))
        scratch = [pltpu.VMEM((tiles.rows, tiles.columns), jnp.float32)]
        if numbers:
            body = functools.partial(_gradients, place, names)
            out_shape: Any = jax.ShapeDtypeStruct((hidden.shape[0], grid[1] * tiles.columns), hidden.dtype)
            out_specs: Any = pl.BlockSpec((tiles.rows, tiles.columns), lambda t, v, d, start: (t, v))
        else:
            body = functools.partial(_sums, place, len(out))
            out_shape = [jax.ShapeDtypeStruct((hidden.shape[0], LANES), jnp.float32)] * len(out)
            out_specs = [row((tiles.rows, LANES))] * len(out)
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[
                pl.BlockSpec((tiles.rows, piece), lambda t, v, d, start: (t, d)),
                pl.BlockSpec((tiles.columns, piece), lambda t, v, d, start: (start[0] + v, d)),
                *(pl.BlockSpec((1, tiles.columns), lambda t, v, d, start: (0, start[0] + v)) for _ in bias),
                *(row((tiles.rows, x.shape[1])) for x in numbers),
            ],
            out_specs=out_specs,
            scratch_shapes=scratch,
        )
        run: Callable[..., Any] = pl.pallas_call(
            body,
            out_shape=out_shape,
            grid_spec=spec,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=tiles.vmem
            ),
            interpret=self.interpret,
        )
        return run(start, hidden, inputs.head.astype(hidden.dtype), *bias, *numbers)


@dataclass(frozen=True)
class _Place:
    """The part of the kernels that makes a block of logits; the arguments are the kernel's references."""

    start: Any
    hidden: Any
    head: Any
    rest: Any
    call: Call
    tiles: Tiles
    steps: int
    biased: bool
    # The grid's indices are read where the kernel begins: a branch cannot.
    block: Any = field(default_factory=lambda: pl.program_id(1))
    piece: Any = field(default_factory=lambda: pl.program_id(2))

    def first_column(self) -> Any:
        return (self.start[0] + self.block) * self.tiles.columns

    def add_piece(self, sums: Any) -> None:
        """Adds the products of one piece of the width to the block of logits."""
        products = lax.dot_general(
            self.hidden[...], self.head[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )

        @pl.when(self.piece == 0)
        def _first() -> None:
            sums[...] = products

        @pl.when(self.piece > 0)
        def _next() -> None:
            sums[...] += products

    def inside(self) -> Any:
        """Returns True at the entries of the vocabulary; the last block may reach beyond it."""
        column = lax.broadcasted_iota(jnp.int32, (self.tiles.rows, self.tiles.columns), 1)
        return self.first_column() + column < self.call.vocabulary

    def logits(self, sums: Any) -> Any:
        z = sums[...]
        if self.biased:
            z = z + self.rest[0][...]
        return jnp.where(self.inside(), jnp.maximum(z, FLOOR), FLOOR)


def _sums(place: Any, number: int, start: Any, hidden: Any, head: Any, *refs: Any) -> None:
    here = place(start, hidden, head, refs)
    out, sums = refs[-number - 1 : -1], refs[-1]
    here.add_piece(sums)
    scale = 1 / here.call.temperature

    @pl.when((here.block == 0) & (here.piece == 0))
    def _start() -> None:
        for i, x in enumerate(out):
            x[...] = jnp.full(x.shape, 0.0 if i else FLOOR, jnp.float32)

    @pl.when(here.piece == here.steps - 1)
    def _end() -> None:
        z = here.logits(sums)
        before, total, first = (x[:, :1] for x in out[:3])
        maximum = jnp.maximum(before, z.max(axis=1, keepdims=True))
        shift = (before - maximum) * scale
        factor = jnp.exp(shift)
        x = (z - maximum) * scale
        e = jnp.exp(x)
        new = [
            maximum,
            total * factor + e.sum(axis=1, keepdims=True),
            (first + shift * total) * factor + (e * x).sum(axis=1, keepdims=True),
        ]
        if number > 3:
            new.append(out[3][:, :1] * factor**2 + (e * e).sum(axis=1, keepdims=True))
        for ref, value in zip(out, new):
            ref[...] = jnp.broadcast_to(value, ref.shape)


def _gradients(place: Any, names: tuple[str, ...], start: Any, hidden: Any, head: Any, *refs: Any) -> None:
    here = place(start, hidden, head, refs)
    numbers, targets, dz, sums = refs[-4:]
    here.add_piece(sums)

    @pl.when(here.piece == here.steps - 1)
    def _end() -> None:
        c = {name: numbers[:, i : i + 1] for i, name in enumerate(names)}
        logp = (here.logits(sums) - c["maximum"]) * (1 / here.call.temperature) - c["log_total"]
        p = jnp.exp(logp)
        weight = c["constant"]
        if "slope" in c:
            weight = weight + c["slope"] * logp
        if "square" in c:
            weight = weight + c["square"] * p
        out = p * weight
        if "uniform" in c:
            out = out + c["uniform"]
        if "target" in c:
            column = here.first_column() + lax.broadcasted_iota(jnp.int32, out.shape, 1)
            out = out + jnp.where(column == targets[...], c["target"], 0.0)
        keep = here.inside()
        if here.biased:
            keep &= jnp.broadcast_to(here.rest[0][...] > FLOOR, out.shape)
        dz[...] = jnp.where(keep, out, 0.0).astype(dz.dtype)
