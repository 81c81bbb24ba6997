"""A decoder of identical layers, stacked along a leading axis and run by one scan."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Integer

from jaxrl_llm.distributed.mesh import Partitioner
from jaxrl_llm.kernels.decode_attention import cache as caches
from jaxrl_llm.models.architecture import SITES, Architecture, Capture
from jaxrl_llm.models.attention import MeshAttention, Places, mesh_decode, mesh_step
from jaxrl_llm.models.experts import ExpertMLP, Report, Routed
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

Routes = Integer[Array, "B T E_layers k"]


class At(NamedTuple):
    """Where a layer is: its number, and the experts that were recorded for its tokens, [B, T, k], where any were."""

    layer: jax.Array
    routes: jax.Array | None


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
    """x + attention(norm(x)), then x + mlp(norm(x)), with an MLP of experts where the layer is `sparse`."""

    def __init__(self, architecture: Architecture, partitioner: Partitioner, sparse: bool, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(architecture.width, architecture.norm_epsilon)
        self.attention = Attention(architecture, rngs=rngs)
        self.mlp_norm = RMSNorm(architecture.width, architecture.norm_epsilon)
        self.mlp = ExpertMLP(architecture, partitioner, rngs=rngs) if sparse else MLP(architecture, rngs=rngs)

    def states(
        self, x: Float[Array, "B T D"], rotation: Rope, attend: Attend, routed: Routed
    ) -> tuple[States, Any, Report | None]:
        """The hidden state at every site of the layer (phases.Site), what else `attend(q, k, v)` returns, and the experts' report."""
        x = named(x, INPUT)
        attn_in = self.attention_norm(x)
        names = (QUERY, KEY, VALUE)
        projected = self.attention.project(attn_in, rotation)
        heads, extra = attend(*(named(part, name) for part, name in zip(projected, names)))
        attn_out = self.attention.merge(heads)
        middle = named(x + attn_out, MIDDLE)
        mlp_in = self.mlp_norm(middle)
        mlp_out, report = self.mlp(mlp_in, routed) if isinstance(self.mlp, ExpertMLP) else (self.mlp(mlp_in), None)
        found = (x, attn_in, attn_out, mlp_in, mlp_out, middle + mlp_out)
        return dict(zip(SITES, found, strict=True)), extra, report


