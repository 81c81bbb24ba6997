"""Decode attention on TPU: a Pallas kernel that writes a new entry per slot and reads the filled pages of one layer's cache in place.

Grid: (cores, groups of slots, blocks of entries). A page is PAGE entries of all heads of a slot. While a step computes, the pages of
the next one are copied to VMEM: each slot's own pages, as far as it is filled and within its window. Each slot and key head keeps a
running maximum m and sums of e and e v, e = exp(s - m). A step computes the scores of all its slots and heads, then all their
exponentials, then all products with the values, so that no product waits for the exponentials before it.

A new entry is put into its page in VMEM, and the tile around it (16 entries of bfloat16, 32 of 8 bits) is copied back, since XLA's
scatter would change the whole cache's layout.

It moves the filled pages of keys and values once, and a tile per slot and head. It is tested in interpret mode and compiled for TPUs
without one (`kernels.tpu_cycles`), and was not run on TPU hardware.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.decode_attention.api import Call
from jaxrl_llm.kernels.decode_attention.cache import PAGE
from jaxrl_llm.kernels.decode_attention.reference import MASKED

RUNS_ON = ("tpu", "TPUs")
LANES = 128
# Rows of a float32 tile, to which query heads that share a key head are padded.
ROWS = 8
# The running maximum begins below every score and above MASKED, so that unseen entries weigh 0, also in a fully masked block.
LEAST = MASKED / 2
# Most bytes of VMEM for pages, in use and in flight; most entries of a block; most slots and heads of a step.
BYTES, ENTRIES, PAIRS = 12 * 2**20, 2048, 64
WORDS = 8  # 32-bit words of a tile's column, in which entries are stacked
CORES = 2  # cores of a v5p chip, which share a grid's first axis; other chips run it in order


class Sizes(NamedTuple):
    """The tiling of a call: slots of a group, entries of a block, and the grid."""

    slots: int
    entries: int
    grid: tuple[int, int, int]

    @classmethod
    def of(cls, slots: int, call: Call, bytes_each: int) -> "Sizes":
        """Returns the largest block that fits, and then the largest group."""
        fits = lambda n, entries: 4 * n * call.kv_heads * entries * call.width * bytes_each <= BYTES  # noqa: E731
        pages = [n for n in range(call.length // PAGE, 0, -1) if call.length // PAGE % n == 0 and n * PAGE <= ENTRIES]
        entries = PAGE * next((n for n in pages if fits(1, n * PAGE)), 1)
        most = max(1, PAIRS // call.kv_heads)
        own = next((n for n in range(min(slots, most), 1, -1) if slots % n == 0 and fits(n, entries)), 1)
        groups = slots // own
        cores = CORES if groups % CORES == 0 else 1
        return cls(own, entries, (cores, groups // cores, call.length // entries))


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if call.dtype != "bfloat16":
        return f"it takes bfloat16, not {call.dtype}: set Policy's compute_dtype"
    if call.width % LANES:
        return f"heads must be a multiple of {LANES} wide (got {call.width})"
    if call.page is not None:
        return "its cache holds whole slots, not pages"
    if call.length % PAGE:
        return f"the cache's length must be a multiple of {PAGE} tokens (got {call.length})"
    return None


def step(
    q: Float[Array, "S H C"],
    new: tuple[Float[Array, "S K C"], Float[Array, "S K C"]],
    cached: tuple[Float[Array, "L S K T C"], Float[Array, "L S K T C"]],
    layer: Int[Array, ""],
    positions: Int[Array, " S"],
    call: Call,
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "S H C"], tuple[Float[Array, "L S K T C"], Float[Array, "L S K T C"]]]:
    """Writes and attends as defined by `decode_step`; softmax in float32, products in the dtype of `q` with float32 sums."""
    slots, heads, width, group = len(q), call.kv_heads, call.width, call.heads // call.kv_heads
    rows = -(-group // ROWS) * ROWS
    grouped = jnp.pad(q.reshape(slots, heads, group, width), ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    dtype = cached[0].dtype
    sizes = Sizes.of(slots, call, dtype.itemsize)
    own, pairs, groups = sizes.slots, sizes.slots * heads * rows, sizes.grid[1]
    unsigned = jnp.uint16 if dtype.itemsize == 2 else jnp.uint8
    bits = jnp.concatenate([lax.bitcast_convert_type(x, unsigned) for x in new], axis=1).astype(jnp.uint32)
    query = pl.BlockSpec((own, heads, rows, width), lambda core, g, *_: (core * groups + g, 0, 0, 0))
    entry = pl.BlockSpec((own, 2 * heads, width), lambda core, g, *_: (core * groups + g, 0, 0))
    whole, pages = pl.BlockSpec(memory_space=pl.ANY), pltpu.VMEM((2, own, heads, sizes.entries, width), dtype)
    read = 2 * slots * heads * call.length * width
    out, *written = pl.pallas_call(
        functools.partial(_step, call=call, sizes=sizes),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (grouped, *cached)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=sizes.grid,
            in_specs=[query, entry, whole, whole],
            out_specs=[query, whole, whole],
            scratch_shapes=[
                *[pages] * 2,
                *[pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA],
                *(pltpu.VMEM((pairs, n), jnp.float32) for n in (LANES, LANES, LANES, width, sizes.entries)),
            ],
        ),
        input_output_aliases={4: 1, 5: 2},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=BYTES + BYTES // 2
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * read * rows,
            bytes_accessed=read * dtype.itemsize,
            transcendentals=slots * heads * rows * call.length,
        ),
        interpret=interpret,
        name="decode_attention",
    )(layer.reshape(1), positions, grouped, bits, *cached)
    return out[:, :, :group].reshape(q.shape), (written[0], written[1])


@dataclass(frozen=True)
class _Moves:
    """The copies of a step between the cache and its pages in VMEM; the arguments are the kernel's references."""

    layer: Any
    positions: Any
    cached: tuple[Any, Any]
    pages: tuple[Any, Any]
    arrived: Any
    written: Any
    call: Call
    sizes: Sizes

    def first_slot(self, step: Any) -> Any:
        """Returns the first slot of the group of a core's step."""
        return (pl.program_id(0) * self.sizes.grid[1] + lax.div(step, self.sizes.grid[2])) * self.sizes.slots

    def start(self, step: Any) -> Any:
        """Returns the first entry of the step's block."""
        return lax.rem(step, self.sizes.grid[2]) * self.sizes.entries

    def read(self, step: Any, do: Callable[[Any], None]) -> None:
        """Applies `do` to the copy of each page that a step sees."""
        half, first_slot, start = lax.rem(step, 2), self.first_slot(step), self.start(step)

        def of_slot(i: Any, _: Any) -> None:
            last = jnp.minimum(self.positions[first_slot + i], self.call.length - 1)
            first, end = _pages(last, start, self.sizes.entries, self.call.window)

            def of_page(page: Any, _: Any) -> None:
                here = pl.multiple_of(page * PAGE, PAGE)
                for cached, pages in zip(self.cached, self.pages):
                    there = pl.ds(pl.multiple_of(start + here, PAGE), PAGE)
                    source = cached.at[self.layer[0], first_slot + i, :, there, :]
                    target = pages.at[half, i, :, pl.ds(here, PAGE), :]
                    do(pltpu.make_async_copy(source, target, self.arrived.at[half]))

            lax.fori_loop(first, end, of_page, None)

        lax.fori_loop(0, self.sizes.slots, of_slot, None)

    def write(self, step: Any, bits: Any | None) -> None:
        """Puts new entries, the words `bits` [slots, 2 K, C], into their tiles and starts to copy these back; None waits for the copies."""
        half, first_slot, start = lax.rem(step, 2), self.first_slot(step), self.start(step)
        tile = WORDS * 4 // self.pages[0].dtype.itemsize

        def of_slot(i: Any, _: Any) -> None:
            place = self.positions[first_slot + i] - start

            @pl.when((place >= 0) & (place < self.sizes.entries))
            def _here() -> None:
                first = pl.multiple_of(place - lax.rem(place, tile), tile)
                if bits is not None:
                    self._put(bits, half, i, place)
                for cached, pages in zip(self.cached, self.pages):
                    there = pl.ds(pl.multiple_of(start + first, tile), tile)
                    target = cached.at[self.layer[0], first_slot + i, :, there, :]
                    source = pages.at[half, i, :, pl.ds(first, tile), :]
                    copy = pltpu.make_async_copy(source, target, self.written)
                    copy.wait() if bits is None else copy.start()

        lax.fori_loop(0, self.sizes.slots, of_slot, None)

    def _put(self, bits: Any, half: Any, slot: Any, place: Any) -> None:
        packed, heads = 4 // self.pages[0].dtype.itemsize, self.call.kv_heads
        tile, width = WORDS * packed, 32 // packed
        within = lax.rem(place, tile)
        shift = (lax.rem(within, packed) * width).astype(jnp.uint32)
        others = ~(jnp.uint32(2**width - 1) << shift)
        here = pl.ds(pl.multiple_of(place - within, tile), tile)
        for number, pages in enumerate(self.pages):
            for head in range(heads):
                old = pltpu.bitcast(pages[half, slot, head, here, :], jnp.uint32)
                mine = lax.broadcasted_iota(jnp.int32, old.shape, 0) == lax.div(within, packed)
                new = bits[slot, pl.ds(number * heads + head, 1), :] << shift
                words = jnp.where(mine, (old & others) | new, old)
                pages[half, slot, head, here, :] = pltpu.bitcast(words, pages.dtype)


