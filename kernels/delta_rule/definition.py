"""The computation of one chunk of the gated delta rule, for one row and head, as plain functions of matrices that the backends share.

With G_i the sum of g up to token i of the chunk, S the state before it and D_ij = exp(G_i - G_j) for j <= i, else 0,

    U = (I + A)^-1 [beta_i (v_i - exp(G_i) S^T k_i)]     A_ij = beta_i D_ij <k_i, k_j> for j < i
    o_i = exp(G_i) S^T q_i + sum_j D_ij <q_i, k_j> U_j     S_next = exp(G_c) S + sum_j exp(G_c - G_j) k_j U_j^T

D and A are 0 between segments, S counts for the segment it belongs to (its owner), and S_next holds the segment of the chunk's last
token alone. No exponent is above 0. (I + A)^-1 depends on no state, so all chunks' inverses are computed at once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

CHUNK = 64


class Links(NamedTuple):
    """The coefficients between the tokens of a chunk.

    Attributes:
      seen: exp(G_i), the share of the state before the chunk that token i sees; 0 in other segments than the state's.
      left: D_cj, the share of token j's change that the state after the chunk holds.
      kept: the share of the state before the chunk that the one after it holds, which is `seen` of the last token.
      decay: D.
      near: D_ij <k_i, k_j> for j < i, else 0; A is beta_i times it.
      scores: D_ij <q_i, k_j>.
    """

    seen: Float[Array, " c"]
    left: Float[Array, " c"]
    kept: Float[Array, ""]
    decay: Float[Array, "c c"]
    near: Float[Array, "c c"]
    scores: Float[Array, "c c"]


def dot(a: jax.Array, b: jax.Array, precision: Any, axes: tuple[int, int] = (1, 0)) -> jax.Array:
    """Returns the float32 product of two matrices that sums over `axes`."""
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def owners(segments: Int[Array, "B T"], size: int) -> Int[Array, "B chunks"]:
    """Returns the segment to which the state before each chunk of `size` tokens belongs."""
    return jnp.concatenate([segments[:, :1], segments[:, size - 1 : -1 : size]], axis=1)


def links(
    asked: Float[Array, "c c"],
    alike: Float[Array, "c c"],
    g: Float[Array, " c"],
    segments: Int[Array, " c"],
    owner: Int[Array, ""],
    dot: Callable[[jax.Array, jax.Array], jax.Array],
) -> Links:
    """Computes the parts of a chunk that need no state.

    Args:
      asked: <q_i, k_j>.
      alike: <k_i, k_j>.
      g: logarithms of the decays.
      segments: segments of the tokens.
      owner: the segment to which the state before the chunk belongs.
      dot: product of two matrices, the first of zeros and ones.
    """
    size = len(g)
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    # Each g_{j+1} + ... + g_i is summed for itself, since differences of long sums lose digits.
    sums = dot(jnp.where(row >= column, 1.0, 0.0), jnp.where(row > column, g[:, None], 0.0))
    together = (segments[:, None] == segments[None, :]) & (row >= column)
    whole = jnp.sum(jnp.where(row >= column, g[None, :], 0.0), axis=1)
    decay = jnp.exp(jnp.where(together, sums, -jnp.inf))
    seen = jnp.exp(jnp.where(segments == owner, whole, -jnp.inf))
    left = jnp.sum(jnp.where(row == size - 1, decay, 0.0), axis=0)
    kept = jnp.sum(jnp.where(lax.iota(jnp.int32, size) == size - 1, seen, 0.0))
    return Links(seen, left, kept, decay, jnp.where(row > column, decay * alike, 0.0), decay * asked)


def inverse(links: Float[Array, "c c"], dot: Callable[[jax.Array, jax.Array], jax.Array]) -> Float[Array, "c c"]:
    """Computes (I + A)^-1 for A strictly lower triangular and c a power of 2.

    The inverses of two blocks of the diagonal give that of both, [[X, 0], [-Y A X, Y]], starting with blocks of size 1. No power of A
    is formed, since powers grow far beyond the inverse where keys are similar.
    """
    size = len(links)
    row, column = (lax.broadcasted_iota(jnp.int32, links.shape, axis) for axis in (0, 1))
    found, width = jnp.where(row == column, 1.0, 0.0), 1
    while width < size:
        # Rows of the second of two blocks, and columns of the first.
        between = (((row ^ column) & -width) == width) & ((row & width) != 0)
        off = jnp.where(between, links, 0.0)
        found = found - (off if width == 1 else dot(found, dot(off, found)))
        width *= 2
    return found


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def solved(
    links: Float[Array, "c c"], inverted: Float[Array, "c c"], errors: Float[Array, "c d"], precision: Any
) -> Float[Array, "c d"]:
    """Returns (I + A)^-1 errors from the known inverse; derivatives are taken with respect to A, and not through the inverse."""
    return dot(inverted, errors, precision)


def _solved_jvp(precision: Any, values: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    links, inverted, errors = values
    found = solved(links, inverted, errors, precision)
    change = tangents[2] - dot(tangents[0], found, precision)
    return found, dot(inverted, change, precision)


solved.defjvp(_solved_jvp)