class Transformer(nnx.Module):
    """Embedding, stacked layers, final norm, and a head where it is not the embedding."""

    def __init__(self, architecture: Architecture, partitioner: Partitioner, run: Running, *, rngs: nnx.Rngs):
        self.architecture, self.partitioner, self.run, self.dtype = architecture, partitioner, run, run.dtype
        table = ((architecture.vocabulary_size, architecture.width), ("vocabulary", "embed"), architecture.init_std)
        self.embedding = parameter(rngs, *table)
        make = lambda sparse: lambda r: Layer(architecture, partitioner, sparse, rngs=r)  # noqa: E731
        for stack, sparse in zip(architecture.stacks, architecture.sparse):
            setattr(self, stack, nnx.vmap(make(sparse))(rngs.split(architecture.layers // architecture.period)))
        self.norm = RMSNorm(architecture.width, architecture.norm_epsilon)
        self.head = None if architecture.tied else parameter(rngs, *table)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        places: Places,
        *,
        capture: Capture | None,
        max_segments: int | None,
        routes: Routes | None = None,
        replay: bool = True,
    ) -> tuple[Float[Array, "B T D"], Report | None]:
        """Hidden states of packed rows, after the final norm or what `capture` names, and the experts' report of the layers
        that were run whole, stacked over those with experts; no layer after the captured one is run."""
        states = self._states(places, max_segments, replay)

        def step(layer: Layer, x: jax.Array, at: At) -> tuple[jax.Array, Any]:
            found, report = states(layer, x, at)
            return found["layer_out"], report

        x = self.partitioner.constrain(self._embed(tokens), ROWS)
        if capture is None:
            x, reports = self._scan(step, x, None, routes)
            return self.norm(x), reports
        whole = capture.site == "layer_out"
        x, reports = self._scan(step, x, capture.layer + whole, routes)
        if not whole:
            row, stack = divmod(capture.layer, self.architecture.period)
            graph, stacked = nnx.split(getattr(self, self.architecture.stacks[stack]))
            layer = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[row], stacked))
            at = At(jnp.asarray(capture.layer), self._of_layer(routes, capture.layer))
            x = states(layer, x, at)[0][capture.site]
        return (self.norm(x) if capture.final_norm else x), reports

    def measured(
        self, tokens: Int[Array, "B T"], places: Places, measure: Callable[[States], Any], max_segments: int | None
    ) -> Any:
        """`measure` of the states at every site of each layer, stacked over layers; one layer's states exist at a time."""
        states = self._states(places, max_segments)

        def step(layer: Layer, x: jax.Array, at: At) -> tuple[jax.Array, Any]:
            found, _ = states(layer, x, at)
            return found["layer_out"], measure(found)

        return self._scan(step, self.partitioner.constrain(self._embed(tokens), ROWS), None)[1]

    def _states(
        self, places: Places, max_segments: int | None, replay: bool = True
    ) -> Callable[[Layer, jax.Array, At], tuple[States, Report | None]]:
        """(layer, its input, where it is) -> the states at its sites, of packed rows, and its experts' report."""
        rotation = rope(self.architecture, places.positions)
        attention = MeshAttention(partitioner=self.partitioner, max_segments=max_segments)

        def states(layer: Layer, x: jax.Array, at: At) -> tuple[States, Report | None]:
            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
                return self._by_window(at.layer, lambda window: attention(q, k, v, places, places, window)), None

            routed = Routed(places.segments > 0, at.routes, replay)
            found, _, report = layer.states(x, rotation, attend, routed)
            return {**found, "layer_out": self.partitioner.constrain(found["layer_out"], ROWS)}, report

        return states

    def extend(
        self, cache: Cache, tokens: Int[Array, "S T"], positions: Int[Array, "S T"], *, fresh: bool
    ) -> tuple[Float[Array, "S T D"], Cache, Report | None]:
        """Hidden states after the final norm of tokens that follow the cached ones, the cache with them written, and the experts'
        report.

        Where the cache is `fresh`, that is empty, tokens attend to each other as a packed row of one segment does.
        """
        slots, length = cache["k"].shape[1], cache["k"].shape[caches.entry_axis()]
        rotation = rope(self.architecture, positions)
        attention = MeshAttention(partitioner=self.partitioner, cached=True, max_segments=1 if fresh else None)
        queries = Places(positions, jnp.ones_like(positions))
        key_positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (slots, length))
        keys = Places(key_positions, jnp.ones_like(key_positions))

        def step(layer: Layer, carry: tuple[jax.Array, Cache], at: At) -> tuple[Any, Report | None]:
            (x, cache), index = carry, at.layer

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

            routed = Routed(jnp.ones(x.shape[:2], bool), None)
            found, cache, report = layer.states(x, rotation, attend, routed)
            return (self.partitioner.constrain(found["layer_out"], ("batch", None, None)), cache), report

        x = self.partitioner.constrain(self._embed(tokens), ("batch", None, None))
        (x, cache), reports = self._scan(step, (x, cache), None)
        return self.norm(x), cache, reports

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

    def _of_layer(self, routes: Routes | None, layer: int) -> jax.Array | None:
        """The recorded experts of a layer, [B, T, k], which are there for layers with experts alone."""
        sparse = self.architecture.sparse
        return None if routes is None or not sparse[layer] else routes[:, :, sum(sparse[:layer])]

    def _scan(
        self,
        step: Callable[[Layer, Any, At], tuple[Any, Any]],
        carry: Any,
        layers: int | None,
        routes: Routes | None = None,
    ) -> tuple[Any, Any]:
        """Runs `step(layer, carry, where it is)` over the first `layers` layers under the remat policy.

        Returns the last carry, and what the steps returned beside it, stacked in the layers' order over those that returned anything.
        """
        depth, period = self.architecture.layers if layers is None else layers, self.architecture.period
        split = [nnx.split(getattr(self, stack)) for stack in self.architecture.stacks]
        blocks = depth // period
        unroll = max(min(self.run.unroll // period, blocks), 1)

        def one(graph: Any) -> Callable[[Any, tuple[Any, At]], tuple[Any, Any]]:
            def run(carry: Any, inputs: tuple[Any, At]) -> tuple[Any, Any]:
                state, at = inputs
                return step(nnx.merge(graph, state), carry, at)

            if self.run.remat == "none":
                return run
            # Without a loop between them, XLA would find that forward and recomputation are the same.
            return jax.checkpoint(run, policy=POLICIES[self.run.remat], prevent_cse=period > 1 or unroll == blocks)

        runs = [one(graph) for graph, _ in split]

        def body(carry: Any, inputs: tuple[Any, jax.Array, Any]) -> tuple[Any, Any]:
            states, block, recorded = inputs
            found = []
            for position, (run, state) in enumerate(zip(runs, states)):
                at = At(block if period == 1 else block * period + position, recorded[position])
                carry, out = run(carry, (state, at))
                found.append(out)
            return carry, found

        states = [jax.tree.map(lambda leaf: leaf[:blocks], state) for _, state in split]
        recorded = [self._recorded(routes, position, blocks) for position in range(period)]
        carry, found = jax.lax.scan(body, carry, (states, jnp.arange(blocks), recorded), unroll=unroll)
        outs = _in_order(found)
        for layer in range(blocks * period, depth):  # the first layers of a block that is not run whole
            state = jax.tree.map(lambda leaf: leaf[blocks], split[layer % period][1])
            at = At(jnp.asarray(layer), self._of_layer(routes, layer))
            carry, out = runs[layer % period](carry, (state, at))
            if out is not None:
                outs = jax.tree.map(lambda old, new: jnp.concatenate([old, new[None]]), outs, out)
        return carry, outs

    def _recorded(self, routes: Routes | None, position: int, blocks: int) -> jax.Array | None:
        """The recorded experts of the layers at a position of the period, [blocks, B, T, k]."""
        period = self.architecture.period
        layers = [self._of_layer(routes, block * period + position) for block in range(blocks)]
        there = [layer for layer in layers if layer is not None]  # all of them, or none
        return jnp.stack(there) if there else None


def _in_order(found: list[Any]) -> Any:
    """Outputs of the positions of a period, [blocks, ...] each, stacked in the layers' order; positions without any are left out."""
    there = [out for out in found if out is not None]
    if len(there) <= 1:
        return there[0] if there else None
    return jax.tree.map(lambda *x: jnp.stack(x, axis=1).reshape(-1, *x[0].shape[1:]), *there)
