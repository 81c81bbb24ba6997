"""Computes attention over packed rows in plain JAX, block by block, on any device and dtype, in memory O(T).

    s_ij = scale q_i.k_j,  lse_i = log sum_j exp(s_ij),  out_i = sum_j exp(s_ij - lse_i) v_j

The sums over keys follow https://arxiv.org/abs/2205.14135: each query keeps a maximum, a total and a weighted sum of values, which are
rescaled with each block of keys. The gradients recompute the scores of each block from `lse` (https://arxiv.org/abs/2307.08691). Where
rows are packed, blocks of keys after the queries, and those before the first segment or window that any query of the block sees, are
skipped. Only two blocks of scores exist at a time.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.attention import reference
from jaxrl_llm.kernels.attention.api import Call
from jaxrl_llm.kernels.attention.reference import MASKED
from jaxrl_llm.kernels.attention.splash import RESIDUAL

BLOCKS = (1024, 512, 256, 128)
BLOCK_SCORES = 64 * 2**20  # bytes of a block's scores; the smallest block may take more


class Places(NamedTuple):
    """Positions and segments of queries and keys, padded to whole blocks."""

    q_positions: jax.Array
    k_positions: jax.Array
    q_segments: jax.Array
    k_segments: jax.Array


def refusal(call: Call) -> str | None:
    """Returns None, since every call is supported."""
    return None


def block_of(call: Call) -> int:
    """Returns the tokens of a block: the largest of BLOCKS whose scores fit in BLOCK_SCORES."""
    rows = 4 * call.batch * call.heads
    return next((n for n in BLOCKS if rows * n * n <= BLOCK_SCORES), BLOCKS[-1])


def attend(
    q: Float[Array, "B T H C"],
    k: Float[Array, "B S K C"],
    v: Float[Array, "B S K C"],
    positions: tuple[Int[Array, "B T"], Int[Array, "B S"]],
    segments: tuple[Int[Array, "B T"], Int[Array, "B S"]],
    call: Call,
) -> Float[Array, "B T H C"]:
    """Computes attention as defined in `reference`; softmax in float32, products in the dtype of `q` with float32 sums."""
    size = block_of(call)
    q, k, v = (_padded(x, size) for x in (q, k, v))
    places = Places(*(_padded(x, size) for x in (*positions, *segments)))
    grouped = q.reshape(*q.shape[:2], call.kv_heads, call.heads // call.kv_heads, call.width)
    out: jax.Array = _attend(call, grouped, k, v, places)
    return out.reshape(q.shape)[:, : call.queries]


def _padded(x: jax.Array, size: int) -> jax.Array:
    """Pads `x` with zeros to a whole number of blocks; segment 0 is padding."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))


def _block(x: Any, index: Any, size: int) -> Any:
    """Returns the tokens [index * size, (index + 1) * size) of every array of `x`."""
    return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, index * size, size, axis=1), x)


def _keys(call: Call, places: Places, i: jax.Array, size: int) -> tuple[Any, Any]:
    """Returns the range of blocks of keys that queries of block `i` see."""
    blocks = places.k_segments.shape[1] // size
    if call.max_segments is None:
        return 0, blocks
    # In a packed row a token's segment begins `position` tokens before it.
    behind, used = _block((places.q_positions, places.q_segments), i, size)
    behind = behind if call.window is None else jnp.minimum(behind, call.window - 1)
    first = jnp.where(used != 0, i * size + jnp.arange(size) - behind, (i + 1) * size).min()
    return first // size, i + 1


def _scores(call: Call, q: jax.Array, k: jax.Array, places: Places, at: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    """Returns (scores [B, K, G, Tb, Sb], their mask) of a block of queries and a block of keys."""
    size = q.shape[1]
    (qp, qs), (kp, ks) = (
        _block((places.q_positions, places.q_segments), at[0], size),
        _block((places.k_positions, places.k_segments), at[1], size),
    )
    mask = reference.allowed(qp, kp, qs, ks, call.window)[:, None, None]
    scores = jnp.einsum("btkgc,bskc->bkgts", q, k, preferred_element_type=jnp.float32) * call.scale
    return jnp.where(mask, scores, MASKED), mask


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, q: jax.Array, k: jax.Array, v: jax.Array, places: Places) -> jax.Array:
    return _forward(call, q, k, v, places)[0]


