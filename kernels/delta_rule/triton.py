"""The gated delta rule on NVIDIA GPUs: Pallas kernels, compiled by Triton; two go over the chunks of a row, with a state in registers.

Forward, `_local`, a program a chunk, row and head, computes what needs no state: links, inverse, W = (I + A)^-1 [beta_i exp(G_i) k_i] and
V = (I + A)^-1 [beta_i v_i]. `_states`, a program a row, head and block of the values' columns, which are independent given those, goes
over the chunks with two products each, and keeps each chunk's state and updates V - W S. `_outputs`, a program a chunk, row and head, computes
the outputs from them. Backward, `_slopes` goes over the chunks from the last one and keeps the gradients of each chunk's updates and of the state
after it. From them, a program a chunk, row and head, `_sides` computes the gradients of the links, the scores and what the inverse is multiplied
with, and `_gradients` those of the tokens. Products are by tensor cores, of numbers in bfloat16 parts with float32 sums. Widths are taken
in strips: whole operands would exceed a program's registers.
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

RUNS_ON = ("gpu", "NVIDIA GPUs")
WIDTHS = (16, 32, 64, 128)
_ALL = slice(None)


class How(NamedTuple):
    """How the kernels run.

    Attributes:
      columns: of the values' width, of one program of `_states` and `_slopes`.
      strip: columns of a step of the others' loops.
      local: warps and stages of `_local`.
      over: those of `_states` and `_slopes`.
      outputs: those of `_outputs`.
      sides: those of `_sides`.
      gradients: those of `_gradients`.
      inverting: precision of `_local`'s products: of three bfloat16 parts, with an error of about 2^-24 of the largest terms.
      precision: that of the others': of two, about 2^-17.
      interpret: runs the kernels by Pallas's interpreter.
    """

    columns: int = 32
    strip: int = 32
    local: tuple[int, int] = (4, 1)
    over: tuple[int, int] = (4, 1)
    outputs: tuple[int, int] = (4, 1)
    sides: tuple[int, int] = (8, 1)
    gradients: tuple[int, int] = (8, 1)
    inverting: Any = lax.DotAlgorithmPreset.BF16_BF16_F32_X6
    precision: Any = lax.DotAlgorithmPreset.BF16_BF16_F32_X3
    interpret: bool = False


HOW = How()


class Parts(NamedTuple):
    """What `_local` computes of every chunk, [B, chunks, Hv, ...]: of definition.Links, W, V, and the inverse of I + A."""

    seen: jax.Array
    left: jax.Array
    kept: jax.Array
    scores: jax.Array
    seeing: jax.Array
    values: jax.Array
    inverted: jax.Array


class Sides(NamedTuple):
    """Gradients that `_sides` computes: of the values, and [B, chunks, Hv, ...] of [beta_i exp(G_i) k_i], the links, the scores, the
    strengths by the values alone, and the share of a state that is kept.
    """

    values: Any
    keys: Any
    links: Any
    scores: Any
    strength: Any
    kept: Any


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if (dispatch.capability() or (0, 0)) < (9, 0):
        return "it runs on NVIDIA GPUs of compute capability 9.0 or more, for their shared memory"
    if call.key_width not in WIDTHS or call.value_width not in WIDTHS:
        return f"heads must be {', '.join(map(str, WIDTHS))} wide (got {call.key_width}, {call.value_width})"
    if not 16 <= call.size <= 64:
        return f"chunks must be of 16, 32 or 64 tokens (got {call.size})"
    return None


def rule(
    tokens: tuple[jax.Array, ...], segments: Int[Array, "B T"], state: State, call: Call, how: How | None = None
) -> tuple[Float[Array, "B T Hv dv"], State]:
    """Computes the rule as defined by `delta_rule`, with the kernels of HOW where `how` is None."""
    places = (segments.astype(jnp.int32), definition.owners(segments, call.size).astype(jnp.int32))
    return _rule(call, HOW if how is None else how, tokens, places, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rule(call: Call, how: How, tokens: Any, places: Any, state: Any) -> Any:
    return _rule_kept(call, how, tokens, places, state)[0]


def _rule_kept(call: Call, how: How, tokens: Any, places: Any, state: Any) -> Any:
    parts = local(call, how, tokens, places)
    *run, last = states(call, how, tokens[1], parts, state)
    return (outputs(call, how, tokens[0], parts, run), last), (tokens, places, parts, run)


def _rule_back(call: Call, how: How, residual: Any, of_found: Any) -> Any:
    tokens, places, parts, run = residual
    *of_run, of_start = slopes(call, how, tokens, parts, of_found)
    run = (*run, *of_run, of_found[0])
    found = sides(call, how, tokens, parts, run)
    of_q, of_k, *rest = gradients(call, how, tokens, places, found, run)
    return (of_q, of_k, found.values, *rest), (None, None), of_start


_rule.defvjp(_rule_kept, _rule_back)


# -- calls of the kernels ----------------------------------------------------------------------------------------------


def _call(body: Any, call: Call, how: How, shapes: Any, grid: tuple[int, ...], size: tuple[int, int]) -> Any:
    """Returns a kernel with float32 outputs of `shapes`."""
    return pl.pallas_call(
        functools.partial(body, call=call, how=how),
        out_shape=tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
        grid=grid,
        compiler_params=triton.CompilerParams(num_warps=size[0], num_stages=size[1]),
        interpret=how.interpret,
        name=body.__name__.strip("_") + "_delta_rule",
    )


def _each(call: Call) -> tuple[int, int, int]:
    return call.rows, call.tokens // call.size, call.value_heads


def _blocks(call: Call, how: How) -> tuple[int, int, int]:
    return call.rows, call.value_heads, call.value_width // min(how.columns, call.value_width)


def local(call: Call, how: How, tokens: Any, places: Any) -> Parts:
    """Computes what needs no state."""
    each, size = _each(call), call.size
    widths = ((size,), (size,), (), (size, size), (size, call.key_width), (size, call.value_width), (size, size))
    found = _call(_local, call, how, [(*each, *width) for width in widths], each, how.local)(*places, *tokens)
    return Parts(*found)


def states(call: Call, how: How, k: Any, parts: Parts, start: Any) -> Any:
    """Computes the state before each chunk [B, chunks, Hv, dk, dv], its updates [B, chunks, Hv, c, dv], and the last state."""
    each = _each(call)
    shapes = ((*each, *start.shape[2:]), (*each, call.size, call.value_width), start.shape)
    kernel = _call(_states, call, how, shapes, _blocks(call, how), how.over)
    return kernel(k, parts.left, parts.kept, parts.seeing, parts.values, start)


def outputs(call: Call, how: How, q: Any, parts: Parts, run: Any) -> Any:
    """Computes the outputs [B, T, Hv, dv]."""
    shape = (call.rows, call.tokens, call.value_heads, call.value_width)
    (out,) = _call(_outputs, call, how, [shape], _each(call), how.outputs)(q, parts.seen, parts.scores, *run)
    return out


def slopes(call: Call, how: How, tokens: Any, parts: Parts, of_found: Any) -> Any:
    """Computes the gradients of the state after each chunk [B, chunks, Hv, dk, dv], of its updates, and of the first state."""
    (q, k, *_), each = tokens, _each(call)
    first = (call.rows, call.value_heads, call.key_width, call.value_width)
    shapes = ((*each, *first[2:]), (*each, call.size, call.value_width), first)
    kernel = _call(_slopes, call, how, shapes, _blocks(call, how), how.over)
    return kernel(q, k, parts.seen, parts.left, parts.kept, parts.scores, parts.seeing, *of_found)


def sides(call: Call, how: How, tokens: Any, parts: Parts, run: Any) -> Sides:
    """Computes the gradients of the links and of what the inverse is multiplied with."""
    (_, _, v, _, beta), each, size = tokens, _each(call), call.size
    widths = ((size, call.key_width), (size, size), (size, size), (size,), ())
    shapes = (v.shape, *((*each, *width) for width in widths))
    return Sides(*_call(_sides, call, how, shapes, each, how.sides)(v, beta, *parts, *run))


def gradients(call: Call, how: How, tokens: Any, places: Any, found: Sides, run: Any) -> tuple[jax.Array, ...]:
    """Computes the gradients of q, k, g and beta."""
    q, k, v, g, beta = tokens
    states, updates, of_states, _, of_out = run
    wide = (*v.shape[:3], call.key_width)
    kernel = _call(_gradients, call, how, (wide, wide, g.shape, beta.shape), _each(call), how.gradients)
    of_q, of_k, *rest = kernel(*places, q, k, g, beta, *found[1:], states, updates, of_states, of_out)
    # Every value head gave gradients of the query and key head that it reads.
    of_q, of_k = (x.reshape(*q.shape[:3], -1, call.key_width).sum(axis=3) for x in (of_q, of_k))
    return of_q, of_k, *rest


# -- kernels -----------------------------------------------------------------------------------------------------------


def _chunk(call: Call) -> tuple[Any, Any, Any]:
    """Returns a program's chunk: its place in arrays of chunks, its tokens, and its key head."""
    row, chunk, head = (pl.program_id(axis) for axis in range(3))
    return (row, chunk, head), pl.ds(chunk * call.size, call.size), head // (call.value_heads // call.key_heads)