def _step(
    layer: Any, positions: Any, q: Any, bits: Any, _k: Any, _v: Any, out: Any, *refs: Any, call: Call, sizes: Sizes
) -> None:
    keys, values, k_pages, v_pages, arrived, written, *sums = refs
    moves = _Moves(layer, positions, (keys, values), (k_pages, v_pages), arrived, written, call, sizes)
    t, step = pl.program_id(2), pl.program_id(1) * sizes.grid[2] + pl.program_id(2)

    @pl.when(step == 0)
    def _first() -> None:
        # Entries of pages that were not copied weigh 0, but 0 times uninitialised memory may be NaN.
        v_pages[...] = jnp.zeros(v_pages.shape, v_pages.dtype)
        moves.read(step, lambda copy: copy.start())

    @pl.when(step + 1 < sizes.grid[1] * sizes.grid[2])
    def _next() -> None:
        moves.read(step + 1, lambda copy: copy.start())

    moves.read(step, lambda copy: copy.wait())
    moves.write(step, bits)
    lasts = [jnp.minimum(positions[moves.first_slot(step) + i], call.length - 1) for i in range(sizes.slots)]
    half = lax.rem(step, 2)
    _attend(q, k_pages.at[half], v_pages.at[half], out, sums, (t, lasts), call)
    moves.write(step, None)


