"""The gated delta rule on NVIDIA GPUs: Pallas kernels, compiled by Triton, that hold a state in registers over the chunks of a row.

The forward pass is two kernels. `_prepare`, a program a chunk, row and head, computes what needs no state: the decays, the scores and
the inverse. `_forward`, a program a row, head and block of the values' width, which are independent given those, goes over the
chunks. The backward pass is two more: `_reverse` goes over the chunks from the last one and writes the gradient of each chunk's last state,
and `_gradients`, a program a chunk, row and head, computes the gradients of the tokens from it, from the states before each chunk, which
the forward pass of a gradient keeps, and from the inverses. Gradients are those of `definition.py`, by jax.vjp inside the kernels.

Products are by tensor cores, of numbers in two parts each and with float32 sums: `_prepare`'s of TF32 parts, whose error is about 2^-21 of
the largest terms, the others' of bfloat16 parts, about 2^-17, which take half the registers.
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
from jaxrl_llm.kernels.delta_rule import definition
from jaxrl_llm.kernels.delta_rule.api import Call, State
from jaxrl_llm.kernels.delta_rule.definition import Links

RUNS_ON = ("gpu", "NVIDIA GPUs")
WIDTHS = (16, 32, 64, 128)


class How(NamedTuple):
    """How the kernels run.

    Attributes:
      columns: of the values' width, of one program.
      prepare: warps and stages of `_prepare`.
      over: those of `_forward` and `_reverse`.
      gradients: those of `_gradients`.
      inverting: precision of `_prepare`'s products.
      precision: that of the others'.
      interpret: runs the kernels by Pallas's interpreter.
    """

    columns: int = 32
    prepare: tuple[int, int] = (4, 1)
    over: tuple[int, int] = (4, 1)
    gradients: tuple[int, int] = (8, 1)
    inverting: Any = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    precision: Any = lax.DotAlgorithmPreset.BF16_BF16_F32_X3
    interpret: bool = False


HOW = How()


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if (dispatch.capability() or (0, 0)) < (9, 0):
        return "it runs on NVIDIA GPUs of compute capability 9.0 or more, for their shared memory"
    if call.key_width not in WIDTHS or call.value_width not in WIDTHS:
        return f"heads must be {', '.join(map(str, WIDTHS))} wide (got {call.key_width}, {call.value_width})"
    if not 16 <= call.size <= 64:
        return f"chunks must be of 16, 32 or 64 tokens (got {call.size})"
    largest = (
        call.rows * call.value_heads * call.tokens * max(call.key_width * call.value_width // call.size, call.key_width)
    )
    if largest >= 2**31:
        return f"states before chunks must be below 2**31 numbers (got {largest})"
    return None


def rule(
    tokens: tuple[jax.Array, ...], segments: Int[Array, "B T"], state: State, call: Call, how: How | None = None
) -> tuple[Float[Array, "B T Hv dv"], State]:
    """Computes as `delta_rule` states it, with the kernels of HOW where `how` is None."""
    places = (segments.astype(jnp.int32), definition.owners(segments, call.size).astype(jnp.int32))
    return _rule(call, HOW if how is None else how, tokens, places, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rule(call: Call, how: How, tokens: Any, places: Any, state: Any) -> Any:
    return run(call, how, tokens, prepared(call, how, tokens, places), state, keep=False)[:2]


def _rule_kept(call: Call, how: How, tokens: Any, places: Any, state: Any) -> Any:
    found = prepared(call, how, tokens, places)
    out, last, states = run(call, how, tokens, found, state, keep=True)
    return (out, last), (tokens, places, found, states)


def _rule_back(call: Call, how: How, kept: Any, of_found: Any) -> Any:
    tokens, places, found, states = kept
    of_states, of_start = slopes(call, how, tokens, found, of_found)
    return gradients(call, how, tokens, places, found, states, of_states, of_found[0]), (None, None), of_start


_rule.defvjp(_rule_kept, _rule_back)


def _call(body: Any, shapes: Any, grid: tuple[int, ...], size: tuple[int, int], how: How) -> Any:
    """A kernel with float32 outputs of `shapes`."""
    return pl.pallas_call(
        body,
        out_shape=tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
        grid=grid,
        compiler_params=triton.CompilerParams(num_warps=size[0], num_stages=size[1]),
        interpret=how.interpret,
        name=body.func.__name__.strip("_") + "_delta_rule",
    )


def prepared(call: Call, how: How, tokens: Any, places: Any) -> tuple[jax.Array, ...]:
    """Of every chunk seen, left, kept, the inverse and the scores: [B, chunks, Hv, ...]."""
    q, k, _, g, beta = tokens
    each = (call.rows, call.tokens // call.size, call.value_heads)
    vector, matrix = (*each, call.size), (*each, call.size, call.size)
    body = functools.partial(_prepare, call=call, how=how)
    found: tuple[jax.Array, ...] = _call(body, (vector, vector, each, matrix, matrix), each, how.prepare, how)(
        *places, q, k, g, beta
    )
    return found


def run(call: Call, how: How, tokens: Any, given: Any, state: Any, *, keep: bool) -> Any:
    """Outputs, the last state and, where `keep`, the state before each chunk."""
    q, k, v, _, beta = tokens
    states = ((call.rows, call.tokens // call.size, *state.shape[1:]),) if keep else ()
    grid = (call.rows, call.value_heads, call.value_width // min(how.columns, call.value_width))
    kernel = _call(
        functools.partial(_forward, call=call, how=how), (v.shape, state.shape, *states), grid, how.over, how
    )
    return kernel(q, k, v, beta, *given, state)


def slopes(call: Call, how: How, tokens: Any, given: Any, of_found: Any) -> Any:
    """The gradients of the state after each chunk [B, chunks, Hv, dk, dv], and of the first state."""
    (q, k, _, _, beta), (rows, heads) = tokens, (call.rows, call.value_heads)
    shape = (heads, call.key_width, call.value_width)
    kernel = _call(
        functools.partial(_reverse, call=call, how=how),
        ((rows, call.tokens // call.size, *shape), (rows, *shape)),
        (rows, heads, call.value_width // min(how.columns, call.value_width)),
        how.over,
        how,
    )
    return kernel(q, k, beta, *given, *of_found)


def gradients(
    call: Call, how: How, tokens: Any, places: Any, given: Any, states: Any, of_states: Any, of_out: Any
) -> tuple[jax.Array, ...]:
    """The gradients of q, k, v, g and beta."""
    q, _, v, g, beta = tokens
    wide = (*v.shape[:3], call.key_width)
    kernel = _call(
        functools.partial(_gradients, call=call, how=how),
        (wide, wide, v.shape, g.shape, beta.shape),
        (call.rows, call.tokens // call.size, call.value_heads),
        how.gradients,
        how,
    )
    of_q, of_k, *rest = kernel(*places, *tokens, *given, states, of_states, of_out)
    # Every value head gave gradients of the query and key head that it reads.
    of_q, of_k = (x.reshape(*q.shape[:3], -1, call.key_width).sum(axis=3) for x in (of_q, of_k))
    return of_q, of_k, *rest


# -- kernels -----------------------------------------------------------------------------------------------------------


def _prepare(segments: Any, owners: Any, q: Any, k: Any, g: Any, beta: Any, *out: Any, call: Call, how: How) -> None:
    """Links and inverse of one chunk."""
    row, chunk, head = (pl.program_id(axis) for axis in range(3))
    at, of = pl.ds(chunk * call.size, call.size), head // (call.value_heads // call.key_heads)
    qk = (q[row, at, of, :], k[row, at, of, :])
    found = definition.links(
        qk, g[row, at, head], beta[row, at, head], segments[row, at], owners[row, chunk], how.inverting
    )
    seen, left, kept, inverted, scores = out
    seen[row, chunk, head, :], left[row, chunk, head, :], kept[row, chunk, head] = found.seen, found.left, found.kept
    scores[row, chunk, head, :, :] = found.scores
    inverted[row, chunk, head, :, :] = definition.inverse(found.links, how.inverting)


def _loaded(refs: Any, row: Any, chunk: Any, head: Any) -> tuple[Links, jax.Array]:
    """What `_prepare` wrote of a chunk: links, where 0 stands for A, whose gradient needs the inverse alone; and the inverse."""
    seen, left, kept, inverted, scores = refs
    vectors = (seen[row, chunk, head, :], left[row, chunk, head, :], kept[row, chunk, head])
    known = inverted[row, chunk, head, :, :]
    return Links(*vectors, jnp.zeros_like(known), scores[row, chunk, head, :, :]), known


def _forward(q: Any, k: Any, v: Any, beta: Any, *rest: Any, call: Call, how: How) -> None:
    """All chunks of a row and head, for a block of the values' columns."""
    *prepared, start, out, last = rest[:8]
    row, head, block = (pl.program_id(axis) for axis in range(3))
    wide = min(how.columns, call.value_width)
    columns, of = pl.ds(block * wide, wide), head // (call.value_heads // call.key_heads)

    def one(chunk: Any, state: Any) -> Any:
        for states in rest[8:]:
            states[row, chunk, head, :, columns] = state
        at = pl.ds(chunk * call.size, call.size)
        qkv = (q[row, at, of, :], k[row, at, of, :], v[row, at, head, columns])
        found, known = _loaded(prepared, row, chunk, head)
        found, state = definition.advance(qkv, beta[row, at, head], found, known, state, how.precision)
        out[row, at, head, columns] = found
        return state

    last[row, head, :, columns] = lax.fori_loop(0, call.tokens // call.size, one, start[row, head, :, columns])


def _reverse(q: Any, k: Any, beta: Any, *rest: Any, call: Call, how: How) -> None:
    """The gradients of the states after all chunks, and of the one before the first, for a block of the values' columns."""
    *prepared, of_out, of_last, of_states, of_start = rest
    row, head, block = (pl.program_id(axis) for axis in range(3))
    wide = min(how.columns, call.value_width)
    columns, of = pl.ds(block * wide, wide), head // (call.value_heads // call.key_heads)
    chunks = call.tokens // call.size

    def one(step: Any, slope: Any) -> Any:
        chunk = chunks - 1 - step
        of_states[row, chunk, head, :, columns] = slope
        at = pl.ds(chunk * call.size, call.size)
        qkv = (q[row, at, of, :], k[row, at, of, :], jnp.zeros((call.size, wide), jnp.float32))
        found, known = _loaded(prepared, row, chunk, head)
        strength = beta[row, at, head]
        _, pull = jax.vjp(
            lambda s: definition.advance(qkv, strength, found, known, s, how.precision), jnp.zeros_like(slope)
        )
        return pull((of_out[row, at, head, columns], slope))[0]

    of_start[row, head, :, columns] = lax.fori_loop(0, chunks, one, of_last[row, head, :, columns])


def _gradients(segments: Any, owners: Any, q: Any, k: Any, v: Any, g: Any, *rest: Any, call: Call, how: How) -> None:
    """The gradients of one chunk's tokens, from the state before it and the gradients of its outputs and of the state after it."""
    beta, *prepared, states, of_states, of_out = rest[:9]
    of_q, of_k, of_v, of_g, of_beta = rest[9:]
    row, chunk, head = (pl.program_id(axis) for axis in range(3))
    at, of = pl.ds(chunk * call.size, call.size), head // (call.value_heads // call.key_heads)
    wide = min(how.columns, call.value_width)

    def one(block: Any, sums: Any) -> Any:
        """Adds the gradients by a block of the values' columns, which no other block's values enter."""
        columns = pl.ds(block * wide, wide)
        state = states[row, chunk, head, :, columns]
        found, known = _loaded(prepared, row, chunk, head)

        def results(q: Any, k: Any, beta: Any, found: Links, v: Any) -> Any:
            return definition.advance((q, k, v), beta, found, known, state, how.precision)

        tokens = (q[row, at, of, :], k[row, at, of, :], beta[row, at, head], found, v[row, at, head, columns])
        *slopes, of_v[row, at, head, columns] = jax.vjp(results, *tokens)[1](
            (of_out[row, at, head, columns], of_states[row, chunk, head, :, columns])
        )
        return jax.tree.map(jnp.add, sums, tuple(slopes))

    f32 = functools.partial(jnp.zeros, dtype=jnp.float32)
    wide_zeros, vector, matrix = f32((call.size, call.key_width)), f32(call.size), f32((call.size, call.size))
    zeros = (wide_zeros, wide_zeros, vector, Links(vector, vector, f32(()), matrix, matrix))
    by_q, by_k, by_beta, by_found = lax.fori_loop(0, call.value_width // wide, one, zeros)
    # The links are computed again here, and not before the loop, where registers are few.
    segment, owner = segments[row, at], owners[row, chunk]
    tokens = (q[row, at, of, :], k[row, at, of, :], g[row, at, head], beta[row, at, head])
    linked = lambda q, k, g, beta: definition.links((q, k), g, beta, segment, owner, how.precision)  # noqa: E731
    of_links = jax.vjp(linked, *tokens)[1](by_found)
    of_q[row, at, head, :], of_k[row, at, head, :] = by_q + of_links[0], by_k + of_links[1]
    of_g[row, at, head], of_beta[row, at, head] = of_links[2], by_beta + of_links[3]
