"""The gated delta rule, a recurrence with a matrix for a state in each head (https://arxiv.org/abs/2412.06464), and its causal convolution.

    S' = exp(g_t) S_{t-1}     d_t = beta_t (v_t - S'^T k_t)     S_t = S' + k_t d_t^T     o_t = S_t^T q_t

`recurrent` takes one token by these lines. `chunked` takes whole rows, c tokens at a time: with G_i the sum of g up to token i of its
chunk, S the state before the chunk and D_ij = exp(G_i - G_j) for j <= i, else 0,

    U = (I + A)^-1 [beta_i (v_i - exp(G_i) S^T k_i)]     A_ij = beta_i D_ij <k_i, k_j> for j < i
    o_i = exp(G_i) S^T q_i + sum_j D_ij <q_i, k_j> U_j     S_next = exp(G_c) S + sum_j exp(G_c - G_j) k_j U_j^T

No state crosses from one segment of a row to the next: D and A are 0 between segments, S counts for the segment it belongs to, and
S_next holds the segment of the chunk's last token alone. A token with beta = 0 and g = 0 changes no state, which is how callers mask
padding. Everything is float32, and no exponent is above 0. Value heads h r .. h r + r - 1 read key head h.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

CHUNK = 64

State = Float[Array, "B Hv dk dv"]


def recurrent(
    q: Float[Array, "B Hk dk"],
    k: Float[Array, "B Hk dk"],
    v: Float[Array, "B Hv dv"],
    g: Float[Array, "B Hv"],
    beta: Float[Array, "B Hv"],
    state: State,
) -> tuple[Float[Array, "B Hv dv"], State]:
    """The output of one token a row, and the state after it."""
    times = v.shape[1] // k.shape[1]
    q, k = (jnp.repeat(x.astype(jnp.float32), times, axis=1) for x in (q, k))
    decayed = jnp.exp(g)[..., None, None] * state
    change = beta[..., None] * (v.astype(jnp.float32) - jnp.sum(decayed * k[..., None], axis=-2))
    state = decayed + k[..., None] * change[..., None, :]
    return jnp.sum(state * q[..., None], axis=-2), state


def chunked(
    q: Float[Array, "B T Hk dk"],
    k: Float[Array, "B T Hk dk"],
    v: Float[Array, "B T Hv dv"],
    g: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    segments: Int[Array, "B T"],
    state: State,
    *,
    size: int = CHUNK,
) -> tuple[Float[Array, "B T Hv dv"], State]:
    """The outputs of all tokens, float32, and the state after the last one.

    Args:
      q: queries, already normalised and scaled.
      k: keys, already normalised.
      v: values.
      g: logarithms of the decays, float32 and at most 0.
      beta: strengths of the updates in [0, 1], float32.
      segments: the segment of each token; tokens of one segment lie side by side.
      state: the state before the first token, which belongs to the first token's segment.
      size: tokens of a chunk. The backward pass keeps one state a chunk and computes the rest again.
    """
    rows, length, key_heads = k.shape[:3]
    fill, chunks = -length % size, -(-length // size)

    def split(x: jax.Array, mode: str = "constant") -> jax.Array:
        """[B, T, ...] -> [chunks, B, size, ...]"""
        x = jnp.pad(x, ((0, 0), (0, fill), *((0, 0),) * (x.ndim - 2)), mode=mode)
        return jnp.moveaxis(x.reshape(rows, chunks, size, *x.shape[2:]), 1, 0)

    def by_key(x: jax.Array, axis: int) -> jax.Array:
        """Value heads at `axis` by the key head that they read."""
        return x.reshape(*x.shape[:axis], key_heads, -1, *x.shape[axis + 1 :])

    inputs = [split(x.astype(jnp.float32)) for x in (q, k)]
    inputs += [split(by_key(x.astype(jnp.float32), 2)) for x in (v, g, beta)]
    start = (by_key(state.astype(jnp.float32), 1), segments[:, 0])
    (last, _), out = jax.lax.scan(jax.checkpoint(_chunk), start, (*inputs, split(segments, "edge")))
    out = jnp.moveaxis(out, 0, 1).reshape(rows, chunks * size, *v.shape[2:])
    return out[:, :length], last.reshape(state.shape)


def _chunk(
    carry: tuple[jax.Array, jax.Array], inputs: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """One chunk: (state [B, h, r, dk, dv] and its segment [B]) and the chunk's tokens [B, c, ...] -> the same after it, and outputs."""
    (state, owner), (q, k, v, g, beta, segments) = carry, inputs
    g, beta = (jnp.moveaxis(x, 1, -1) for x in (g, beta))  # [B, h, r, c]
    decay = _decays(g, segments)
    strict = jnp.tril(jnp.ones(decay.shape[-2:], bool), -1)
    product = lambda form, *x: jnp.einsum(form, *x, precision="highest")  # noqa: E731
    links = jnp.where(strict, beta[..., None] * decay * product("bihd,bjhd->bhij", k, k)[:, :, None], 0.0)
    of_state = (segments == owner[:, None])[:, None, None]  # [B, 1, 1, c]
    seen = jnp.where(of_state, jnp.exp(jnp.cumsum(g, axis=-1)), 0.0)
    errors = beta[..., None] * (jnp.moveaxis(v, 1, 3) - seen[..., None] * product("bihd,bhrde->bhrie", k, state))
    updates = jax.lax.linalg.triangular_solve(links, errors, left_side=True, lower=True, unit_diagonal=True)
    scores = decay * product("bihd,bjhd->bhij", q, k)[:, :, None]
    out = seen[..., None] * product("bihd,bhrde->bhrie", q, state) + product("bhrij,bhrje->bhrie", scores, updates)
    state = seen[..., -1, None, None] * state + product("bjhd,bhrj,bhrje->bhrde", k, decay[..., -1, :], updates)
    return (state, segments[:, -1]), jnp.moveaxis(out, 3, 1)


