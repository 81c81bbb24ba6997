"""Sends tokens to the devices that hold their experts, and sums the rows that come back: each token goes once to each device that needs it.

`sent` and `returned` are linear and transposes of each other, so that each is the other's gradient. Received rows are sorted by the
devices that sent them, with zeros behind the last one. XLA moves rows by a ragged all-to-all, which its CPU backend does not have: there
every device sends as many rows to each other one as it has tokens (all-to-all), of which the same rows are read.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.kernels import dispatch


class Route(NamedTuple):
    """The rows that a device sends to each device of the axis, and receives from it; under shard_map.

    Attributes:
      token: int32 [n f] token of each row that is sent, sorted by destination, n behind the last one; f is the largest number of devices
        that a token needs.
      place: int32 [n, f] rows in which each token is sent, n f for no further one.
      sizes: int32 [ways, ways] number of rows from each device to each.
    """

    token: jax.Array
    place: jax.Array
    sizes: jax.Array


def route_of(devices: Int[Array, "n k"], ways: int, axis: str) -> Route:
    """Returns the route of tokens that are needed on `devices`; ids outside of [0, ways) stand for none."""
    tokens, most = len(devices), min(devices.shape[1], ways)
    needed = jnp.any(devices[:, :, None] == jnp.arange(ways), axis=1)  # [n, ways]
    count = jnp.sum(needed, axis=0, dtype=jnp.int32)
    before = jnp.cumsum(count) - count
    row = jnp.where(needed, before + jnp.cumsum(needed, axis=0, dtype=jnp.int32) - 1, tokens * most)
    own = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], row.shape)
    token = jnp.full(tokens * most, tokens, jnp.int32).at[row].set(own, mode="drop")
    place = jnp.sort(row, axis=1)[:, :most]
    return Route(token, place, lax.all_gather(count, axis))


def sent(x: Float[Array, "n D"], route: Route, axis: str) -> Float[Array, "rows D"]:
    """Returns the rows that this device gets from all: ways n of them, zeros behind the last."""
    return _sent(axis, x, route)


def returned(rows: Float[Array, "rows D"], route: Route, axis: str) -> Float[Array, "n D"]:
    """Returns the sum, for each token of this device, of the rows that the devices computed for it, in the dtype of `rows`."""
    return _returned(axis, rows, route)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sent(axis: str, x: jax.Array, route: Route) -> jax.Array:
    leaving = x.at[route.token].get(mode="fill", fill_value=0)
    return _moved(leaving, len(route.sizes) * len(x), route.sizes, axis)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _returned(axis: str, rows: jax.Array, route: Route) -> jax.Array:
    back = _moved(rows, len(route.token), route.sizes.T, axis)
    # A sum of gathered rows has a fixed order, which a scatter-add has not.
    parts = [back.at[place].get(mode="fill", fill_value=0) for place in route.place.T]
    return sum(parts[1:], parts[0])


def _keep_route(of: Any, axis: str, x: jax.Array, route: Route) -> tuple[jax.Array, Route]:
    return of(axis, x, route), route


_sent.defvjp(partial(_keep_route, _sent), lambda axis, route, g: (_returned(axis, g, route), None))
_returned.defvjp(partial(_keep_route, _returned), lambda axis, route, g: (_sent(axis, g, route), None))


def _moved(rows: Float[Array, "P D"], most: int, sizes: Int[Array, "ways ways"], axis: str) -> Float[Array, "most D"]:
    """Returns the received rows, at most `most`; this device sends sizes[own] rows, sorted by destination."""
    own = lax.axis_index(axis)
    leave, arrive = sizes[own], sizes[:, own]
    starts = jnp.cumsum(leave) - leave
    if dispatch.device().platform != "cpu":
        there = (jnp.cumsum(sizes, axis=0) - sizes)[own]
        empty = jnp.zeros((most, rows.shape[1]), rows.dtype)
        return lax.ragged_all_to_all(rows, empty, starts, leave, there, arrive, axis_name=axis)
    longest = min(len(rows), most)
    offset = jnp.arange(longest)
    index = jnp.where(offset < leave[:, None], starts[:, None] + offset, len(rows))
    parts = lax.all_to_all(rows.at[index].get(mode="fill", fill_value=0), axis, 0, 0)  # [ways, longest, D]
    ends = jnp.cumsum(arrive)
    row = jnp.arange(most)
    device = jnp.searchsorted(ends, row, side="right")
    known: Bool[Array, " most"] = row < ends[-1]
    device = jnp.minimum(device, len(sizes) - 1)
    within = jnp.where(known, row - (ends - arrive)[device], longest)
    return parts.at[device, within].get(mode="fill", fill_value=0)
