"""Attention on a mesh: each device attends with its own rows and heads, under shard_map."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_llm.distributed.mesh import Partitioner
from jaxrl_llm.kernels.attention.api import attention
from jaxrl_llm.kernels.decode_attention import cache as caches
from jaxrl_llm.kernels.decode_attention.api import decode_attention, decode_step


class Places(NamedTuple):
    """The places of tokens: positions and segments, int32 [B, T] each; segment 0 is padding."""

    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"]


@dataclass(frozen=True, kw_only=True)
class MeshAttention:
    """Attention whose rows are split over the batch axes and whose heads over `tensor` and `context`; tokens are whole.

    Between layers tokens are split over `context`; around attention they are exchanged for heads, all to all (Ulysses,
    https://arxiv.org/abs/2309.14509), so that every backend sees whole packed rows and every device has the same work, which
    a causal mask over split queries would not give. Key/value heads that are fewer than the devices are repeated; heads that
    the devices do not divide are padded with heads of zeros, which are dropped from the output.

    Attributes:
      partitioner: the mesh and its axis table.
      max_segments: largest number of segments of one row, or None where unknown; a hint for the backends.
      cached: whether the keys are a cache's, whose heads are split over `tensor` alone, and not at all where it does not divide them.
    """

    partitioner: Partitioner
    max_segments: int | None = None
    cached: bool = False

    def __call__(
        self,
        q: Float[Array, "B T H C"],
        k: Float[Array, "B S K C"],
        v: Float[Array, "B S K C"],
        queries: Places,
        keys: Places,
        window: int | None,
    ) -> Float[Array, "B T H C"]:
        """Computes softmax attention within segments, causal by position, over the last `window` positions if one is given."""

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
        heads, axes = q.shape[2], self._head_axes(q.shape[2])
        ways = math.prod(self.partitioner.axis_sizes[axis] for axis in axes)
        q, k, v = divisible(q, k, v, ways)
        rows = self.partitioner.spec(("batch",), q.shape[:1])[0]
        spec, place = PartitionSpec(rows, None, axes or None, None), PartitionSpec(rows, None)
        out = jax.shard_map(
            local,
            mesh=self.partitioner.mesh,
            in_specs=(spec, spec, spec, place, place),
            out_specs=spec,
            check_vma=False,  # backends call kernels whose outputs carry no varying-axes types
        )(q, k, v, queries, keys)
        tokens = None if self.cached else "length"
        return self.partitioner.constrain(out[:, :, :heads], ("batch", tokens, "heads", "head_width"))

    def _head_axes(self, heads: int) -> tuple[str, ...]:
        """Returns the mesh axes over which heads are split."""
        rules, sizes = self.partitioner.rules, self.partitioner.axis_sizes
        names = rules["heads"] if self.cached else (*rules["heads"], *rules["length"])
        axes = tuple(axis for axis in names if sizes[axis] > 1)
        divided = heads % math.prod(sizes[axis] for axis in axes) == 0
        return axes if divided or not self.cached else ()


def divisible(
    q: Float[Array, "B T H C"], k: Float[Array, "B S K C"], v: Float[Array, "B S K C"], ways: int
) -> tuple[Float[Array, "B T heads C"], Float[Array, "B S kv_heads C"], Float[Array, "B S kv_heads C"]]:
    """Repeats heads, and pads them with heads of zeros, so that `ways` divides heads and key/value heads; attention stays the same."""
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % ways == 0:
        repeats = ways // math.gcd(kv_heads, ways)
        # Where repeats do not share the query heads evenly, each query head gets a key head of its own.
        repeats = repeats if heads % (kv_heads * repeats) == 0 else heads // kv_heads
        return (q, k, v) if repeats == 1 else (q, _repeated(k, repeats), _repeated(v, repeats))
    k, v = (_repeated(x, heads // kv_heads) for x in (k, v))
    more = ((0, 0), (0, 0), (0, -heads % ways), (0, 0))
    return jnp.pad(q, more), jnp.pad(k, more), jnp.pad(v, more)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _repeated(x: Float[Array, "B S K C"], times: int) -> Float[Array, "B S heads C"]:
    """Repeats each head `times` times; its gradient is the sum over the copies, which devices take in float32."""
    return jnp.repeat(x, times, axis=2)


def _repeated_backward(times: int, _: None, g: jax.Array) -> tuple[jax.Array]:
    copies = g.reshape(*g.shape[:2], -1, times, g.shape[-1])
    # TPU's compiler would round the parts of devices before their sum, which is rounded after it.
    return (jax.lax.optimization_barrier(jnp.sum(copies, axis=3, dtype=jnp.float32)).astype(g.dtype),)


_repeated.defvjp(lambda x, times: (_repeated(x, times), None), _repeated_backward)


def mesh_decode(
    partitioner: Partitioner,
    q: Float[Array, "S H C"],
    cache: Mapping[str, Float[Array, "L S *T_K C"]],
    layer: Int[Array, ""],
    positions: Int[Array, " S"],
    window: int | None,
) -> Float[Array, "S H C"]:
    """Attends with one new token a slot over the cache of `layer`; each device uses its own slots and heads."""
    local = partial(decode_attention, window=window)
    if partitioner.mesh.size == 1:
        return local(q, cache["k"], cache["v"], layer, positions)
    queries, entries = _decode_specs(partitioner, q, cache)
    return jax.shard_map(
        local,
        mesh=partitioner.mesh,
        in_specs=(queries, entries, entries, PartitionSpec(), PartitionSpec(queries[0])),
        out_specs=queries,
        check_vma=False,  # as above
    )(q, cache["k"], cache["v"], layer, positions)


def mesh_step(
    partitioner: Partitioner,
    q: Float[Array, "S H C"],
    new: Mapping[str, Float[Array, "S K C"]],
    cache: Mapping[str, jax.Array],
    layer: Int[Array, ""],
    positions: Int[Array, " S"],
    window: int | None,
) -> tuple[Float[Array, "S H C"], dict[str, Float[Array, "L P *T_K C"]]]:
    """Attends as `mesh_decode` over a cache without the `new` entries, and returns the cache with them too; each device writes its own.

    A cache of pages has their "table" too, whose numbers count a device's own pages.
    """
    table = [cache["table"]] if "table" in cache else []

    def local(q: Any, new: Any, cached: Any, layer: Any, positions: Any, *table: Any) -> Any:
        return decode_step(q, new, cached, layer, positions, table=table[0] if table else None, window=window)

    parts, entries = (new["k"], new["v"]), (cache["k"], cache["v"])
    if partitioner.mesh.size == 1:
        out, entries = local(q, parts, entries, layer, positions, *table)
        return out, {"k": entries[0], "v": entries[1]}
    queries, spec = _decode_specs(partitioner, q, cache)
    heads = PartitionSpec(spec[1], spec[caches.axes().index("kv_heads")], None)
    out, entries = jax.shard_map(
        local,
        mesh=partitioner.mesh,
        in_specs=(
            queries, (heads, heads), (spec, spec), PartitionSpec(), *[PartitionSpec(queries[0])] * (1 + len(table)),
        ),
        out_specs=(queries, (spec, spec)),
        check_vma=False,  # as above
    )(q, parts, entries, layer, positions, *table)  # fmt: skip
    return out, {"k": entries[0], "v": entries[1]}


def _decode_specs(partitioner: Partitioner, q: jax.Array, cache: Mapping[str, jax.Array]) -> tuple[Any, Any]:
    """Returns how the mesh splits queries and cache; queries' heads are not split where there are more devices than key heads."""
    queries = partitioner.spec(("batch", "heads", "head_width"), q.shape)
    entries = partitioner.spec(caches.axes(), cache["k"].shape)
    if queries[1] != entries[caches.axes().index("kv_heads")]:  # each device holds all heads
        queries = PartitionSpec(queries[0], None, None)
    return queries, entries