def _decays(g: Float[Array, "B h r c"], segments: Int[Array, "B c"]) -> Float[Array, "B h r c c"]:
    """exp(g_{j+1} + ... + g_i) for j <= i of one segment, else 0; summed pair by pair, since differences of long sums lose digits."""
    size = g.shape[-1]
    later = jnp.tril(jnp.ones((size, size), bool), -1)
    sums = jnp.cumsum(jnp.where(later, g[..., None], 0.0), axis=-2)
    together = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((size, size), bool))
    return jnp.exp(jnp.where(together[:, None, None], sums, -jnp.inf))


def convolved(
    x: Float[Array, "B T channels"],
    weights: Float[Array, "channels taps"],
    segments: Int[Array, "B T"],
    before: Float[Array, "B reach channels"],
) -> Float[Array, "B T channels"]:
    """sum_j weights[:, j] x[t - taps + 1 + j] over tokens of t's segment, float32; `before` are the taps - 1 inputs of the first segment
    that precede the row, 0 where it begins there."""
    reach, length = weights.shape[-1] - 1, x.shape[1]
    whole = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    owners = jnp.concatenate([jnp.broadcast_to(segments[:, :1], (x.shape[0], reach)), segments], axis=1)
    total = jnp.zeros(x.shape, jnp.float32)
    for tap in range(reach + 1):
        inside = owners[:, tap : tap + length] == segments
        seen = jnp.where(inside[..., None], whole[:, tap : tap + length], 0).astype(jnp.float32)
        total = total + weights[:, tap].astype(jnp.float32) * seen
    return total


def last_inputs(
    x: Float[Array, "B T channels"], valid: Bool[Array, "B T"], before: Float[Array, "B reach channels"]
) -> Float[Array, "B reach channels"]:
    """The last inputs of the convolution up to each row's last valid token, where the valid ones come first; as many as `before` holds."""
    whole = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    places = jnp.sum(valid.astype(jnp.int32), axis=1, keepdims=True) + jnp.arange(before.shape[1])
    return jnp.take_along_axis(whole, places[..., None], axis=1)


def continued(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The segments with padding, 0, counted to the segment before it."""
    return jax.lax.associative_scan(lambda left, right: jnp.where(right > 0, right, left), segments, axis=1)
