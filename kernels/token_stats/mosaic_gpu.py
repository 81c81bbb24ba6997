"""token_stats on Hopper by two Pallas Mosaic GPU kernels: running sums, and the logits' gradient tile by tile.

Both are one stream of products: grid = clusters of `Tiles.cluster` blocks, as many as the chip holds at once. Work is divided into
items of (cluster * 2 * rows) tokens times a share of the vocabulary; clusters take items in turn. In a block one warpgroup copies tiles
of hidden states and head to shared memory by TMA (the head's once per cluster), and two compute products by wgmma, rows x columns
float32 in registers each, and finish a tile while the next ones arrive.

    sums       z -> max z, sum e, sum e x, (sum e^2), x = (z - max) / temperature, e = exp x: registers of a token's row
    gradients  z -> dz of `fused`, bfloat16, to a buffer of some tiles of the vocabulary; cuBLAS then adds dz @ head
               to a float32 sum and computes dz.T @ hidden, and the buffer is reused

FLOPs: 2 T D V forward, 6 T D V backward. Device memory: the head is read once per group of tokens whose hidden states stay in the L2
cache; dz is written once and read twice. Exponentials are base 2. The vocabulary's last entries that do not fill a tile, with the -inf
bias of a mesh's padding, are left to the `xla` backend. There are no atomics, so sums have a fixed order.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, UInt32

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.token_stats import fused, xla
from jaxrl_llm.kernels.token_stats.definition import Call
from jaxrl_llm.kernels.token_stats.fused import FLOOR, Inputs, Tree

LOG2E = math.log2(math.e)
RUNS_ON = ("gpu", "NVIDIA Hopper GPUs")
SHARED_BYTES = 232448  # shared memory of one block on Hopper
# Rows of the backward pass's coefficients, those that a call has.
COEFFICIENTS = ("maximum", "log_total", "constant", "slope", "square", "uniform", "target")


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of the kernels' tiles.

    Attributes:
      rows: tokens of a warpgroup's tile; a block has two tiles, one above the other.
      columns: vocabulary entries of a tile.
      depth: columns of the hidden states and the head that are copied and multiplied at once.
      stages: number of pieces of `depth` in flight or in use.
      cluster: number of blocks that share the head's tiles, 1 or 2.
      slice: columns of a finished tile that are processed at once.
      cached: bytes of hidden states that the L2 cache keeps while the head is streamed.
      buffer: bytes of the logits' gradient in memory.
      multiprocessors: number of the chip's multiprocessors; None asks the device.
      head_columns: whether the head is passed as [D, V].
    """

    rows: int = 64
    columns: int = 256
    depth: int = 64
    stages: int = 4
    cluster: int = 2
    slice: int = 32
    cached: int = 24 * 2**20
    buffer: int = 128 * 2**20
    multiprocessors: int | None = None
    head_columns: bool = False

    def __post_init__(self) -> None:
        """Refuses tiles that wgmma cannot take or that exceed shared memory."""
        if self.rows % 64 or self.columns % self.slice or self.columns > 256 or self.rows * self.columns > 2**14:
            raise ValueError(f"rows must be a multiple of 64, columns <= 256, rows * columns <= 16384 (got {self})")
        if self.cluster not in (1, 2) or self.depth % 32 or self.slice not in (16, 32, 64):
            raise ValueError(f"cluster must be 1 or 2, depth a multiple of 32, slice 16, 32 or 64 (got {self})")
        stage = 2 * self.depth * (2 * self.rows + self.columns)
        used = self.stages * stage + 2 * self.rows * (2 * 2 * self.slice + 4 * len(COEFFICIENTS)) + 1024
        if used > SHARED_BYTES:
            raise ValueError(f"{self} needs {used} bytes of shared memory of {SHARED_BYTES}: use fewer stages")


