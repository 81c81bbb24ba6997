"""The gated delta rule on NVIDIA GPUs: Pallas kernels, compiled by Triton; two go over the chunks of a row, with a state in registers.

Forward, `_local`, a program a chunk, row and head, computes what needs no state: decays, links, inverse, W = (I + A)^-1 [beta_i exp(G_i) k_i]
and V = (I + A)^-1 [beta_i v_i]. `_states`, a program a row, head and block of the values' columns, which are independent given those, goes
over the chunks with two products each, and keeps each chunk's state and updates V - W S. `_outputs`, a program a chunk, row and head, computes
the outputs from them. Backward, `_slopes` goes over the chunks from the last one and keeps the gradients of each chunk's updates and of the state
after it. From them, a program a chunk, row and head, `_sides` computes the gradients of links, scores, values and strengths, and
`_gradients` the rest of those of the tokens. Widths are taken in strips: whole operands would exceed a program's registers.

Products are by tensor cores, of bfloat16 with float32 sums. A number in float32 is the sum of its limbs in bfloat16; the kernel that computes
what is only multiplied later writes its limbs, along a leading axis. Queries, keys and values in bfloat16 are their own single limb.
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
_LIMB = jnp.bfloat16
Limbs = tuple[jax.Array, ...]


class Size(NamedTuple):
    """How a kernel runs.

    Attributes:
      wide: columns of a step of its loops, or of the values' width of a program of `_states` and `_slopes`.
      warps: of a program.
      stages: of its loops' loads.
    """

    wide: int
    warps: int = 4
    stages: int = 1


class How(NamedTuple):
    """How the kernels run.

    Attributes:
      local: size of the kernel of that name, and so on.
      limbs: of a float32 number; two have an error of about 2^-17 of the number, three of 2^-24.
      interpret: runs the kernels by Pallas's interpreter.
    """

    local: Size = Size(64)
    states: Size = Size(64)
    outputs: Size = Size(64)
    slopes: Size = Size(64, 8, 2)
    sides: Size = Size(64)
    gradients: Size = Size(32, 4, 2)
    limbs: int = 2
    interpret: bool = False


HOW = How()


class Parts(NamedTuple):
    """What `_local` computes of every chunk, [B, chunks, Hv, ...], and those with limbs [limbs, B, chunks, Hv, ...].

    Attributes:
      seen: of definition.Links, as those up to `scores`, which has limbs.
      seeing: W, in limbs.
      values: V, in limbs.
      inverted: the inverse of I + A, in limbs.
    """

    seen: Any
    left: Any
    kept: Any
    decay: Any
    near: Any
    scores: Any
    seeing: Any
    values: Any
    inverted: Any


class Sides(NamedTuple):
    """What `_sides` computes, [B, chunks, Hv, ...] but for the values.

    Attributes:
      values: gradients of the values.
      keys: gradients of [beta_i exp(G_i) k_i].
      asked: gradients of <q_i, k_j>, in limbs.
      alike: gradients of <k_i, k_j>, added to their transpose, in limbs.
      strength: gradients of the strengths by the values and the links.
      decay: gradients of the logarithms of the decays by scores and links.
    """

    values: Any
    keys: Any
    asked: Any
    alike: Any
    strength: Any
    decay: Any


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
    taken = _taken(tokens, how)
    parts = local(call, how, taken, places)
    *run, last = states(call, how, taken[1], parts, state)
    return (outputs(call, how, taken[0], parts, run), last), (tokens, parts, run)


def _rule_back(call: Call, how: How, residual: Any, of_found: Any) -> Any:
    (tokens, parts, run), (of_out, of_last) = residual, of_found
    taken, of_out = _taken(tokens, how), _whole(of_out, how.limbs)
    *of_run, of_start = slopes(call, how, taken, parts, of_out, of_last)
    run, dtype = (*run, *of_run, of_out), tokens[0].dtype
    found = sides(call, how, taken, parts, run, dtype)
    of_q, of_k, *rest = gradients(call, how, taken, parts, found, run, dtype)
    return (of_q, of_k, found.values, *rest), (None, None), of_start


_rule.defvjp(_rule_kept, _rule_back)


def _taken(tokens: Any, how: How) -> Any:
    """Returns queries, keys and values in limbs, decays and strengths."""
    q, k, v, g, beta = tokens
    return *(_whole(x, how.limbs) for x in (q, k, v)), g, beta


def _whole(x: jax.Array, count: int) -> jax.Array:
    """Returns the limbs of an array along a leading axis."""
    if x.dtype == _LIMB:
        return x[None]
    found = []
    for _ in range(count):
        # Not by astype alone, which XLA may take for no rounding at all.
        found.append(lax.reduce_precision(x, 8, 7))
        x = x - found[-1]
    return jnp.stack(found).astype(_LIMB)


# -- calls of the kernels ----------------------------------------------------------------------------------------------


def _call(body: Any, call: Call, how: How, shapes: Any, size: Size, blocks: bool = False) -> Any:
    """Returns a kernel with outputs of `shapes`, of a program for each chunk, row and head, or each row, head and block of the values' columns."""
    wide = min(size.wide, call.value_width)
    grid = (call.rows, call.value_heads, call.value_width // wide) if blocks else _each(call)
    return pl.pallas_call(
        functools.partial(body, call=call, limbs=how.limbs, wide=size.wide),
        out_shape=tuple(shapes),
        grid=grid,
        compiler_params=triton.CompilerParams(num_warps=size.warps, num_stages=size.stages),
        interpret=how.interpret,
        name=body.__name__.strip("_") + "_delta_rule",
    )


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _in_limbs(how: How, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((how.limbs, *shape), _LIMB)


def _each(call: Call) -> tuple[int, int, int]:
    return call.rows, call.tokens // call.size, call.value_heads


def local(call: Call, how: How, tokens: Any, places: Any) -> Parts:
    """Computes what needs no state."""
    each, size = _each(call), call.size
    shapes = (
        *(_f32(*each, *width) for width in ((size,), (size,), (), (size, size), (size, size))),
        *(_in_limbs(how, *each, size, width) for width in (size, call.key_width, call.value_width, size)),
    )
    return Parts(*_call(_local, call, how, shapes, how.local)(*places, *tokens))


def states(call: Call, how: How, k: Any, parts: Parts, start: Any) -> Any:
    """Computes the state before each chunk [limbs, B, chunks, Hv, dk, dv], its updates [limbs, B, chunks, Hv, c, dv], and the last state."""
    each = _each(call)
    wide = (_in_limbs(how, *each, width, call.value_width) for width in (call.key_width, call.size))
    kernel = _call(_states, call, how, (*wide, _f32(*start.shape)), how.states, True)
    return kernel(k, parts.left, parts.kept, parts.seeing, parts.values, start)


def outputs(call: Call, how: How, q: Any, parts: Parts, run: Any) -> Any:
    """Computes the outputs [B, T, Hv, dv]."""
    shape = _f32(call.rows, call.tokens, call.value_heads, call.value_width)
    (out,) = _call(_outputs, call, how, [shape], how.outputs)(q, parts.seen, parts.scores, *run)
    return out


def slopes(call: Call, how: How, tokens: Any, parts: Parts, of_out: Any, of_last: Any) -> Any:
    """Computes the gradients of the state after each chunk [limbs, B, chunks, Hv, dk, dv], of its updates, and of the first state."""
    (q, k, *_), each = tokens, _each(call)
    wide = (_in_limbs(how, *each, width, call.value_width) for width in (call.key_width, call.size))
    # Loads of tokens in two limbs fit into shared memory once.
    size = how.slopes if q.shape[0] == 1 else how.slopes._replace(stages=1)
    kernel = _call(_slopes, call, how, (*wide, _f32(*of_last.shape)), size, True)
    return kernel(q, k, parts.seen, parts.left, parts.kept, parts.scores, parts.seeing, of_out, of_last)


def sides(call: Call, how: How, tokens: Any, parts: Parts, run: Any, dtype: Any) -> Sides:
    """Computes the gradients of the links and of what the inverse is multiplied with."""
    (_, _, v, _, beta), each, size, (before, updates, _, of_updates, of_out) = tokens, _each(call), call.size, run
    square = _in_limbs(how, *each, size, size)
    shapes = (
        jax.ShapeDtypeStruct(v.shape[1:], dtype), _f32(*each, size, call.key_width), square, square,
        _f32(*each, size), _f32(*each, size),
    )  # fmt: skip
    kernel = _call(_sides, call, how, shapes, how.sides)
    return Sides(*kernel(v, beta, *parts[3:], before, updates, of_updates, of_out))


def gradients(
    call: Call, how: How, tokens: Any, parts: Parts, found: Sides, run: Any, dtype: Any
) -> tuple[jax.Array, ...]:
    """Computes the gradients of q, k, g and beta."""
    (q, k, _, g, beta), (before, updates, of_states, _, of_out) = tokens, run
    shared = call.value_heads > call.key_heads
    wide = jax.ShapeDtypeStruct((*g.shape, call.key_width), jnp.float32 if shared else dtype)
    kernel = _call(_gradients, call, how, (wide, wide, g, beta), how.gradients)
    of_q, of_k, *rest = kernel(q, k, parts.seen, parts.left, beta, *found[1:], before, updates, of_states, of_out)
    if shared:  # every value head gave gradients of the query and key head that it reads
        of_q, of_k = (x.reshape(*k.shape[1:4], -1, x.shape[-1]).sum(axis=3).astype(dtype) for x in (of_q, of_k))
    return of_q, of_k, *rest


# -- kernels -----------------------------------------------------------------------------------------------------------


def _chunk(call: Call) -> tuple[Any, Any, Any]:
    """Returns a program's chunk: its place in arrays of chunks, its tokens, and its key head."""
    row, chunk, head = (pl.program_id(axis) for axis in range(3))
    return (row, chunk, head), pl.ds(chunk * call.size, call.size), head // (call.value_heads // call.key_heads)


def _columns(call: Call, wide: int, block: Any) -> Any:
    wide = min(wide, call.value_width)
    return pl.ds(block * wide, wide)


def _over(width: int, strip: int, add: Any, start: Any) -> Any:
    """Runs `add(strip of the width, sums)` over all strips."""
    wide = min(strip, width)
    return lax.fori_loop(0, width // wide, lambda index, sums: add(pl.ds(index * wide, wide), sums), start)


def _limbs(x: jax.Array, count: int) -> Limbs:
    """Returns bfloat16 numbers whose sum is `x`, the largest first."""
    found = []
    for _ in range(count):
        found.append(x.astype(_LIMB))
        x = x - found[-1].astype(jnp.float32)
    return tuple(found)


def _take(source: Any, at: Any, count: int) -> Limbs:
    """Reads the first limbs of a part of an array."""
    return tuple(source[(limb, *at)] for limb in range(min(source.shape[0], count)))


def _put(target: Any, at: Any, limbs: Limbs) -> None:
    for limb, part in enumerate(limbs):
        target[(limb, *at)] = part


def _sum(limbs: Limbs) -> jax.Array:
    """Returns the numbers that limbs stand for, adding the smallest first."""
    return functools.reduce(jnp.add, [x.astype(jnp.float32) for x in reversed(limbs)])


def _dot(a: Limbs, b: Limbs, axes: tuple[int, int] = (1, 0), start: jax.Array | None = None) -> jax.Array:
    """Returns `start` and the product of two matrices that sums over `axes`, but for products of limbs below the last limb."""
    count, found = max(len(a), len(b)), start
    for place in reversed(range(count)):
        for first in range(max(0, place - len(b) + 1), min(place + 1, len(a))):
            one = definition.dot(a[first], b[place - first], None, axes)
            found = one if found is None else found + one
    assert found is not None
    return found


def _local(
    segments: Any, owners: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, *out: Any, call: Call, limbs: int, wide: int
) -> None:
    """Decays, links, inverse, W and V of one chunk."""
    at, tokens, of = _chunk(call)
    (row, chunk, head), parts = at, Parts(*out)
    strength, whole = beta[row, tokens, head], (*at, _ALL, _ALL)

    def products(strip: Any, sums: Any) -> Any:
        queries, keys = (_take(x, (row, tokens, of, strip), limbs) for x in (q, k))
        return _dot(queries, keys, (1, 1), sums[0]), _dot(keys, keys, (1, 1), sums[1])

    zero = jnp.zeros((call.size, call.size), jnp.float32)
    asked, alike = _over(call.key_width, wide, products, (zero, zero))
    placed = segments[row, tokens], owners[row, chunk]
    found = definition.links(
        asked, alike, g[row, tokens, head], *placed, lambda a, b: _dot(_limbs(a, 1), _limbs(b, limbs))
    )
    # Written before the inverse, which needs the registers.
    parts.seen[(*at, _ALL)], parts.left[(*at, _ALL)], parts.kept[at] = found.seen, found.left, found.kept
    parts.decay[whole], parts.near[whole] = found.decay, found.near
    _put(parts.scores, whole, _limbs(found.scores, limbs))
    known = definition.inverse(strength[:, None] * found.near, lambda a, b: _dot(_limbs(a, limbs), _limbs(b, limbs)))
    _put(parts.inverted, whole, _limbs(known, limbs))
    by_keys, by_values = (_limbs(known * x[None, :], limbs) for x in (strength * found.seen, strength))

    def seeing(strip: Any, _: Any) -> None:
        found = _dot(by_keys, _take(k, (row, tokens, of, strip), limbs))
        _put(parts.seeing, (*at, _ALL, strip), _limbs(found, limbs))

    def values(strip: Any, _: Any) -> None:
        found = _dot(by_values, _take(v, (row, tokens, head, strip), limbs))
        _put(parts.values, (*at, _ALL, strip), _limbs(found, limbs))

    _over(call.key_width, wide, seeing, None)
    _over(call.value_width, wide, values, None)


def _states(
    k: Any, left: Any, kept: Any, seeing: Any, values: Any, start: Any, *out: Any, call: Call, limbs: int, wide: int
) -> None:
    """All chunks of a row and head, for a block of the values' columns."""
    states, updates, last = out
    row, head, block = (pl.program_id(axis) for axis in range(3))
    columns, of = _columns(call, wide, block), head // (call.value_heads // call.key_heads)

    def one(chunk: Any, state: Any) -> Any:
        at, numbers = (row, chunk, head), _limbs(state, limbs)
        _put(states, (*at, _ALL, columns), numbers)
        seen = _dot(_take(seeing, (*at, _ALL, _ALL), limbs), numbers)
        update = _sum(_take(values, (*at, _ALL, columns), limbs)) - seen
        _put(updates, (*at, _ALL, columns), _limbs(update, limbs))
        keys = _take(k, (row, pl.ds(chunk * call.size, call.size), of, _ALL), limbs)
        changes = _limbs(left[(*at, _ALL)][:, None] * update, limbs)
        return _dot(keys, changes, (0, 0), kept[at] * state)

    last[row, head, :, columns] = lax.fori_loop(0, call.tokens // call.size, one, start[row, head, :, columns])


def _outputs(
    q: Any, seen: Any, scores: Any, states: Any, updates: Any, out: Any, *, call: Call, limbs: int, wide: int
) -> None:
    """The outputs of one chunk."""
    at, tokens, of = _chunk(call)
    row, _, head = at
    asked, near = _take(q, (row, tokens, of, _ALL), limbs), _take(scores, (*at, _ALL, _ALL), limbs)

    def values(strip: Any, _: Any) -> None:
        part = (*at, _ALL, strip)
        far = seen[(*at, _ALL)][:, None] * _dot(asked, _take(states, part, limbs))
        out[row, tokens, head, strip] = _dot(near, _take(updates, part, limbs), start=far)

    _over(call.value_width, wide, values, None)


def _slopes(q: Any, k: Any, seen: Any, left: Any, kept: Any, *rest: Any, call: Call, limbs: int, wide: int) -> None:
    """The gradients of all states and updates of a row and head, for a block of the values' columns."""
    scores, seeing, of_out, of_last, of_states, of_updates, of_start = rest
    row, head, block = (pl.program_id(axis) for axis in range(3))
    columns, of = _columns(call, wide, block), head // (call.value_heads // call.key_heads)
    chunks = call.tokens // call.size

    def one(step: Any, slope: Any) -> Any:
        chunk = chunks - 1 - step
        at, tokens = (row, chunk, head), pl.ds(chunk * call.size, call.size)
        whole, numbers = (*at, _ALL, _ALL), _limbs(slope, limbs)
        _put(of_states, (*at, _ALL, columns), numbers)
        given = _take(of_out, (row, tokens, head, columns), limbs)
        change = left[(*at, _ALL)][:, None] * _dot(_take(k, (row, tokens, of, _ALL), limbs), numbers)
        changes = _limbs(_dot(_take(scores, whole, limbs), given, (0, 0), change), limbs)
        _put(of_updates, (*at, _ALL, columns), changes)
        asking = _limbs(seen[(*at, _ALL)][:, None] * _sum(given), limbs)
        through = _dot(_take(q, (row, tokens, of, _ALL), limbs), asking, (0, 0), kept[at] * slope)
        return through - _dot(_take(seeing, whole, limbs), changes, (0, 0))

    of_start[row, head, :, columns] = lax.fori_loop(0, chunks, one, of_last[row, head, :, columns])


def _sides(v: Any, beta: Any, *rest: Any, call: Call, limbs: int, wide: int) -> None:
    """The gradients of one chunk's links and scores, of what the inverse is multiplied with, and of the values."""
    decay, near, scores, seeing, values, inverted, states, updates, of_updates, of_out = rest[:10]
    at, tokens, _ = _chunk(call)
    (row, _, head), out, whole = at, Sides(*rest[10:]), (*at, _ALL, _ALL)
    known, strength = _take(inverted, whole, limbs), beta[row, tokens, head]

    def by_values(strip: Any, sums: Any) -> Any:
        links, scores, strengths = sums
        part, place = (*at, _ALL, strip), (row, tokens, head, strip)
        side = _dot(known, _take(of_updates, part, limbs), (0, 0))
        out.values[place] = (strength[:, None] * side).astype(out.values.dtype)
        links = _dot(_limbs(side, limbs), _take(values, part, limbs), (1, 1), links)
        scores = _dot(_take(of_out, place, limbs), _take(updates, part, limbs), (1, 1), scores)
        return links, scores, strengths + jnp.sum(side * _sum(_take(v, place, limbs)), axis=1)

    square, vector = jnp.zeros((call.size, call.size), jnp.float32), jnp.zeros(call.size, jnp.float32)
    links, of_scores, strengths = _over(call.value_width, wide, by_values, (square, square, vector))
    changes = _take(of_updates, whole, limbs)

    def by_keys(strip: Any, links: Any) -> Any:
        of_seeing = -_dot(changes, _take(states, (*at, strip, _ALL), limbs), (1, 1))
        side = _dot(known, _limbs(of_seeing, limbs), (0, 0))
        out.keys[(*at, _ALL, strip)] = side
        return _dot(_limbs(side, limbs), _take(seeing, (*at, _ALL, strip), limbs), (1, 1), links)

    links = _over(call.key_width, wide, by_keys, links)
    line, column = (lax.broadcasted_iota(jnp.int32, square.shape, axis) for axis in (0, 1))
    of_links, decayed, close = jnp.where(line > column, -links, 0.0), decay[whole], near[whole]
    of_alike = strength[:, None] * of_links * decayed
    _put(out.asked, whole, _limbs(decayed * of_scores, limbs))
    _put(out.alike, whole, _limbs(of_alike + of_alike.T, limbs))
    out.strength[(*at, _ALL)] = strengths + jnp.sum(of_links * close, axis=1)
    # Of g_{j+1} + ... + g_i, then of each of them.
    of_sums = of_scores * _sum(_take(scores, whole, limbs)) + strength[:, None] * of_links * close
    upto = jnp.where(line >= column, 1.0, 0.0)
    of_later = _dot(_limbs(upto, 1), _limbs(of_sums, limbs), (0, 0))
    out.decay[(*at, _ALL)] = jnp.sum(jnp.where(line > column, of_later, 0.0), axis=1)


def _gradients(q: Any, k: Any, seen: Any, left: Any, beta: Any, *rest: Any, call: Call, limbs: int, wide: int) -> None:
    """The gradients of one chunk's queries, keys, decays and strengths."""
    sides, (states, updates, of_states, of_out) = Sides(None, *rest[:5]), rest[5:9]
    of_q, of_k, of_g, of_beta = rest[9:]
    at, tokens, of = _chunk(call)
    (row, _, head), whole = at, (*at, _ALL, _ALL)
    strength, saw, share = beta[row, tokens, head], seen[(*at, _ALL)], left[(*at, _ALL)]
    given, changes = _take(of_out, (row, tokens, head, _ALL), limbs), _take(updates, whole, limbs)
    asked, alike = _take(sides.asked, whole, limbs), _take(sides.alike, whole, limbs)

    def by_keys(strip: Any, sums: Any) -> Any:
        part, place = (*at, strip, _ALL), (row, tokens, of, strip)
        queries, keys = _take(q, place, limbs), _take(k, place, limbs)
        before, after = _take(states, part, limbs), _take(of_states, part, limbs)
        far = _dot(given, before, (1, 1))
        of_q[row, tokens, head, strip] = _dot(asked, keys, start=saw[:, None] * far).astype(of_q.dtype)
        last, side = _dot(changes, after, (1, 1)), sides.keys[(*at, _ALL, strip)]
        through = share[:, None] * last + (strength * saw)[:, None] * side
        through = _dot(alike, keys, start=_dot(asked, queries, (0, 0), through))
        of_k[row, tokens, head, strip] = through.astype(of_k.dtype)
        pairs = ((far, _sum(queries)), (last, _sum(keys)), (side, _sum(keys)))
        *found, kept = sums
        return *(x + jnp.sum(a * b, axis=1) for x, (a, b) in zip(found, pairs)), kept + jnp.sum(
            _sum(before) * _sum(after)
        )

    vector = jnp.zeros(call.size, jnp.float32)
    of_seen, of_left, side, of_kept = _over(call.key_width, wide, by_keys, (vector,) * 3 + (jnp.float32(0),))
    of_beta[row, tokens, head] = sides.strength[(*at, _ALL)] + saw * side
    line, column = (lax.broadcasted_iota(jnp.int32, (call.size, call.size), axis) for axis in (0, 1))
    of_seen += strength * side + jnp.where(lax.iota(jnp.int32, call.size) == call.size - 1, of_kept, 0.0)
    by_seen = jnp.sum(jnp.where(line >= column, (of_seen * saw)[:, None], 0.0), axis=0)
    by_left = jnp.sum(jnp.where(line > column, (of_left * share)[None, :], 0.0), axis=1)
    of_g[row, tokens, head] = sides.decay[(*at, _ALL)] + by_seen + by_left
