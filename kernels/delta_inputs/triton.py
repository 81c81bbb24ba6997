"""The inputs of a gated delta rule on NVIDIA GPUs: Pallas kernels, compiled by Triton, that keep nothing but the projection for the gradient.

One call for the queries, the keys and the values each; a program takes a head's channels of a span of tokens, a block at a time. Backward
it computes the convolution's gradient, in the dtype of the projection, and sums the gradients of the taps over the span. The projection's
gradient is a convolution in turn, with the order of the tokens reversed, and left to XLA.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.delta_inputs.api import Call, Inputs
from jaxrl_llm.kernels.delta_inputs.reference import SMALL, convolved

RUNS_ON = ("gpu", "NVIDIA GPUs")
WIDTHS = (16, 32, 64, 128, 256)


class How(NamedTuple):
    """How the kernels run.

    Attributes:
      block: tokens at a time.
      blocks: blocks of a program's span.
      warps: of a program.
      interpret: runs the kernels by Pallas's interpreter.
    """

    block: int = 32
    blocks: int = 8
    warps: int = 4
    interpret: bool = False


HOW = How()


class Part(NamedTuple):
    """Queries, keys or values among the channels.

    Attributes:
      start: the first channel.
      heads: number of heads.
      width: channels of a head.
      scale: factor of vectors of length 1; None where vectors are taken as they are.
    """

    start: int
    heads: int
    width: int
    scale: float | None


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if call.continued:
        return "it takes rows that begin with the first token of a segment, and no inputs before them"
    if dispatch.capability() is None:
        return "it runs on NVIDIA GPUs (this is another GPU)"
    if call.key_width not in WIDTHS or call.value_width not in WIDTHS:
        return f"heads must be {', '.join(map(str, WIDTHS))} wide (got {call.key_width}, {call.value_width})"
    return None


def inputs(
    x: Float[Array, "B T channels"],
    taps: Float[Array, "channels taps"],
    segments: Int[Array, "B T"],
    before: None,
    call: Call,
) -> Inputs:
    """Computes as defined by `delta_inputs`, with the kernels of HOW."""
    key = call.key_heads * call.key_width
    values = (x.shape[2] - 2 * key) // call.value_width
    parts = (
        Part(0, call.key_heads, call.key_width, call.key_width**-0.5),
        Part(key, call.key_heads, call.key_width, 1.0),
        Part(2 * key, values, call.value_width, None),
    )
    found: Inputs = _inputs(parts, HOW, x, taps, segments.astype(jnp.int32))
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _inputs(parts: tuple[Part, ...], how: How, x: Any, taps: Any, segments: Any) -> Any:
    return _kept(parts, how, x, taps, segments)[0]


def _kept(parts: tuple[Part, ...], how: How, x: Any, taps: Any, segments: Any) -> Any:
    given = (segments, x, taps.T.astype(jnp.float32))
    found = []
    for part in parts:
        shape = jax.ShapeDtypeStruct((*x.shape[:2], part.heads, part.width), x.dtype)
        found.append(_call(_forward, part, how, x, shape)(*given))
    return tuple(found), (x, taps, segments)


def _back(parts: tuple[Part, ...], how: How, residual: Any, slopes: Any) -> Any:
    x, taps, segments = residual
    given, change, of_taps = (segments, x, taps.T.astype(jnp.float32)), None, []
    for part, slope in zip(parts, slopes):
        sums = jax.ShapeDtypeStruct((len(x), _spans(x, how), taps.shape[1], part.heads * part.width), jnp.float32)
        shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype), sums)
        # Each part writes its own channels of one array.
        before = () if change is None else (change,)
        alias: dict[int, int] = {len(given) + 1: 0} if before else {}
        change, found = _call(_backward, part, how, x, shapes, alias)(*given, slope, *before)
        of_taps.append(found.sum(axis=(0, 1)))
    assert change is not None
    none = jnp.zeros((len(x), taps.shape[1] - 1, x.shape[2]), x.dtype)
    of_x = convolved(change[:, ::-1], taps, segments[:, ::-1], none)[:, ::-1].astype(x.dtype)
    return of_x, jnp.concatenate(of_taps, axis=1).T.astype(taps.dtype), None


_inputs.defvjp(_kept, _back)


def _spans(x: Any, how: How) -> int:
    return -(-x.shape[1] // (how.block * how.blocks))


def _call(body: Any, part: Part, how: How, x: Any, shapes: Any, alias: dict[int, int] | None = None) -> Any:
    return pl.pallas_call(
        functools.partial(body, part=part, how=how),
        out_shape=shapes,
        grid=(len(x), _spans(x, how), part.heads),
        input_output_aliases=alias or {},
        compiler_params=triton.CompilerParams(num_warps=how.warps, num_stages=1),
        interpret=how.interpret,
        name=body.__name__.strip("_") + "_delta_inputs",
    )


# -- kernels -----------------------------------------------------------------------------------------------------------


class _Head(NamedTuple):
    """What a program reads: the segments, projection and taps, its row, and the channels of its head."""

    segments: Any
    x: Any
    taps: Any
    row: Any
    channels: Any

    def segment(self, places: Any) -> Any:
        """Returns the segments of tokens, and for those outside the row a number that is none."""
        inside = (places >= 0) & (places < self.x.shape[1])
        return triton.load(self.segments.at[self.row, places], mask=inside, other=jnp.iinfo(jnp.int32).min)

    def seen(self, places: Any, back: int) -> Any:
        """Returns the inputs so many tokens before, 0 where those are of other segments."""
        same = self.segment(places) == self.segment(places - back)
        mask = same & (places >= back) & (places < self.x.shape[1])
        at = self.x.at[self.row, (places - back)[:, None], self.channels[None, :]]
        return triton.load(at, mask=_wide(mask, self.channels), other=0.0).astype(jnp.float32)

    def summed(self, seen: list[Any]) -> Any:
        """Returns the convolution of inputs, from those of the tokens themselves on."""
        last = self.taps.shape[0] - 1
        terms = (self.taps[last - back, self.channels][None, :] * inputs for back, inputs in enumerate(seen))
        return functools.reduce(jnp.add, terms)


def _wide(mask: Any, channels: Any) -> Any:
    return jnp.broadcast_to(mask[:, None], (len(mask), len(channels)))


def _start(part: Part, how: How) -> tuple[Any, Any, Any, Any]:
    """Returns a program's row, its span's first token, its head among those of its part, and the head's channels."""
    row, span, head = (pl.program_id(axis) for axis in range(3))
    channels = part.start + head * part.width + lax.iota(jnp.int32, part.width)
    return row, span * how.blocks * how.block, head, channels


