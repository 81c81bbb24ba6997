"""Attention on a mesh: each device attends with its own rows, query tokens and heads, under shard_map."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.attention.api import attention
from jaxrl_llm.kernels.decode_attention.api import decode_attention
from jaxrl_llm.mesh import Partitioner


class Places(NamedTuple):
    """Where tokens stand: positions and segments, int32 [B, T] each; segment 0 is padding."""

    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"]


@dataclass(frozen=True, kw_only=True)
class MeshAttention:
    """Attention whose rows are split over the batch axes, query tokens over `context` and heads over `tensor`.

    Keys and values are whole along the tokens. Where `tensor` does not divide the key/value heads, they are repeated
    until it does; where that is impossible, every device holds all heads.

    Attributes:
      partitioner: the mesh and its axis table.
      max_segments: most segments of one row, or None where unknown; a hint for the backends.
      split_queries: whether query tokens are split over the `length` axes.
    """

    partitioner: Partitioner
    max_segments: int | None = None
    split_queries: bool = True

    def __call__(
        self,
        q: Float[Array, "B T H C"],
        k: Float[Array, "B S K C"],
        v: Float[Array, "B S K C"],
        queries: Places,
        keys: Places,
        window: int | None,
    ) -> Float[Array, "B T H C"]:
        """Softmax attention within segments, causal by position, over the last `window` positions if one is given."""

        def local(q: jax.Array, k: jax.Array, v: jax.Array, queries: Places, keys: Places) -> jax.Array:
            return attention(
                q,
                k,
                v,
                q_positions=queries.positions,
                k_positions=keys.positions,
                q_segments=queries.segments,
                k_segments=keys.segments,
                window=window,
                max_segments=self.max_segments,
            )

        if self.partitioner.mesh.size == 1:
            return local(q, k, v, queries, keys)
        k, v = self._repeated(k, v, q.shape[2])
        length = "length" if self.split_queries else None
        q_spec = self.partitioner.spec(("batch", length, "heads", "head_width"), q.shape)
        k_spec = self.partitioner.spec(("batch", None, "kv_heads", "head_width"), k.shape)
        if q_spec[2] != k_spec[2]:
            q_spec, k_spec = PartitionSpec(*q_spec[:2], None, None), PartitionSpec(*k_spec[:2], None, None)
        return jax.shard_map(
            local,
            mesh=self.partitioner.mesh,
            in_specs=(q_spec, k_spec, k_spec, PartitionSpec(*q_spec[:2]), PartitionSpec(*k_spec[:2])),
            out_specs=q_spec,
            check_vma=False,  # backends call kernels whose outputs carry no varying-axes types
        )(q, k, v, queries, keys)

    def _repeated(self, k: jax.Array, v: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
        ways = math.prod(self.partitioner.axis_sizes[axis] for axis in self.partitioner.rules["heads"])
        repeats = ways // math.gcd(k.shape[2], ways)
        if repeats == 1 or heads % (k.shape[2] * repeats):
            return k, v
        return jnp.repeat(k, repeats, axis=2), jnp.repeat(v, repeats, axis=2)


def mesh_decode(
    partitioner: Partitioner,
    q: Float[Array, "S H C"],
    cache: Mapping[str, Float[Array, "L S T K C"]],
    layer: Int[Array, ""],
    positions: Int[Array, " S"],
    window: int | None,
) -> Float[Array, "S H C"]:
    """Attention of a new token a slot over the cache of `layer`; each device attends with its own slots and heads."""
    local = partial(decode_attention, window=window)
    if partitioner.mesh.size == 1:
        return local(q, cache["k"], cache["v"], layer, positions)
    q_spec = partitioner.spec(("batch", "heads", "head_width"), q.shape)
    cache_spec = partitioner.spec(("layers", "batch", None, "kv_heads", "head_width"), cache["k"].shape)
    if q_spec[1] != cache_spec[3]:  # more devices than key heads: each holds all heads
        q_spec = PartitionSpec(q_spec[0], None, None)
    return jax.shard_map(
        local,
        mesh=partitioner.mesh,
        in_specs=(q_spec, cache_spec, cache_spec, PartitionSpec(), PartitionSpec(q_spec[0])),
        out_specs=q_spec,
        check_vma=False,  # as above
    )(q, cache["k"], cache["v"], layer, positions)
