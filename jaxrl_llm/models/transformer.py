"""A decoder of identical layers, stacked along a leading axis and run by one scan."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrl_llm.distributed.mesh import Partitioner
from jaxrl_llm.kernels.decode_attention import cache as caches
from jaxrl_llm.models.architecture import SITES, Architecture, Capture
from jaxrl_llm.models.attention import MeshAttention, Places, mesh_decode, mesh_step
from jaxrl_llm.models.layers import (
    INPUT,
    KEY,
    MIDDLE,
    MLP,
    POLICIES,
    QUERY,
    VALUE,
    Attention,
    RMSNorm,
    Rope,
    named,
    parameter,
    rope,
)

Cache = dict[str, jax.Array]  # "k" and "v", of all layers, in the order of `kernels.decode_attention.cache`
States = dict[str, jax.Array]  # {site: [B, T, D]}
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]  # (q, k, v) -> heads' outputs, and more

ROWS = ("batch", "length", None)  # axes of the residual stream of packed rows


@dataclass(frozen=True, kw_only=True)
class Running:
    """How the layers are run.

    Attributes:
      dtype: of the activations.
      remat: what the backward pass recomputes, one of `remat.NAMES`.
      unroll: layers of one step of the scan.
    """

    dtype: str
    remat: str
    unroll: int


def stored(x: Float[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """`x` as the cache keeps it; one of 8 bits has a largest value, which stands for all beyond it."""
    if dtype.itemsize > 1:
        return x.astype(dtype)
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -most, most).astype(dtype)


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, architecture: Architecture, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(architecture.width, architecture.norm_epsilon)
        self.attention = Attention(architecture, rngs=rngs)
        self.mlp_norm = RMSNorm(architecture.width, architecture.norm_epsilon)
        self.mlp = MLP(architecture, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], rotation: Rope, attend: Attend) -> tuple[Float[Array, "B T D"], Any]:
        """The layer's output, and whatever else `attend(q, k, v)` returns beside the heads' outputs."""
        states, extra = self.states(x, rotation, attend)
        return states["layer_out"], extra

    def states(self, x: Float[Array, "B T D"], rotation: Rope, attend: Attend) -> tuple[States, Any]:
        """The hidden state at every site of the layer (phases.Site), and what else `attend` returns."""
        x = named(x, INPUT)
        attn_in = self.attention_norm(x)
        names = (QUERY, KEY, VALUE)
        projected = self.attention.project(attn_in, rotation)
        heads, extra = attend(*(named(part, name) for part, name in zip(projected, names)))
        attn_out = self.attention.merge(heads)
        middle = named(x + attn_out, MIDDLE)
        mlp_in = self.mlp_norm(middle)
        mlp_out = self.mlp(mlp_in)
        found = (x, attn_in, attn_out, mlp_in, mlp_out, middle + mlp_out)
        return dict(zip(SITES, found, strict=True)), extra


class Transformer(nnx.Module):
    """Embedding, stacked layers, final norm, and a head where it is not the embedding."""

    def __init__(self, architecture: Architecture, partitioner: Partitioner, run: Running, *, rngs: nnx.Rngs):
        self.architecture, self.partitioner, self.run, self.dtype = architecture, partitioner, run, run.dtype
        table = ((architecture.vocabulary_size, architecture.width), ("vocabulary", "embed"), architecture.init_std)
        self.embedding = parameter(rngs, *table)
        self.layers = nnx.vmap(lambda r: Layer(architecture, rngs=r))(rngs.split(architecture.layers))
        self.norm = RMSNorm(architecture.width, architecture.norm_epsilon)
        self.head = None if architecture.tied else parameter(rngs, *table)

    def hidden(
        self, tokens: Int[Array, "B T"], places: Places, *, capture: Capture | None, max_segments: int | None
    ) -> Float[Array, "B T D"]:
        """Hidden states of packed rows: after the final norm, or what `capture` names; no later layer is run."""
        states = self._states(places, max_segments)
        step = lambda layer, x, index: (states(layer, x, index)["layer_out"], None)  # noqa: E731
        x = self.partitioner.constrain(self._embed(tokens), ROWS)
        if capture is None:
            return self.norm(self._scan(step, x, None)[0])
        whole = capture.site == "layer_out"
        x = self._scan(step, x, capture.layer + whole)[0]
        if not whole:
            graph, stacked = nnx.split(self.layers)
            layer = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[capture.layer], stacked))
            x = states(layer, x, jnp.asarray(capture.layer))[capture.site]
        return self.norm(x) if capture.final_norm else x

    def measured(
        self, tokens: Int[Array, "B T"], places: Places, measure: Callable[[States], Any], max_segments: int | None
    ) -> Any:
        """`measure` of the states at every site of each layer, stacked over layers; one layer's states exist at a time."""
        states = self._states(places, max_segments)

        def step(layer: Layer, x: jax.Array, index: jax.Array) -> tuple[jax.Array, Any]:
            found = states(layer, x, index)
            return found["layer_out"], measure(found)

        return self._scan(step, self.partitioner.constrain(self._embed(tokens), ROWS), None)[1]

    def _states(self, places: Places, max_segments: int | None) -> Callable[[Layer, jax.Array, jax.Array], States]:
        """(layer, its input, its number) -> the states at its sites, of packed rows."""
        rotation = rope(self.architecture, places.positions)
        attention = MeshAttention(partitioner=self.partitioner, max_segments=max_segments)

        def states(layer: Layer, x: jax.Array, index: jax.Array) -> States:
            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
                return self._by_window(index, lambda window: attention(q, k, v, places, places, window)), None

            found = layer.states(x, rotation, attend)[0]
            return {**found, "layer_out": self.partitioner.constrain(found["layer_out"], ROWS)}

        return states

    def extend(
        self, cache: Cache, tokens: Int[Array, "S T"], positions: Int[Array, "S T"], *, fresh: bool
    ) -> tuple[Float[Array, "S T D"], Cache]:
        """Hidden states after the final norm of tokens that follow the cached ones, and the cache with them written.

        Where the cache is `fresh`, that is empty, tokens attend to each other as a packed row of one segment does.
        """
        slots, length = cache["k"].shape[1], cache["k"].shape[caches.entry_axis()]
        rotation = rope(self.architecture, positions)
        attention = MeshAttention(partitioner=self.partitioner, cached=True, max_segments=1 if fresh else None)
        queries = Places(positions, jnp.ones_like(positions))
        key_positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (slots, length))
        keys = Places(key_positions, jnp.ones_like(key_positions))

        def step(layer: Layer, carry: tuple[jax.Array, Cache], index: jax.Array) -> tuple[Any, None]:
            x, cache = carry

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Cache]:
                new = {name: stored(x, cache[name].dtype) for name, x in (("k", k), ("v", v))}
                if caches.heads_first() and tokens.shape[1] == 1 and not fresh:
                    own = {name: x[:, 0] for name, x in new.items()}
                    place = index, positions[:, 0]
                    both = lambda window: mesh_step(self.partitioner, q[:, 0], own, cache, *place, window)  # noqa: E731
                    out, entries = self._by_window(index, both)
                    return out[:, None], entries
                # Into the scan's carry, which XLA updates in place.
                entries = {name: caches.write(cache[name], new[name], index, positions, fresh=fresh) for name in new}
                if fresh:
                    return self._by_window(index, lambda window: attention(q, k, v, queries, queries, window)), entries
                if tokens.shape[1] == 1:
                    one = lambda window: mesh_decode(self.partitioner, q[:, 0], entries, index, positions[:, 0], window)  # noqa: E731
                    return self._by_window(index, one)[:, None], entries
                k, v = (caches.of_layer(entries[name], index).astype(q.dtype) for name in "kv")
                return self._by_window(index, lambda window: attention(q, k, v, queries, keys, window)), entries

            x, cache = layer(x, rotation, attend)
            return (self.partitioner.constrain(x, ("batch", None, None)), cache), None

        x = self.partitioner.constrain(self._embed(tokens), ("batch", None, None))
        (x, cache), _ = self._scan(step, (x, cache), None)
        return self.norm(x), cache

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        # Gathered in float32, so that the gradient of a frequent token is summed in float32. Each device looks up its share
        # of the width for all rows and they exchange activations, fewer bytes than the table and its gradient have.
        table = self.partitioner.constrain(self.embedding[...], ("vocabulary", "embed"))
        found = table[self.partitioner.constrain(tokens, ("lookup", "length"))]
        return self.partitioner.constrain(found.astype(self.dtype), ("lookup", "length", "embed"))

    def _by_window(self, index: jax.Array, attend: Callable[[int | None], Any]) -> Any:
        """`attend` with the window of layer `index`; windows stay static, as fused attention kernels want them."""
        windows = self.architecture.windows
        if len(set(windows)) == 1:
            return attend(windows[0])
        slides = jnp.array([window is not None for window in windows])[index]
        return jax.lax.cond(slides, lambda: attend(self.architecture.window), lambda: attend(None))

    def _scan(
        self, step: Callable[[Layer, Any, jax.Array], tuple[Any, Any]], carry: Any, layers: int | None
    ) -> tuple[Any, Any]:
        """Runs `step(layer, carry, index)` over the first `layers` layers under the remat policy; as lax.scan returns."""
        depth = self.architecture.layers if layers is None else layers
        graph, state = nnx.split(self.layers)
        state = jax.tree.map(lambda leaf: leaf[:depth], state)

        def body(carry: Any, inputs: tuple[Any, jax.Array]) -> tuple[Any, Any]:
            layer_state, index = inputs
            return step(nnx.merge(graph, layer_state), carry, index)

        unroll = max(min(self.run.unroll, depth), 1)
        if self.run.remat != "none":
            # Without a loop between them, XLA would find that forward and recomputation are the same.
            body = jax.checkpoint(body, policy=POLICIES[self.run.remat], prevent_cse=unroll == depth)
        return jax.lax.scan(body, carry, (state, jnp.arange(depth)), unroll=unroll)