def _forward(segments: Any, x: Any, taps: Any, out: Any, *, part: Part, how: How) -> None:
    """A head's queries, keys or values of a span."""
    row, first, head, channels = _start(part, how)
    of = _Head(segments, x, taps, row, channels)

    def one(step: Any, _: Any) -> None:
        places = first + step * how.block + lax.iota(jnp.int32, how.block)
        total = of.summed([of.seen(places, back) for back in range(taps.shape[0])])
        found = total * lax.logistic(total)
        if part.scale is not None:
            found = found * (part.scale * lax.rsqrt(jnp.sum(found * found, axis=1, keepdims=True) + SMALL))
        at = out.at[row, places[:, None], head, lax.iota(jnp.int32, part.width)[None, :]]
        triton.store(at, found.astype(out.dtype), mask=_wide(places < x.shape[1], channels))

    lax.fori_loop(0, how.blocks, one, None)


def _backward(segments: Any, x: Any, taps: Any, slope: Any, *rest: Any, part: Part, how: How) -> None:
    """The gradients of a head's convolution of a span, and of its taps."""
    changes, of_taps = rest[-2:]
    row, first, head, channels = _start(part, how)
    of, count = _Head(segments, x, taps, row, channels), taps.shape[0]

    def one(step: Any, sums: Any) -> Any:
        places = first + step * how.block + lax.iota(jnp.int32, how.block)
        seen = [of.seen(places, back) for back in range(count)]
        mask = _wide(places < x.shape[1], channels)
        at = slope.at[row, places[:, None], head, lax.iota(jnp.int32, part.width)[None, :]]
        change = _sloped(of.summed(seen), triton.load(at, mask=mask, other=0.0).astype(jnp.float32), part.scale)
        triton.store(changes.at[row, places[:, None], channels[None, :]], change.astype(changes.dtype), mask=mask)
        return tuple(total + jnp.sum(change * inputs, axis=0) for total, inputs in zip(sums, seen))

    found = lax.fori_loop(0, how.blocks, one, (jnp.zeros(part.width, jnp.float32),) * count)
    for back, total in enumerate(found):
        of_taps[row, pl.program_id(1), count - 1 - back, pl.ds(head * part.width, part.width)] = total


def _sloped(total: jax.Array, given: jax.Array, scale: float | None) -> jax.Array:
    """Returns the gradient of the convolution from those of queries, keys or values."""
    share = lax.logistic(total)
    if scale is not None:
        found = total * share
        shrunk = lax.rsqrt(jnp.sum(found * found, axis=1, keepdims=True) + SMALL)
        unit = found * shrunk
        given = scale * shrunk * (given - unit * jnp.sum(unit * given, axis=1, keepdims=True))
    return given * (share + total * share * (1 - share))