def _pages(last: Any, start: Any, entries: int, window: int | None) -> tuple[Any, Any]:
    """Returns the first page that a slot's query sees of the `entries` from `start` on, and the one after the last."""
    end = lax.div(jnp.clip(last + 1 - start, 0, entries) + (PAGE - 1), PAGE)
    if window is None:
        return 0, end
    return lax.div(jnp.clip(last + 1 - window - start, 0, entries), PAGE), end


def _attend(q: Any, keys: Any, values: Any, out: Any, sums: Any, at: tuple[Any, Any], call: Call) -> None:
    """Adds a block to the sums of a group; the arguments are references, and `at` is the block and each slot's last entry."""
    most, total, factor, mixed, scores = sums
    (t, lasts), (own, heads, entries), rows = at, keys.shape[:3], q.shape[2]
    pairs = [(pl.ds((i * heads + h) * rows, rows), i, h) for i in range(own) for h in range(heads)]

    @pl.when(t == 0)
    def _start() -> None:
        most[...] = jnp.full(most.shape, LEAST, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        mixed[...] = jnp.zeros(mixed.shape, jnp.float32)

    start, furthest = t * entries, functools.reduce(jnp.maximum, lasts)

    @pl.when(start <= furthest)
    def _add() -> None:
        for place, i, h in pairs:
            k = keys[i, h].astype(q.dtype)
            scores[place, :] = lax.dot_general(q[i, h], k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        for place, i, _ in pairs:
            index = start + lax.broadcasted_iota(jnp.int32, (rows, entries), 1)
            seen = index <= lasts[i]
            if call.window is not None:
                seen &= index > lasts[i] - call.window
            x = jnp.where(seen, scores[place, :] * call.width**-0.5, MASKED)
            new = jnp.maximum(most[place, :], x.max(axis=1, keepdims=True))
            e = jnp.exp(x - new[:, :1])
            factor[place, :] = jnp.exp(most[place, :] - new)
            total[place, :] = total[place, :] * factor[place, :] + e.sum(axis=1, keepdims=True)
            most[place, :], scores[place, :] = new, e
        for place, i, h in pairs:
            v = values[i, h].astype(q.dtype)
            product = lax.dot_general(
                scores[place, :].astype(v.dtype), v, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
            mixed[place, :] = mixed[place, :] * factor[place, :1] + product

    @pl.when(t == pl.num_programs(2) - 1)
    def _end() -> None:
        for place, i, h in pairs:
            out[i, h] = (mixed[place, :] / total[place, :1]).astype(out.dtype)