def _columns(call: Call, how: How, block: Any) -> Any:
    wide = min(how.columns, call.value_width)
    return pl.ds(block * wide, wide)


def _over(width: int, strip: int, add: Any, start: Any) -> Any:
    """Runs `add(strip of the width, sums)` over all strips."""
    wide = min(strip, width)
    return lax.fori_loop(0, width // wide, lambda index, sums: add(pl.ds(index * wide, wide), sums), start)


def _products(q: Any, k: Any, row: Any, tokens: Any, of: Any, wide: int, precision: Any) -> tuple[jax.Array, jax.Array]:
    """Returns <q_i, k_j> and <k_i, k_j> of a chunk's tokens."""

    def add(strip: Any, sums: Any) -> Any:
        keys = k[row, tokens, of, strip]
        return tuple(
            x + definition.dot(y, keys, precision, (1, 1)) for x, y in zip(sums, (q[row, tokens, of, strip], keys))
        )

    zero = jnp.zeros((tokens.size, tokens.size), jnp.float32)
    found: tuple[jax.Array, jax.Array] = _over(q.shape[-1], wide, add, (zero, zero))
    return found


def _local(
    segments: Any, owners: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, *out: Any, call: Call, how: How
) -> None:
    """Links, inverse, W and V of one chunk."""
    at, tokens, of = _chunk(call)
    (row, chunk, head), parts = at, Parts(*out)
    strength = beta[row, tokens, head]
    products = _products(q, k, row, tokens, of, how.strip, how.inverting)
    placed = segments[row, tokens], owners[row, chunk], how.inverting
    found = definition.links(*products, g[row, tokens, head], strength, *placed)
    known = definition.inverse(found.links, how.inverting)
    parts.seen[(*at, _ALL)], parts.left[(*at, _ALL)], parts.kept[at] = found.seen, found.left, found.kept
    parts.scores[(*at, _ALL, _ALL)], parts.inverted[(*at, _ALL, _ALL)] = found.scores, known
    weights = strength * found.seen

    def keys(strip: Any, _: Any) -> None:
        side = weights[:, None] * k[row, tokens, of, strip]
        parts.seeing[(*at, _ALL, strip)] = definition.dot(known, side, how.inverting)

    def values(strip: Any, _: Any) -> None:
        side = strength[:, None] * v[row, tokens, head, strip]
        parts.values[(*at, _ALL, strip)] = definition.dot(known, side, how.inverting)

    _over(call.key_width, how.strip, keys, None)
    _over(call.value_width, how.strip, values, None)


def _states(
    k: Any, left: Any, kept: Any, seeing: Any, values: Any, start: Any, *out: Any, call: Call, how: How
) -> None:
    """All chunks of a row and head, for a block of the values' columns."""
    states, updates, last = out
    row, head, block = (pl.program_id(axis) for axis in range(3))
    columns, of = _columns(call, how, block), head // (call.value_heads // call.key_heads)

    def one(chunk: Any, state: Any) -> Any:
        at = (row, chunk, head)
        states[(*at, _ALL, columns)] = state
        seen = definition.dot(seeing[(*at, _ALL, _ALL)], state, how.precision)
        update = values[(*at, _ALL, columns)] - seen
        updates[(*at, _ALL, columns)] = update
        keys = left[(*at, _ALL)][:, None] * k[row, pl.ds(chunk * call.size, call.size), of, :]
        return kept[at] * state + definition.dot(keys, update, how.precision, (0, 0))

    last[row, head, :, columns] = lax.fori_loop(0, call.tokens // call.size, one, start[row, head, :, columns])


def _outputs(q: Any, seen: Any, scores: Any, states: Any, updates: Any, out: Any, *, call: Call, how: How) -> None:
    """The outputs of one chunk."""
    at, tokens, of = _chunk(call)
    row, _, head = at
    asked = seen[(*at, _ALL)][:, None] * q[row, tokens, of, :]
    near = scores[(*at, _ALL, _ALL)]

    def values(strip: Any, _: Any) -> None:
        part = (*at, _ALL, strip)
        far = definition.dot(asked, states[part], how.precision)
        out[row, tokens, head, strip] = far + definition.dot(near, updates[part], how.precision)

    _over(call.value_width, how.strip, values, None)


def _slopes(q: Any, k: Any, seen: Any, left: Any, kept: Any, *rest: Any, call: Call, how: How) -> None:
    """The gradients of all states and updates of a row and head, for a block of the values' columns."""
    scores, seeing, of_out, of_last, of_states, of_updates, of_start = rest
    row, head, block = (pl.program_id(axis) for axis in range(3))
    columns, of = _columns(call, how, block), head // (call.value_heads // call.key_heads)
    dot, chunks = functools.partial(definition.dot, precision=how.precision), call.tokens // call.size

    def one(step: Any, slope: Any) -> Any:
        chunk = chunks - 1 - step
        at, tokens = (row, chunk, head), pl.ds(chunk * call.size, call.size)
        of_states[(*at, _ALL, columns)] = slope
        given = of_out[row, tokens, head, columns]
        keys = left[(*at, _ALL)][:, None] * k[row, tokens, of, :]
        change = dot(scores[(*at, _ALL, _ALL)], given, axes=(0, 0)) + dot(keys, slope)
        of_updates[(*at, _ALL, columns)] = change
        asked = seen[(*at, _ALL)][:, None] * q[row, tokens, of, :]
        through = dot(asked, given, axes=(0, 0)) - dot(seeing[(*at, _ALL, _ALL)], change, axes=(0, 0))
        return kept[at] * slope + through

    of_start[row, head, :, columns] = lax.fori_loop(0, chunks, one, of_last[row, head, :, columns])


def _sides(v: Any, beta: Any, *rest: Any, call: Call, how: How) -> None:
    """The gradients of one chunk's links and scores, of what the inverse is multiplied with, and of the values."""
    parts, (states, updates, of_states, of_updates, of_out), out = Parts(*rest[:7]), rest[7:12], Sides(*rest[12:])
    at, tokens, _ = _chunk(call)
    row, _, head = at
    dot, whole = functools.partial(definition.dot, precision=how.precision), (*at, _ALL, _ALL)
    known = parts.inverted[whole]

    def by_values(strip: Any, sums: Any) -> Any:
        part = (*at, _ALL, strip)
        side = dot(known, of_updates[part], axes=(0, 0))
        out.values[row, tokens, head, strip] = beta[row, tokens, head][:, None] * side
        links = -dot(side, parts.values[part], axes=(1, 1))
        scores = dot(of_out[row, tokens, head, strip], updates[part], axes=(1, 1))
        strength = jnp.sum(side * v[row, tokens, head, strip], axis=1)
        return jax.tree.map(jnp.add, sums, (links, scores, strength, jnp.sum(states[part] * of_states[part])))

    def by_keys(strip: Any, links: Any) -> Any:
        part = (*at, _ALL, strip)
        of_seeing = -dot(of_updates[whole], states[(*at, strip, _ALL)], axes=(1, 1))
        out.keys[part] = side = dot(known, of_seeing, axes=(0, 0))
        return links - dot(side, parts.seeing[part], axes=(1, 1))

    zero = functools.partial(jnp.zeros, dtype=jnp.float32)
    square, vector = zero((call.size, call.size)), zero(call.size)
    links, out.scores[whole], out.strength[(*at, _ALL)], out.kept[at] = _over(
        call.value_width, how.strip, by_values, (square, square, vector, zero(()))
    )
    out.links[whole] = _over(call.key_width, how.strip, by_keys, links)


def _gradients(segments: Any, owners: Any, q: Any, k: Any, g: Any, beta: Any, *rest: Any, call: Call, how: How) -> None:
    """The gradients of one chunk's queries, keys, decays and strengths."""
    sides, (states, updates, of_states, of_out) = Sides(None, *rest[:5]), rest[5:9]
    of_q, of_k, of_g, of_beta = rest[9:]
    at, tokens, of = _chunk(call)
    row, chunk, head = at
    dot, strength = functools.partial(definition.dot, precision=how.precision), beta[row, tokens, head]
    line, column = (lax.broadcasted_iota(jnp.int32, (call.size, call.size), axis) for axis in (0, 1))
    decay, seen = definition.decays(g[row, tokens, head], segments[row, tokens], owners[row, chunk], how.precision)
    asked, alike = _products(q, k, row, tokens, of, how.strip, how.precision)
    of_scores, of_links = sides.scores[(*at, _ALL, _ALL)], sides.links[(*at, _ALL, _ALL)]
    of_near = jnp.where(line > column, decay * of_links, 0.0)  # of beta_i <k_i, k_j>
    by_strength = jnp.sum(of_near * alike, axis=1)
    of_asked, of_alike = decay * of_scores, strength[:, None] * of_near
    # Of g_{j+1} + ... + g_i, then of each of them.
    of_sums = of_asked * asked + of_alike * alike
    of_later = dot(jnp.where(line >= column, 1.0, 0.0), of_sums, axes=(0, 0))
    by_decay = jnp.sum(jnp.where(line > column, of_later, 0.0), axis=1)
    left = jnp.sum(jnp.where(line == call.size - 1, decay, 0.0), axis=0)

    def by_keys(strip: Any, sums: Any) -> Any:
        part, keys = (*at, strip, _ALL), k[row, tokens, of, strip]
        far = dot(of_out[row, tokens, head, :], states[part], axes=(1, 1))
        of_q[row, tokens, head, strip] = seen[:, None] * far + dot(of_asked, keys)
        last = dot(updates[(*at, _ALL, _ALL)], of_states[part], axes=(1, 1))
        side = sides.keys[(*at, _ALL, strip)]
        through = (
            dot(of_asked, q[row, tokens, of, strip], axes=(0, 0))
            + dot(of_alike, keys)
            + dot(of_alike, keys, axes=(0, 0))
        )
        of_k[row, tokens, head, strip] = left[:, None] * last + (strength * seen)[:, None] * side + through
        of_asking = jnp.sum(far * q[row, tokens, of, strip], axis=1)
        return jax.tree.map(jnp.add, sums, (of_asking, jnp.sum(last * keys, axis=1), jnp.sum(side * keys, axis=1)))

    of_seen, of_left, side = _over(call.key_width, how.strip, by_keys, (jnp.zeros(call.size, jnp.float32),) * 3)
    of_beta[row, tokens, head] = by_strength + sides.strength[(*at, _ALL)] + seen * side
    of_seen += strength * side + jnp.where(lax.iota(jnp.int32, call.size) == call.size - 1, sides.kept[at], 0.0)
    by_seen = jnp.sum(jnp.where(line >= column, (of_seen * seen)[:, None], 0.0), axis=0)
    by_left = jnp.sum(jnp.where(line > column, (of_left * left)[None, :], 0.0), axis=1)
    of_g[row, tokens, head] = by_decay + by_seen + by_left
