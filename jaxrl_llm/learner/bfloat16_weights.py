"""Stores trained weights in bfloat16 without losing small updates: on average (stochastic rounding) or exactly (compensation).

The change of a weight is often smaller than the distance to the next bfloat16, so that rounding to the nearest one would undo it.

    stochastic    w' is one of the two bfloat16 next to w + change, at random, with mean w + change: 2 bytes a weight
    compensated   w' is the nearest bfloat16, and 16 further bits hold w + change - w' exactly: 4 bytes a weight, of which a
                  forward pass reads 2; w' and its remainder together are the float32 weight, bit for bit

The second is Kahan's compensated sum (https://arxiv.org/abs/2010.06192) with a remainder that is itself never rounded. Norms' scales,
routers and heads of value models stay float32 (`optimizer.precise`). Random bits depend on the seed, the leaf and the number of the
update alone, so that they are the same on every mesh and after a resume.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, Int16, UInt16, UInt32

from jaxrl_llm.learner.optimizer import Rule, precise, rested


class Beside(NamedTuple):
    """The optimizer's state with the further state of bfloat16 weights.

    Attributes:
      optimizer: the state of the optax chain.
      rest: int32 [], the number of updates so far, for stochastic rounding; a tree of int16 remainders like the weights, for
        compensation.
    """

    optimizer: Any
    rest: Any


def randomly_rounded(x: Float32[Array, "*shape"], bits: UInt16[Array, "*shape"]) -> BFloat16[Array, "*shape"]:
    """Rounds up in magnitude where the sum of random `bits` and the 16 low bits of `x` carries; the mean over all `bits` is `x`."""
    return _high(_bits(x) + bits.astype(jnp.uint32))


def random_bits(key: jax.Array, shape: Sequence[int]) -> UInt16[Array, "*shape"]:
    """Returns 16 random bits for each number of an array, the same on every mesh.

    Two words for each index of the first axis, a layer where layers are stacked, are JAX's own; a number's bits are those of its index among the others, mixed with them by
    multiplications and shifts (https://github.com/skeeto/hash-prospector): threefry for each number would take longer than Adam.
    """
    first, *rest = shape or (1,)
    start, key = (x.reshape(first, *(1 for _ in rest)) for x in jax.random.bits(key, (2, first), jnp.uint32))
    place = jnp.zeros((first, *rest), jnp.uint32)
    for axis, size in enumerate(rest, 1):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, (first, *rest), axis)
    mixed = _mixed(_mixed(place + start) ^ key)
    return (mixed >> 16).astype(jnp.uint16).reshape(shape)


def _mixed(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Maps 32-bit words one to one, so that each bit of the result depends on all bits of `x`."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def divided(x: Float32[Array, "*shape"]) -> tuple[BFloat16[Array, "*shape"], Int16[Array, "*shape"]]:
    """Returns the nearest bfloat16, in a tie the larger in magnitude, and the remainder, from which `whole` restores `x`."""
    bits = _bits(x)
    low = jax.lax.bitcast_convert_type((bits & 0xFFFF).astype(jnp.uint16), jnp.int16)
    return _high(bits + 0x8000), low


def whole(high: BFloat16[Array, "*shape"], rest: Int16[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Returns the float32 that `divided` split."""
    bits = jax.lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(bits + rest.astype(jnp.int32).astype(jnp.uint32), jnp.float32)


def _bits(x: Float32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _high(bits: UInt32[Array, "*shape"]) -> BFloat16[Array, "*shape"]:
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


@dataclass(frozen=True, eq=False, kw_only=True)
class Stochastic(Rule):
    """The rule of stochastic rounding: each changed weight is rounded at random."""

    def shapes(self, params: Any) -> Any:
        return rested(params, "bfloat16")

    def init(self, params: Any) -> Any:
        return Beside(super().init(params), jnp.zeros((), jnp.int32))

    def begun(self, params: Any, state: Any) -> tuple[Any, Any]:
        return rested(params, "bfloat16"), state

    def updated(self, params: Any, gradient: Any, state: Any) -> tuple[Any, Any]:
        changed, inner = super().updated(rested(params, "float32"), gradient, state.optimizer)
        key = jax.random.fold_in(jax.random.key(self.seed), state.rest)

        def rounded(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
            if precise(path):
                return x
            own = jax.random.fold_in(key, zlib.crc32(f"{self.name}{jax.tree_util.keystr(path)}".encode()))
            return randomly_rounded(x, random_bits(own, x.shape))

        return jax.tree_util.tree_map_with_path(rounded, changed), Beside(inner, state.rest + 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Compensated(Rule):
    """The rule of compensation: the remainder of each rounded weight is kept."""

    def shapes(self, params: Any) -> Any:
        return rested(params, "bfloat16")

    def init(self, params: Any) -> Any:
        return Beside(super().init(params), jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.int16), params))

    def begun(self, params: Any, state: Any) -> tuple[Any, Any]:
        of = lambda tree: jax.tree.map(lambda x: x.sharding, tree)  # noqa: E731
        weights, rest = jax.jit(_apart, out_shardings=(of(params), of(params)))(params)
        return weights, state._replace(rest=jax.device_put(rest, of(state.rest)))

    def updated(self, params: Any, gradient: Any, state: Any) -> tuple[Any, Any]:
        joined = jax.tree_util.tree_map_with_path(
            lambda path, x, rest: x if precise(path) else whole(x, rest), params, state.rest
        )
        changed, inner = super().updated(joined, gradient, state.optimizer)
        weights, rest = _apart(changed)
        return weights, Beside(inner, rest)


def _apart(params: Any) -> tuple[Any, Any]:
    """Returns float32 `params` as they are stored, and their remainders; those of leaves that stay float32 are 0."""
    part = lambda path, x: (x, jnp.zeros(x.shape, jnp.int16)) if precise(path) else divided(x)  # noqa: E731
    both = jax.tree_util.tree_map_with_path(part, params)
    of = lambda i: jax.tree.map(lambda pair: pair[i], both, is_leaf=lambda x: isinstance(x, tuple))  # noqa: E731
    return of(0), of(1)