def _forward(call: Call, q: jax.Array, k: jax.Array, v: jax.Array, places: Places) -> tuple[jax.Array, Any]:
    size = block_of(call)

    def of_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = _block(q, i, size)

        def add(j: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, mixed = sums
            scores, mask = _scores(call, own, _block(k, j, size), places, (i, j))
            new = jnp.maximum(top, scores.max(axis=-1))
            weights = jnp.where(mask, jnp.exp(scores - new[..., None]), 0.0)
            factor = jnp.exp(top - new)
            product = jnp.einsum(
                "bkgts,bskc->bkgtc", weights.astype(v.dtype), _block(v, j, size), preferred_element_type=jnp.float32
            )
            return new, total * factor + weights.sum(axis=-1), mixed * factor[..., None] + product

        shape = (q.shape[0], *q.shape[2:4], size)
        start = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, q.shape[-1])))
        top, total, mixed = jax.lax.fori_loop(*_keys(call, places, i, size), add, start)
        seen = jnp.where(total > 0, total, 1.0)
        out = jnp.einsum("bkgtc->btkgc", mixed / seen[..., None]).astype(q.dtype)
        return out, top + jnp.log(seen)

    outs, lses = jax.lax.map(of_block, jnp.arange(q.shape[1] // size))
    out = jnp.moveaxis(outs, 0, 1).reshape(q.shape)
    # The names let rematerialisation keep the results of attention.
    out, lses = (checkpoint_name(x, RESIDUAL) for x in (out, lses))
    return out, (q, k, v, places, out, lses)


def _backward(call: Call, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    q, k, v, places, out, lses = saved
    size = block_of(call)
    products = partial(jnp.einsum, preferred_element_type=jnp.float32)
    summed = jnp.einsum("btkgc,btkgc->bkgt", out.astype(jnp.float32), g.astype(jnp.float32))

    def of_block(sums: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        own, slope = _block((q, g), i, size)
        delta = jax.lax.dynamic_slice_in_dim(summed, i * size, size, axis=3)[..., None]

        def add(j: Any, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            (dk, dv), dq = carry
            keys, values = _block((k, v), j, size)
            scores, mask = _scores(call, own, keys, places, (i, j))
            weights = jnp.where(mask, jnp.exp(scores - lses[i][..., None]), 0.0)
            ds = weights * (products("btkgc,bskc->bkgts", slope, values) - delta) * call.scale
            weights, ds = weights.astype(q.dtype), ds.astype(q.dtype)
            dk = _added(dk, products("bkgts,btkgc->bskc", ds, own), j * size)
            dv = _added(dv, products("bkgts,btkgc->bskc", weights, slope), j * size)
            return (dk, dv), dq + products("bkgts,bskc->btkgc", ds, keys)

        bounds = _keys(call, places, i, size)
        sums, dq = jax.lax.fori_loop(*bounds, add, (sums, jnp.zeros(own.shape, jnp.float32)))
        return sums, dq.astype(q.dtype)

    zeros = jnp.zeros(k.shape, jnp.float32)
    (dk, dv), dqs = jax.lax.scan(of_block, (zeros, zeros), jnp.arange(q.shape[1] // size))
    dq = jnp.moveaxis(dqs, 0, 1).reshape(q.shape)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None


def _added(total: jax.Array, part: jax.Array, start: Any) -> jax.Array:
    """Returns `total` with `part` added to its tokens from `start` on."""
    old = jax.lax.dynamic_slice_in_dim(total, start, part.shape[1], axis=1)
    return jax.lax.dynamic_update_slice_in_dim(total, old + part, start, axis=1)


_attend.defvjp(_forward, _backward)
