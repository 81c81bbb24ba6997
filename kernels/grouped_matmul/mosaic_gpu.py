"""grouped_matmul on Hopper by two Pallas Mosaic GPU kernels: products of rows and weights, and gradients of weights.

Both are one stream of tiles on a persistent grid of clusters that take items in turn. In a block one warpgroup copies pieces of both
operands to shared memory by TMA (the second operand's once per cluster), and two multiply them by wgmma, rows x columns float32 in
registers each, and write a finished tile through shared memory while the next pieces arrive. For few rows a block may have one
warpgroup that multiplies.

    products   an item is a block of the buffer's rows, which one expert has, and some columns of one of the weights; the items of a block
               follow each other, so that its rows and its expert's weights are in the L2 cache. W^T is W read
               transposed from shared memory. With `gated` a tile has the same columns of g and of u, and silu(g) u
               leaves with them.
    gradients  an item is an expert, some columns of x and some of dy, over all rows of the expert; x is read
               transposed from shared memory. An expert without rows writes zeros.

Time grows with the blocks in use instead of the buffer. Nothing is summed across items, so that every result has the same bits each time.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.grouped_matmul import definition, triton_rows
from jaxrl_llm.kernels.grouped_matmul.definition import Blocks, Call, Plan

LOG2E = math.log2(math.e)
RUNS_ON = ("gpu", "NVIDIA Hopper GPUs")
SHARED_BYTES = 232448  # shared memory of one block on Hopper
UNIT = 128  # the widths must be multiples of this


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of the kernels' tiles.

    Attributes:
      rows: rows of a warpgroup's tile of the result.
      warpgroups: number of warpgroups of a block that multiply, 1 or 2; their tiles are one above the other.
      columns: columns of a tile.
      depth: entries of the contracted axis that are copied and multiplied at once.
      stages: number of pieces of `depth` in flight or in use.
      cluster: blocks that share the second operand's pieces, 1 or 2.
      slice_bytes: bytes of a row that are written at once.
      buffers: most slices of a warpgroup that are being written.
      multiprocessors: number of the chip's multiprocessors; None asks the device.
    """

    rows: int = 64
    warpgroups: int = 2
    columns: int = 256
    depth: int = 64
    stages: int = 4
    cluster: int = 2
    slice_bytes: int = 128
    buffers: int = 2
    multiprocessors: int | None = None

    def __post_init__(self) -> None:
        """Refuses tiles that wgmma cannot take or that exceed shared memory."""
        if self.rows % 64 or self.columns not in (128, 256) or self.rows * self.columns > 2**14:
            raise ValueError(f"rows must be a multiple of 64, columns 128 or 256, both at most 16384 (got {self})")
        if not {self.cluster, self.warpgroups} <= {1, 2} or self.depth % 64 or self.slice_bytes not in (32, 64, 128):
            raise ValueError(
                f"cluster and warpgroups must be 1 or 2, depth a multiple of 64, slice_bytes 32 to 128 (got {self})"
            )
        stage = 2 * self.depth * (self.height + self.columns)
        used = self.stages * stage + self.buffers * self.height * self.slice_bytes + 1024
        if used > SHARED_BYTES:
            raise ValueError(f"{self} needs {used} bytes of shared memory of {SHARED_BYTES}: use fewer stages")

    @property
    def height(self) -> int:
        """The number of rows of the result that a block computes at once."""
        return self.warpgroups * self.rows

    @property
    def block(self) -> int:
        """The number of rows of the result that a cluster computes at once."""
        return self.cluster * self.height

    @property
    def clusters(self) -> int:
        """The number of clusters of the grid."""
        chip = self.multiprocessors or dispatch.device().core_count
        return max(chip // self.cluster, 1)

    def fitting(self, columns: int, rows: int = 0) -> "Tiles":
        """Returns tiles whose columns divide `columns`, and whose clusters' rows divide `rows`."""
        narrow = self if columns % self.columns == 0 else replace(self, columns=UNIT)
        return narrow if rows % self.block == 0 else replace(narrow, cluster=1)


# The default tiles: clusters share weights where an expert has the rows of several blocks. Where most have less than one, as in decoding,
# a block has half as many rows and its time is that of reading weights.
MANY, FEW, LEAST = Tiles(), Tiles(cluster=1), Tiles(cluster=1, warpgroups=1, stages=5)


def tiles_of(call: Call) -> Tiles:
    """Returns the tiles for the call's number of rows per expert."""
    if call.rows >= 2 * MANY.block * call.experts:
        return MANY
    return FEW if call.rows >= LEAST.block * call.experts else LEAST


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if dispatch.capability() != (9, 0):
        return f"it needs compute capability 9.0, Hopper (got {dispatch.device().compute_capability})"
    if call.dtype != "bfloat16":
        return f"it takes bfloat16 (got {call.dtype})"
    if call.width % UNIT or call.inner % UNIT:
        return f"the rows' and the experts' widths must be multiples of {UNIT} (got {call.width} and {call.inner})"
    return None


def block_rows(call: Call) -> int:
    """Returns the rows of a block of the buffer."""
    return tiles_of(call).block


def spread(x: Float[Array, "n D"], plan: Plan, call: Call) -> Float[Array, "P D"]:
    """Returns the buffer's rows of x; each row of x belongs to R / n consecutive rows of the call."""
    if len(plan.row) * x.shape[1] >= 2**31:
        return definition.spread(x, plan)  # the kernel's offsets are 32 bits
    return triton_rows.spread(x, plan)


def product(
    x: Float[Array, "P A"], w: Float[Array, "E ..."], blocks: Blocks, call: Call, *, transposed: bool = False
) -> Float[Array, "P B"]:
    """Returns x_p W of the row's expert with W [E, A, B], or x_p W^T with W [E, B, A] where `transposed`."""
    columns = w.shape[1 if transposed else 2]
    (y,) = products(x, [w], blocks, tiles_of(call).fitting(columns), transposed=transposed)
    return y


def gated(
    x: Float[Array, "P D"], gate_up: Float[Array, "E D M2"], blocks: Blocks, call: Call, *, keep: bool
) -> tuple[Float[Array, "P M"], Float[Array, "P M2"] | None]:
    """Returns silu(g) u, and where `keep` g and u side by side."""
    out = products(x, [gate_up], blocks, tiles_of(call), gate=True, keep=keep)
    return out[0], out[1] if keep else None


def weight_gradient(
    x: Float[Array, "P A"], dy: Float[Array, "P B"], blocks: Blocks, call: Call, dtype: jnp.dtype
) -> Float[Array, "E A B"]:
    """Returns sum_p x_p dy_p^T over the rows of each expert, summed in float32 and rounded once."""
    tiles = replace(tiles_of(call), cluster=2).fitting(dy.shape[1], rows=x.shape[1])
    return gradients(x, dy, blocks, tiles, jnp.dtype(dtype))


def products(
    x: jax.Array,
    weights: Sequence[jax.Array],
    blocks: Blocks,
    tiles: Tiles,
    *,
    transposed: bool = False,
    gate: bool = False,
    keep: bool = False,
) -> list[jax.Array]:
    """Returns x W of each of the weights; with `gate` and one W = [Wg, Wu], [silu(x Wg) (x Wu)] and, where `keep`, [x Wg, x Wu] side by side."""
    rows, width = x.shape
    columns = [w.shape[1 if transposed else 2] for w in weights]
    # The weights' tiles of columns follow each other.
    ends = list(itertools.accumulate(n // tiles.columns for n in columns))
    steps, count, half = width // tiles.depth, ends[-1], tiles.columns // 2

    def column(n: Any) -> list[tuple[Any, Any]]:
        """Returns for each of the weights whether tile n is one of its own, and that tile's first column."""
        firsts = [0, *ends]
        mine = [True] if len(weights) == 1 else [(n >= i) & (n < j) for i, j in zip(firsts, ends)]
        return [(here, (n - first) * tiles.columns) for here, first in zip(mine, firsts)]

    def body(expert: Any, used: Any, x: Any, *rest: Any) -> None:
        weights, rest = rest[: len(ends)], rest[len(ends) :]
        outputs, out, stream = rest[: len(shapes)], rest[len(shapes)], rest[len(shapes) + 1 :]

        def item(index: Any) -> tuple[Any, ...]:
            block = lax.div(index, count)
            return expert[block], block * tiles.block, lax.rem(index, count), 0, steps

        def pieces(of: Any, k: Any, rank: Any, slot: Any) -> list[_Piece]:
            e, row, n, *_ = of
            depth = pl.ds(k * tiles.depth, tiles.depth)
            mine = x.at[pl.ds(row + rank * tiles.height, tiles.height), depth]
            found = [_Piece(mine, stream[0].at[slot], False)]
            if gate:
                sides = [weights[0].at[e, depth, pl.ds(i * (columns[0] // 2) + n * half, half)] for i in (0, 1)]
                return found + [_Piece(side, stream[1].at[slot, i], True) for i, side in enumerate(sides)]
            for w, (here, first) in zip(weights, column(n)):
                part = pl.ds(first, tiles.columns)
                source = w.at[e, part, depth] if transposed else w.at[e, depth, part]
                found.append(_Piece(source, stream[1].at[slot], True, here))
            return found

        def operands(slot: Any, wg: Any) -> tuple[Any, list[Any]]:
            mine = stream[0].at[slot, pl.ds(wg * tiles.rows, tiles.rows)]
            if gate:
                return mine, [stream[1].at[slot, i] for i in (0, 1)]
            weights = stream[1].at[slot]
            return mine, [weights.transpose((1, 0)) if transposed else weights]

        def finish(z: Any, of: Any, row: Any, wg: Any) -> None:
            n, leave = of[2], _Leave(out, wg, pl.ds(of[1] + row, tiles.rows))
            wide = out.shape[-1]

            def whole(to: Any, first: Any) -> None:
                for j in range(0, tiles.columns, wide):
                    leave(z[0][:, j : j + wide], to, first + j)

            if not gate:
                for to, (here, first) in zip(outputs, column(n)):
                    _where(here, functools.partial(whole, to, first))
                return
            for j in range(0, half, wide):
                g, u = (side[:, j : j + wide] for side in z)
                leave(g * u / (1 + jnp.exp2(g * -LOG2E)), outputs[0], n * half + j)
                if keep:
                    leave(g, outputs[1], n * half + j)
                    leave(u, outputs[1], columns[0] // 2 + n * half + j)

        widths = (half, half) if gate else (tiles.columns,)
        work = _Work(item=item, pieces=pieces, operands=operands, finish=finish, widths=widths)
        _stream(tiles, used[0] * count, stream[2:], work)

    shapes = [columns[0] // 2, *(columns if keep else [])] if gate else columns
    out_types = [jax.ShapeDtypeStruct((rows, n), x.dtype) for n in shapes]
    second = (2, tiles.depth, half) if gate else (tiles.depth, tiles.columns)
    pieces = (tiles.height, tiles.depth), second[::-1] if transposed else second
    leaving = _leaving(tiles, half * (3 if keep else 1) if gate else tiles.columns, x.dtype)
    run = _kernel(body, out_types, tiles, (*pieces, leaving), copies=3 if gate else 2)
    return list(run(blocks.expert, jnp.reshape(blocks.used, 1), x, *weights))


def gradients(x: jax.Array, dy: jax.Array, blocks: Blocks, tiles: Tiles, dtype: Any) -> jax.Array:
    """Returns x^T dy [E, A, B] over the rows of each expert."""
    experts, size = len(blocks.first) - 1, x.shape[0] // len(blocks.expert)
    across, count = x.shape[1] // tiles.block, dy.shape[1] // tiles.columns

    def body(first: Any, sizes: Any, x: Any, dy: Any, dw: Any, out: Any, *stream: Any) -> None:
        def item(index: Any) -> tuple[Any, ...]:
            e = lax.div(index, across * count)
            within = index - e * (across * count)
            n = lax.div(within, across)
            steps = lax.div(sizes[e] + tiles.depth - 1, tiles.depth)
            return e, (within - n * across) * tiles.block, n, first[e] * size, steps

        def pieces(of: Any, k: Any, rank: Any, slot: Any) -> list[_Piece]:
            depth = pl.ds(of[3] + k * tiles.depth, tiles.depth)
            mine = x.at[depth, pl.ds(of[1] + rank * tiles.height, tiles.height)]
            part = dy.at[depth, pl.ds(of[2] * tiles.columns, tiles.columns)]
            return [_Piece(mine, stream[0].at[slot], False), _Piece(part, stream[1].at[slot], True)]

        def operands(slot: Any, wg: Any) -> tuple[Any, list[Any]]:
            mine = stream[0].at[slot, :, pl.ds(wg * tiles.rows, tiles.rows)]
            return mine.transpose((1, 0)), [stream[1].at[slot]]

        def finish(z: Any, of: Any, row: Any, wg: Any) -> None:
            leave = _Leave(out, wg, pl.ds(of[1] + row, tiles.rows))
            wide = out.shape[-1]
            for j in range(0, tiles.columns, wide):
                leave(z[0][:, j : j + wide], dw.at[of[0]], of[2] * tiles.columns + j)

        work = _Work(item=item, pieces=pieces, operands=operands, finish=finish, widths=(tiles.columns,))
        _stream(tiles, experts * across * count, stream[2:], work)

    out_type = [jax.ShapeDtypeStruct((experts, x.shape[1], dy.shape[1]), dtype)]
    pieces = (tiles.depth, tiles.height), (tiles.depth, tiles.columns)
    leaving = _leaving(tiles, tiles.columns, dtype)
    return _kernel(body, out_type, tiles, (*pieces, leaving), copies=2)(blocks.first, blocks.sizes, x, dy)[0]


def _leaving(tiles: Tiles, columns: int, dtype: Any) -> tuple[int, int, int, int]:
    """Returns the shape of the shared memory through which `columns` columns of each warpgroup are written at every item.

    The number of buffers divides that of the slices, so that each item begins with the first buffer and uses them in turn.
    """
    wide = tiles.slice_bytes // jnp.dtype(dtype).itemsize
    buffers = next(n for n in range(tiles.buffers, 0, -1) if columns // wide % n == 0)
    return tiles.warpgroups, buffers, tiles.rows, wide


class _Leave:
    """Writes slices of a warpgroup's tile to device memory through buffers `out` [2, buffers, rows, slice] in shared memory."""

    def __init__(self, out: Any, wg: Any, rows: Any) -> None:
        self.out, self.wg, self.rows, self.turn = out, wg, rows, 0

    def __call__(self, part: Any, to: Any, column: Any) -> None:
        here = self.out.at[self.wg, self.turn]
        plgpu.wait_smem_to_gmem(self.out.shape[1] - 1, wait_read_only=True)
        here[...] = part.astype(self.out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(here, to.at[self.rows, pl.ds(column, part.shape[1])])
        self.turn = (self.turn + 1) % self.out.shape[1]


def _swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory in the layout of wgmma's operands and of TMA."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * size * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _kernel(
    body: Callable[..., None],
    out_types: list[Any],
    tiles: Tiles,
    shapes: tuple[tuple[int, ...], ...],
    copies: int,
) -> Callable[..., Any]:
    """Returns a kernel; `body` takes inputs, outputs, the buffers through which a tile is written, then the stream's buffers and barriers.

    `shapes` are those of a piece of each operand, and of the buffers through which a tile is written.
    """
    shared = tiles.cluster > 1
    dtype = out_types[0].dtype

    # A shared piece is free when both blocks of the cluster have used it.
    cluster_barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("block",))
    free: Callable[..., Any] = cluster_barrier if shared else plgpu.Barrier
    scratch = [
        _swizzled(shapes[-1], dtype),
        *(_swizzled((tiles.stages, *shape), jnp.bfloat16) for shape in shapes[:-1]),
        plgpu.Barrier(num_arrivals=copies, num_barriers=tiles.stages),
        free(num_arrivals=tiles.warpgroups, num_barriers=tiles.stages),
    ]
    run: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=out_types,
        scratch_types=scratch,
        grid=(tiles.clusters,),
        grid_names=("clusters",),
        cluster=(tiles.cluster,) if shared else (),
        cluster_names=("block",) if shared else (),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return run


class _Piece(NamedTuple):
    """A copy of a part of an operand to a buffer of the stream; the blocks of a cluster make it together where it is `shared`.

    `here` tells whether it is made.
    """

    source: Any
    buffer: Any
    shared: bool
    here: Any = True


def _where(here: Any, run: Callable[[], Any]) -> None:
    """Runs `run` where `here` holds; `here` is True itself where that is known statically."""
    if here is True:
        run()
    else:
        pl.when(here)(run)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """The work of a kernel with its stream of pieces.

    Attributes:
      item: item(index) returns a tuple whose last entry is its number of pieces.
      pieces: pieces(item, k, rank, slot) returns the copies of piece k.
      operands: operands(slot, wg) returns the left operand of a product and the right ones, which are side by side.
      finish: finish(z, item, row, wg) writes the tiles of an item, whose first row is `row` after the item's own.
      widths: columns of the tile of each right operand.
    """

    item: Callable[..., Any]
    pieces: Callable[..., Any]
    operands: Callable[..., Any]
    finish: Callable[..., None]
    widths: tuple[int, ...]


def _stream(tiles: Tiles, items: Any, barriers: Any, work: _Work) -> None:
    """Runs the cluster's share of `items`: one warpgroup copies pieces, the others multiply them and finish tiles."""
    full, free = barriers
    cluster, wg = lax.axis_index("clusters"), lax.axis_index("warpgroup")
    rank = lax.axis_index("block") if tiles.cluster > 1 else 0
    mine = lax.div(items - cluster + tiles.clusters - 1, tiles.clusters)

    def over_items(run: Callable[..., Any]) -> Any:
        return lax.fori_loop(0, mine, lambda i, step: run(work.item(cluster + i * tiles.clusters), step), jnp.int32(0))

    @pl.when(wg < tiles.warpgroups)
    def _compute() -> None:
        # One multiplying warpgroup has enough registers by default.
        if tiles.warpgroups > 1:
            plgpu.set_max_registers(232, action="increase")

        def one(of: Any, step: Any) -> Any:
            z = _multiply(step, of[-1], wg, tiles, (work, full, free))
            work.finish(z, of, rank * tiles.height + wg * tiles.rows, wg)
            return step + of[-1]

        over_items(one)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == tiles.warpgroups)
    def _move() -> None:
        if tiles.warpgroups > 1:
            plgpu.set_max_registers(40, action="decrease")

        def one(of: Any, step: Any) -> Any:
            return lax.fori_loop(0, of[-1], lambda k, step: _load(step, of, k, work.pieces, state), step)

        state = tiles, rank, full, free
        end = over_items(one)
        # The other block of the cluster must not arrive at the barriers of a block that has exited.
        begin = jnp.maximum(end - tiles.stages, 0)
        lax.fori_loop(begin, end, lambda s, _: plgpu.barrier_wait(free.at[lax.rem(s, tiles.stages)]), None)


def _multiply(step: Any, steps: Any, wg: Any, tiles: Tiles, stream: Any) -> Any:
    """Returns the warpgroup's tiles [rows, width], computed from the pieces of `step` and the following ones."""
    work, full, free = stream

    def slot(s: Any) -> Any:
        return lax.rem(s, tiles.stages)

    def multiply(*sums: Any) -> Any:
        def add(k: Any, _: None) -> None:
            here = slot(step + k)
            plgpu.barrier_wait(full.at[here])
            left, right = work.operands(here, wg)
            for part, side in zip(sums, right):
                plgpu.wgmma(part, left, side)
            # The piece's products stay in flight; the piece before it is free.
            plgpu.wgmma_wait(len(right))

            @pl.when(k > 0)
            def _release() -> None:
                plgpu.barrier_arrive(free.at[slot(step + k - 1)])

        lax.fori_loop(0, steps, add, None)
        plgpu.wgmma_wait(0)

        @pl.when(steps > 0)
        def _release() -> None:
            plgpu.barrier_arrive(free.at[slot(step + steps - 1)])

        return [part[...] for part in sums]

    return pl.run_scoped(multiply, *(plgpu.ACC((tiles.rows, width), jnp.float32) for width in work.widths))


def _load(step: Any, of: Any, k: Any, pieces: Callable[..., Any], state: Any) -> Any:
    """Copies piece `k` of an item; returns the next step."""
    tiles, rank, full, free = state
    slot = lax.rem(step, tiles.stages)

    @pl.when(step >= tiles.stages)
    def _wait() -> None:
        plgpu.barrier_wait(free.at[slot])

    for piece in pieces(of, k, rank, slot):
        together = "block" if piece.shared and tiles.cluster > 1 else None
        copy = functools.partial(plgpu.copy_gmem_to_smem, piece.source, piece.buffer, full.at[slot])
        _where(piece.here, functools.partial(copy, collective_axes=together))
    return step + 1