# The default tiles.
TILES = Tiles()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The division of a product of tokens and vocabulary tiles into items.

    Attributes:
      tiles: sizes of the tiles.
      blocks: number of blocks of cluster * 2 * rows tokens.
      group: number of blocks whose hidden states are in the L2 cache together.
      count: number of tiles of the vocabulary.
      splits: number of shares of the vocabulary's tiles; an item is a block and a share.
      clusters: number of clusters of the grid.
      steps: number of pieces of `depth` in the width.
      last: first entry of the last tile, where it overlaps the tile before; None where tiles do not overlap.
    """

    tiles: Tiles
    blocks: int
    group: int
    count: int
    splits: int
    clusters: int
    steps: int
    last: int | None = None

    def item(self, index: Any) -> tuple[Any, Any, Any, Any]:
        """Returns (block, split, first tile, end of tiles) of the item: blocks of a group first, then shares, then groups."""
        group = lax.div(index, self.group * self.splits)
        within = index - group * (self.group * self.splits)
        size = jnp.minimum(self.group, self.blocks - group * self.group)
        split = lax.div(within, size)
        first, end = (lax.div((split + i) * self.count, self.splits) for i in range(2))
        return group * self.group + lax.rem(within, size), split, first, end

    def first_entry(self, n: Any) -> Any:
        """Returns the first entry of the vocabulary's tile `n`."""
        first = n * self.tiles.columns
        return first if self.last is None else jnp.minimum(first, self.last)

    def over_items(self, cluster: Any, run: Callable[..., Any], state: Any) -> Any:
        """Calls `run(item, state)` over the items of the cluster."""
        items = self.blocks * self.splits
        mine = lax.div(items - cluster + self.clusters - 1, self.clusters)
        return lax.fori_loop(0, mine, lambda i, s: run(self.item(cluster + i * self.clusters), s), state)


