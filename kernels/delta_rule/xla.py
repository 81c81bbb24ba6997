"""The gated delta rule by XLA: the parts without a state are computed for all chunks at once, and a scan over chunks takes two products each.

With W = (I + A)^-1 [beta_i exp(G_i) k_i] and V = (I + A)^-1 [beta_i v_i] the updates of a chunk are V - W S. The outputs are computed
after the scan from its states.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.delta_rule import definition
from jaxrl_llm.kernels.delta_rule.api import Call, State

PRECISION = jax.lax.Precision.HIGHEST
dot = partial(definition.dot, precision=PRECISION)


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    return None


def rule(
    tokens: tuple[jax.Array, ...], segments: Int[Array, "B T"], state: State, call: Call
) -> tuple[Float[Array, "B T Hv dv"], State]:
    """Computes the rule as defined by `delta_rule`."""
    rows, length, size, heads = call.rows, call.tokens, call.size, call.key_heads

    def split(x: jax.Array) -> jax.Array:
        """Splits [B, T, heads, ...] into [chunks, B, key heads, size, ...], or [..., key heads, value heads of each, size, ...]."""
        x = x.reshape(rows, length // size, size, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 2, 3), 1, 0)

    def by_key(x: jax.Array, axis: int) -> jax.Array:
        return x.reshape(*x.shape[:axis], heads, -1, *x.shape[axis + 1 :])

    q, k, *rest = (split(x.astype(jnp.float32)) for x in tokens)
    v, g, beta = (by_key(x, 2) for x in rest)
    apart = segments.reshape(rows, -1, size)
    places = jnp.moveaxis(apart, 1, 0), jnp.moveaxis(definition.owners(segments, size), 1, 0)
    found, changes = _each(_local, (None, None, 0, 0, 0, None, None), (0, 0, 0, 0, 0, None, None), 2)(
        q, k, v, g, beta, *places
    )
    last, (states, updates) = jax.lax.scan(_each(_step, 0, 0, 1), by_key(state, 1), (found.kept, *changes))
    out = _each(_outputs, (None, 0, 0, 0, 0), 0, 2)(q, found.seen, found.scores, states, updates)
    out = jnp.moveaxis(jnp.moveaxis(out, 0, 1), 4, 2)  # [B, chunks, size, key heads, value heads of each, dv]
    return out.reshape(rows, length, -1, call.value_width), last.reshape(state.shape)


def _each(function: Any, by_value: Any, by_key: Any, others: int) -> Any:
    """Maps a function of one cell over value heads of a key head by the axes `by_value`, key heads by `by_key`, and `others` axes before them."""
    function = jax.vmap(jax.vmap(function, by_value), by_key)
    for _ in range(others):
        function = jax.vmap(function)
    return function


def _local(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, segments: jax.Array, owner: jax.Array
) -> tuple[definition.Links, tuple[jax.Array, ...]]:
    """Computes a chunk's parts without a state: its links, W, V, and the keys with their weights in the state after the chunk."""
    found = definition.links(dot(q, k, axes=(1, 1)), dot(k, k, axes=(1, 1)), g, segments, owner, dot)
    links = beta[:, None] * found.near
    inverted = jax.lax.stop_gradient(definition.inverse(links, dot))
    sides = ((beta * found.seen)[:, None] * k, beta[:, None] * v)
    changes = (definition.solved(links, inverted, side, PRECISION) for side in sides)
    return found, (*changes, found.left[:, None] * k)


def _step(state: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    kept, seeing, values, keys = inputs
    updates = values - dot(seeing, state)
    return kept * state + dot(keys, updates, axes=(0, 0)), (state, updates)


def _outputs(q: jax.Array, seen: jax.Array, scores: jax.Array, state: jax.Array, updates: jax.Array) -> jax.Array:
    return seen[:, None] * dot(q, state) + dot(scores, updates)