def plan(tiles: Tiles, tokens: int, width: int, count: int) -> Plan:
    """Returns the plan for `tokens` rows, a multiple of a cluster's, times `count` tiles of the vocabulary."""
    chip = tiles.multiprocessors or dispatch.device().core_count
    clusters = max(chip // tiles.cluster, 1)
    blocks = tokens // (tiles.cluster * 2 * tiles.rows)
    groups = min(-(-tokens * width * 2 // tiles.cached), blocks)
    splits = min(clusters, count)
    return Plan(
        tiles=tiles,
        blocks=blocks,
        group=-(-blocks // groups),
        count=count,
        splits=splits,
        clusters=min(clusters, blocks * splits),
        steps=width // tiles.depth,
    )


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if dispatch.capability() != (9, 0):
        return f"it needs compute capability 9.0, Hopper (got {dispatch.device().compute_capability})"
    if reason := fused.refusal(call):
        return reason
    if call.width % TILES.depth:
        return f"the width must be a multiple of {TILES.depth} (got {call.width})"
    least = (TILES.columns + 1) * call.shards
    if call.vocabulary < least:
        return f"it needs {least} or more vocabulary entries (got {call.vocabulary})"
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
    return fused.compute(Kernels(tiles=TILES), (hidden, head, targets), bias, words, call, mesh)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The two passes of `fused`'s backends.

    Attributes:
      tiles: sizes of the kernels' tiles.
    """

    tiles: Tiles

    def forward(self, inputs: Inputs, call: Call) -> tuple[dict[str, jax.Array], None]:
        """Returns the sums over the shard's vocabulary of each token."""
        covered = _covered(inputs, call, self.tiles)
        hidden, head = operands(inputs, self.tiles)
        work = plan(self.tiles, hidden.shape[0], call.width, covered // self.tiles.columns)
        sums = _sums(hidden, head[:covered] if _ragged(head) else head, call, work)
        sums = {name: x[: call.tokens] for name, x in sums.items()}
        if "logprob" in call.outputs:
            sums["target"] = fused.target_logits(inputs, covered)
        if "uniform_logprob" in call.outputs:
            sums["logit_sum"] = fused.logit_sums(inputs.hidden, head[:covered])
        if covered < call.vocabulary:
            rest, rest_call = _rest(inputs, call, covered)
            sums = fused.merge(sums, xla.forward(rest, rest_call)[0], call)
        return sums, None

    def backward(
        self, inputs: Inputs, rows: Tree, saved: None, call: Call, dhead: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns the gradients of hidden (float32), head (written into `dhead`) and bias (float32, for a mesh's padding)."""
        covered = _covered(inputs, call, self.tiles)
        hidden, head = operands(inputs, self.tiles)
        coefficients, targets = _coefficients(inputs, rows, hidden.shape[0])

        def add(first: Any, entries: int, carry: Any) -> Any:
            # The gradients of logits wait until the previous buffer is free.
            (dhidden, dhead), start = lax.optimization_barrier((carry, lax.div(first, jnp.int32(self.tiles.columns))))
            work = plan(self.tiles, hidden.shape[0], call.width, entries // self.tiles.columns)
            weights = lax.dynamic_slice_in_dim(head, first, entries)
            if _ragged(head):
                place = start * self.tiles.columns
                dz = _logit_gradients(hidden, weights, coefficients, targets - place, 0, call, work)
            else:
                dz = _logit_gradients(hidden, head, coefficients, targets, start, call, work)
            dhidden += lax.dot_general(dz, weights, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
            dw = lax.dot_general(dz, hidden, (((0,), (0,)), ((), ())), preferred_element_type=dhead.dtype)
            return dhidden, fused.put(dhead, dw, first, call)

        dbias = None if inputs.bias is None else jnp.zeros(call.vocabulary, jnp.float32)
        if covered < call.vocabulary:
            # These come first, so that their gradient of the hidden states is the sum's own memory.
            rest, rest_call = _rest(inputs, call, covered)
            # An explicit chunk keeps xla from expecting the products of the forward pass.
            rest_call = replace(rest_call, chunk=call.vocabulary, parts=1)
            dx, dw, db = xla.backward(rest, rows, None, rest_call, jnp.zeros(rest.head.shape, jnp.float32))
            dhidden = jnp.pad(dx, ((0, hidden.shape[0] - call.tokens), (0, 0)))
            dhead = fused.put(dhead, dw, covered, call)
            if dbias is not None and db is not None:
                dbias = lax.dynamic_update_slice(dbias, db, (covered,))
        else:
            dhidden = jnp.zeros(hidden.shape, jnp.float32)
        # A wide head's part, which may be copied once, takes at most half of the memory of its logits' gradient.
        most = self.tiles.buffer // max(hidden.shape[0] * 2, call.width * 4)
        dhidden, dhead = fused.over_buffers(add, (dhidden, dhead), covered, self.tiles.columns, most)
        dhidden = dhidden[: call.tokens]
        return dhidden, dhead, dbias


def _covered(inputs: Inputs, call: Call, tiles: Tiles) -> int:
    """Returns the number of vocabulary entries that the kernels process: whole tiles, before the entries that a mesh may have padded."""
    padding = 0 if inputs.bias is None else call.shards - 1
    return (call.vocabulary - padding) // tiles.columns * tiles.columns


def _rest(inputs: Inputs, call: Call, covered: int) -> tuple[Inputs, Call]:
    """Returns the call of the entries from `covered` on."""
    part = inputs._replace(
        head=inputs.head[covered:],
        bias=None if inputs.bias is None else inputs.bias[covered:],
        finite=None if inputs.finite is None else inputs.finite[covered:],
        first_entry=inputs.first_entry + covered,
    )
    return part, replace(call, vocabulary=call.vocabulary - covered)


def _ragged(head: jax.Array) -> bool:
    """Returns whether TMA cannot copy the whole head, since it copies groups of 8 rows."""
    return head.shape[0] % 8 > 0


def operands(inputs: Inputs, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
    """Returns the hidden states padded to whole blocks, and the head in their dtype."""
    hidden, head = inputs.hidden, inputs.head.astype(inputs.hidden.dtype)
    more = -hidden.shape[0] % (tiles.cluster * 2 * tiles.rows)
    return jnp.pad(hidden, ((0, more), (0, 0))), head


def _coefficients(inputs: Inputs, rows: Tree, tokens: int) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns the rows of COEFFICIENTS, in units of base 2, and the targets' columns in the shard, both of `tokens` rows."""
    scaled = {"log_total": LOG2E, "slope": 1 / LOG2E}
    found = {name: rows[name] * scaled.get(name, 1.0) for name in COEFFICIENTS if name in rows}
    more = (0, tokens - inputs.targets.shape[0])
    targets = jnp.pad(inputs.targets - inputs.first_entry, more, constant_values=-1)
    return {name: jnp.pad(x, more) for name, x in found.items()}, targets


def _sums(hidden: jax.Array, head: jax.Array, call: Call, work: Plan) -> dict[str, jax.Array]:
    """Returns the sums over the plan's tiles by the kernel, from one row of partial sums per share of the vocabulary."""
    names = ["maximum", "total", "first", *(["square"] if "sum_p2" in call.outputs else [])]
    rows, tokens = work.tiles.rows, hidden.shape[0]
    scale = LOG2E / call.temperature

    def body(hidden: Any, head: Any, out: Any, stats: Any, *stream: Any) -> None:
        wg = lax.axis_index("warpgroup")

        def start(row: Any) -> Any:
            zero = jnp.zeros(rows, jnp.float32)
            return (jnp.full(rows, FLOOR, jnp.float32), *[zero] * (len(names) - 1))

        def finish(carry: Any, split: Any, row: Any) -> None:
            for i, x in enumerate(carry):
                stats[wg, i] = x
            plgpu.commit_smem()
            for i in range(len(names)):
                plgpu.copy_smem_to_gmem(stats.at[wg, i], out.at[i, split, pl.ds(row, rows)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def tile(z: Any, n: Any, row: Any, carry: Any) -> Any:
            return add_tile(z, carry, scale, work.tiles.slice)

        stream_of((hidden, head), 0, work, stream, (start, tile, finish))

    out_type = jax.ShapeDtypeStruct((len(names), work.splits, tokens), jnp.float32)
    scratch = [plgpu.SMEM((2, len(names), rows), jnp.float32)]
    out = kernel_of(body, out_type, scratch, work)(hidden, turned(head, work.tiles))
    sums = dict(zip(names, out))
    sums["first"] = sums["first"] / LOG2E
    return _reduced(sums, call)


def _reduced(sums: Tree, call: Call) -> dict[str, jax.Array]:
    """Merges the sums [splits, T] over the first axis."""
    maximum = sums["maximum"].max(axis=0)
    summed = fused.rescale(sums, maximum, call)
    return {name: maximum if name == "maximum" else x.sum(axis=0) for name, x in summed.items()}


def add_tile(z: Any, carry: Any, scale: Any, width: int) -> Any:
    """Adds a tile of logits to the running sums, a slice at a time so that few registers are live.

    `scale`, the inverse temperature in units of base 2, is one number, or one per row.
    """
    before, *sums = carry
    maximum = jnp.maximum(before, z.max(axis=1))
    shift = (before - maximum) * scale
    factor = jnp.exp2(shift)
    total, first, *square = sums
    kept = [total * factor, (first + shift * total) * factor, *(x * factor * factor for x in square)]
    parts: list[Any] = []
    across = scale if isinstance(scale, float) else _across(scale, width)
    for j in range(0, z.shape[1], width):
        # The difference is taken before it is scaled, for large logits.
        x = (z[:, j : j + width] - _across(maximum, width)) * across
        e = jnp.exp2(x)
        new = [e, e * x, e * e][: len(kept)]
        parts = [a + b for a, b in zip(parts, new)] if parts else new
    return (maximum, *(a + b.sum(axis=1) for a, b in zip(kept, parts)))


def _across(x: Any, width: int) -> Any:
    return lax.broadcast_in_dim(x, (x.shape[0], width), (0,))


def _logit_gradients(
    hidden: jax.Array,
    head: jax.Array,
    coefficients: Tree,
    targets: jax.Array,
    start: Any,
    call: Call,
    work: Plan,
) -> jax.Array:
    """Returns dz [T, count * columns] in the dtype of `hidden`, for the tiles from `start` on."""
    names = tuple(coefficients)
    tiles, rows = work.tiles, work.tiles.rows
    scale = LOG2E / call.temperature

    def body(hidden: Any, head: Any, numbers: Any, targets: Any, first: Any, dz: Any, *scratch: Any) -> None:
        kept, places, out, loaded, *stream = scratch
        wg = lax.axis_index("warpgroup")
        first_tile = first[0]

        def begin(row: Any) -> Any:
            here = pl.ds(row, rows)
            for i in range(len(names)):
                plgpu.copy_gmem_to_smem(numbers.at[i, here], kept.at[wg, i], loaded.at[wg])
            plgpu.copy_gmem_to_smem(targets.at[here], places.at[wg], loaded.at[wg])
            plgpu.barrier_wait(loaded.at[wg])
            return ()

        def tile(z: Any, n: Any, row: Any, carry: Any) -> Any:
            c = {name: kept[wg, i] for i, name in enumerate(names)}
            place = places[wg] - (first_tile + n) * tiles.columns
            for i, j in enumerate(range(0, tiles.columns, tiles.slice)):
                part = _gradient(z[:, j : j + tiles.slice], c, place - j, scale)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                out[wg, i % 2] = part.astype(out.dtype)
                plgpu.commit_smem()
                columns = pl.ds(n * tiles.columns + j, tiles.slice)
                plgpu.copy_smem_to_gmem(out.at[wg, i % 2], dz.at[pl.ds(row, rows), columns])
            return carry

        stream_of((hidden, head), first_tile, work, stream, (begin, tile, lambda *_: None))

    out_type = jax.ShapeDtypeStruct((hidden.shape[0], work.count * tiles.columns), hidden.dtype)
    scratch = [
        plgpu.SMEM((2, len(names), rows), jnp.float32),
        plgpu.SMEM((2, rows), jnp.int32),
        swizzled((2, 2, rows, tiles.slice), hidden.dtype),
        plgpu.Barrier(num_arrivals=len(names) + 1, num_barriers=2),
    ]
    numbers = jnp.stack(list(coefficients.values()))
    kernel = kernel_of(body, out_type, scratch, work)
    return kernel(hidden, turned(head, tiles), numbers, targets, jnp.reshape(jnp.int32(start), 1))


def _gradient(z: Any, c: Tree, place: Any, scale: float) -> Any:
    """Returns dz of `fused` for some columns of logits; `place` is the target's column among them."""

    def row(name: str) -> Any:
        return _across(c[name], z.shape[1])

    logp = (z - row("maximum")) * scale - row("log_total")
    p = jnp.exp2(logp)
    weight = row("constant")
    if "slope" in c:
        weight = weight + row("slope") * logp
    if "square" in c:
        weight = weight + row("square") * p
    dz = p * weight
    if "uniform" in c:
        dz = dz + row("uniform")
    if "target" in c:
        column = lax.broadcasted_iota(jnp.int32, z.shape, 1)
        dz = dz + jnp.where(column == _across(place, z.shape[1]), row("target"), 0.0)
    return dz


def turned(head: jax.Array, tiles: Tiles) -> jax.Array:
    return head.T if tiles.head_columns else head


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory in the layout of wgmma's operands and of TMA."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * size * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def kernel_of(body: Callable[..., None], out_type: Any, scratch: Sequence[Any], work: Plan) -> Callable[..., Any]:
    """Returns a kernel on the plan's grid; `body` takes inputs, output, `scratch`, then the stream's buffers and barriers."""
    tiles = work.tiles
    shared = tiles.cluster > 1
    head_tile = (tiles.depth, tiles.columns) if tiles.head_columns else (tiles.columns, tiles.depth)
    # A tile of the head is free when both blocks of the cluster have used it.
    cluster_barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("block",))
    free: Callable[..., Any] = cluster_barrier if shared else plgpu.Barrier
    stream = [
        swizzled((tiles.stages, 2 * tiles.rows, tiles.depth), jnp.bfloat16),
        swizzled((tiles.stages, *head_tile), jnp.bfloat16),
        plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages),
        free(num_arrivals=2, num_barriers=tiles.stages),
    ]
    run: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[*scratch, *stream],
        grid=(work.clusters,),
        grid_names=("clusters",),
        cluster=(tiles.cluster,) if shared else (),
        cluster_names=("block",) if shared else (),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return run


def stream_of(arrays: Any, first_tile: Any, work: Plan, stream: Any, of_item: Any) -> None:
    """Runs `start(row)`, `tile(z, n, row, carry)` for each tile and `finish(carry, split, row)` for each item.

    These three functions of `of_item` run in both computing warpgroups, each on its own rows; the third warpgroup copies tiles.
    """
    tiles = work.tiles
    start, tile, finish = of_item
    cluster, wg = lax.axis_index("clusters"), lax.axis_index("warpgroup")
    block_in_cluster = lax.axis_index("block") if tiles.cluster > 1 else 0

    def first_row(block: Any) -> Any:
        return (block * tiles.cluster + block_in_cluster) * (2 * tiles.rows)

    @pl.when(wg < 2)
    def _compute() -> None:
        plgpu.set_max_registers(232, action="increase")

        def item(of: Any, step: Any) -> Any:
            block, split, first, end = of
            row = first_row(block) + wg * tiles.rows

            def one(n: Any, state: Any) -> Any:
                step, carry = state
                z = _multiply(step, wg, work, stream)
                return step + work.steps, tile(z, n, row, carry)

            step, carry = lax.fori_loop(first, end, one, (step, start(row)))
            finish(carry, split, row)
            return step

        work.over_items(cluster, item, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == 2)
    def _move() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def item(of: Any, step: Any) -> Any:
            row = first_row(of[0])

            def one(n: Any, step: Any) -> Any:
                return _load(step, row, first_tile + n, arrays, work, stream)

            return lax.fori_loop(of[2], of[3], one, step)

        end = work.over_items(cluster, item, jnp.int32(0))
        # The other block of the cluster must not arrive at the barriers of a block that has exited.
        free = stream[3]
        begin = jnp.maximum(end - tiles.stages, 0)
        lax.fori_loop(begin, end, lambda s, _: plgpu.barrier_wait(free.at[lax.rem(s, tiles.stages)]), None)


def _multiply(step: Any, wg: Any, work: Plan, stream: Any) -> Any:
    """Returns the logits [rows, columns] of one tile for the warpgroup, computed from the pieces of `step` and the following ones."""
    hidden, head, full, free = stream
    tiles = work.tiles

    def slot(s: Any) -> Any:
        return lax.rem(s, tiles.stages)

    def multiply(sums: Any) -> Any:
        def add(k: Any, _: None) -> None:
            here = slot(step + k)
            plgpu.barrier_wait(full.at[here])
            weights = head.at[here] if tiles.head_columns else head.at[here].transpose((1, 0))
            plgpu.wgmma(sums, hidden.at[here, pl.ds(wg * tiles.rows, tiles.rows)], weights)
            # One product stays in flight; the piece before it is free.
            plgpu.wgmma_wait(1)

            @pl.when(k > 0)
            def _release() -> None:
                plgpu.barrier_arrive(free.at[slot(step + k - 1)])

        lax.fori_loop(0, work.steps, add, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(free.at[slot(step + work.steps - 1)])
        return sums[...]

    return pl.run_scoped(multiply, plgpu.ACC((tiles.rows, tiles.columns), jnp.float32))


def _load(step: Any, row: Any, n: Any, arrays: Any, work: Plan, stream: Any) -> Any:
    """Copies the pieces of the tokens from `row` on and of the vocabulary's tile `n`; returns the next step."""
    hidden, head, full, free = stream
    tiles = work.tiles

    def piece(k: Any, step: Any) -> Any:
        slot = lax.rem(step, tiles.stages)

        @pl.when(step >= tiles.stages)
        def _wait() -> None:
            plgpu.barrier_wait(free.at[slot])

        depth, entries = pl.ds(k * tiles.depth, tiles.depth), pl.ds(work.first_entry(n), tiles.columns)
        plgpu.copy_gmem_to_smem(arrays[0].at[pl.ds(row, 2 * tiles.rows), depth], hidden.at[slot], full.at[slot])
        source = arrays[1].at[depth, entries] if tiles.head_columns else arrays[1].at[entries, depth]
        together = "block" if tiles.cluster > 1 else None
        plgpu.copy_gmem_to_smem(source, head.at[slot], full.at[slot], collective_axes=together)
        return step + 1

    return lax.fori_loop(0, work.steps, piece, step)
