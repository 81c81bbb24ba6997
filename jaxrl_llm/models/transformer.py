"""A decoder of layers that are stacked along a leading axis and run by one scan."""

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
from jaxrl_llm.models.delta_net import GatedDeltaNet, Held
from jaxrl_llm.models.experts import ExpertMLP, Report, Routed
from jaxrl_llm.models.gated_delta import continued
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
from jaxrl_llm.models.linear import added, looked_up, read, rounded

# "k" and "v" of the layers that attend, in the order of `kernels.decode_attention.cache`; of layers with a state "state" [L, S, Hv, dk, dv]
# and "conv" [L, S, taps - 1, channels]. Where the keys and values are pages that slots share, the slots' "table" [S, N] too.
Cache = dict[str, jax.Array]
States = dict[str, jax.Array]  # {site: [B, T, D]}
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]  # (q, k, v) -> heads' outputs, and more
Mix = Callable[
    [Attention | GatedDeltaNet, jax.Array], tuple[jax.Array, Any]
]  # (mixer, its input) -> its output, and more

ROWS = ("batch", "length", None)  # axes of the residual stream of packed rows

Routes = Integer[Array, "B T E_layers k"]


class At(NamedTuple):
    """A layer's number, and the experts that were recorded for its tokens, [B, T, k], where any were."""

    layer: jax.Array
    routes: jax.Array | None


@dataclass(frozen=True, kw_only=True)
class Running:
    """The settings by which the layers are run.

    Attributes:
      dtype: dtype of the activations.
      remat: name of the values that the backward pass recomputes, one of `layers.NAMES`.
      unroll: number of layers in one step of the scan.
    """

    dtype: str
    remat: str
    unroll: int


Apart = list[Any]  # the parameters of each layer, in the layers' order


def stored(x: Float[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """Casts `x` to a cache's `dtype`; for one of 8 bits, values are clipped to its range."""
    if dtype.itemsize > 1:
        return x.astype(dtype)
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -most, most).astype(dtype)


class Kind(NamedTuple):
    """The kind of a layer: an MLP of experts where it is `sparse`, and a recurrent state in place of attention where it is `recurrent`."""

    sparse: bool
    recurrent: bool


class Layer(nnx.Module):
    """A layer: x + attention(norm(x)), then x + mlp(norm(x)), with what its kind has in place of attention and MLP."""

    def __init__(self, architecture: Architecture, partitioner: Partitioner, kind: Kind, *, rngs: nnx.Rngs):
        norm = (architecture.width, architecture.norm_epsilon, architecture.zero_centred)
        self.attention_norm = RMSNorm(*norm)
        if kind.recurrent:
            self.delta = GatedDeltaNet(architecture, partitioner, rngs=rngs)
        else:
            self.attention = Attention(architecture, rngs=rngs)
        self.mlp_norm = RMSNorm(*norm)
        dense = lambda: MLP(architecture, architecture.mlp_width, rngs=rngs)  # noqa: E731
        self.mlp = ExpertMLP(architecture, partitioner, rngs=rngs) if kind.sparse else dense()

    def states(self, x: Float[Array, "B T D"], mix: Mix, routed: Routed) -> tuple[States, Any, Report | None]:
        """Returns the hidden state at every site of the layer (architecture.Site), the second result of `mix`, and the experts' report."""
        x = named(x, INPUT)
        attn_in = self.attention_norm(x)
        attn_out, extra = mix(self.delta if hasattr(self, "delta") else self.attention, attn_in)
        middle, mlp_in = self.mlp_norm.of_sum(x, attn_out, MIDDLE)
        mlp_out, report = self.mlp(mlp_in, routed) if isinstance(self.mlp, ExpertMLP) else (self.mlp(mlp_in), None)
        found = (x, attn_in, attn_out, mlp_in, mlp_out, added(middle, mlp_out))
        return dict(zip(SITES, found, strict=True)), extra, report


def attended(
    attention: Attention, x: Float[Array, "B T D"], rotation: Rope, attend: Attend
) -> tuple[Float[Array, "B T D"], Any]:
    """Returns the output of a layer's attention, and the second result of `attend(q, k, v)`."""
    *projected, gate = attention.project(x, rotation)
    heads, extra = attend(*(named(part, name) for part, name in zip(projected, (QUERY, KEY, VALUE))))
    return attention.merge(heads, None if gate is None else named(gate, QUERY)), extra


class Transformer(nnx.Module):
    """The embedding, stacked layers, final norm, and a head where it is not the embedding."""

    def __init__(self, architecture: Architecture, partitioner: Partitioner, run: Running, *, rngs: nnx.Rngs):
        self.architecture, self.partitioner, self.run, self.dtype = architecture, partitioner, run, run.dtype
        table = ((architecture.vocabulary_size, architecture.width), ("vocabulary", "embed"), architecture.init_std)
        self.embedding = parameter(rngs, *table)
        make = lambda kind: lambda r: Layer(architecture, partitioner, kind, rngs=r)  # noqa: E731
        for stack, *kind in zip(architecture.stacks, architecture.sparse, architecture.recurrent):
            setattr(self, stack, nnx.vmap(make(Kind(*kind)))(rngs.split(architecture.layers // architecture.period)))
        self.norm = RMSNorm(architecture.width, architecture.norm_epsilon, architecture.zero_centred)
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
        """Returns hidden states of packed rows, after the final norm or at the site that `capture` names, and the experts' report of the
        layers that were run whole, stacked over those with experts; no layer after the captured one is run."""
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
            layer = nnx.merge(graph, read(jax.tree.map(lambda leaf: leaf[row], stacked)))
            at = At(jnp.asarray(capture.layer), self._of_layer(routes, capture.layer))
            x = states(layer, x, at)[0][capture.site]
        return (self.norm(x) if capture.final_norm else x), reports

    def measured(
        self, tokens: Int[Array, "B T"], places: Places, measure: Callable[[States], Any], max_segments: int | None
    ) -> Any:
        """Returns `measure` of the states at every site of each layer, stacked over layers; one layer's states exist at a time."""
        states = self._states(places, max_segments)

        def step(layer: Layer, x: jax.Array, at: At) -> tuple[jax.Array, Any]:
            found, _ = states(layer, x, at)
            return found["layer_out"], measure(found)

        return self._scan(step, self.partitioner.constrain(self._embed(tokens), ROWS), None)[1]

    def _states(
        self, places: Places, max_segments: int | None, replay: bool = True
    ) -> Callable[[Layer, jax.Array, At], tuple[States, Report | None]]:
        """Returns a function (layer, its input, its `At`) -> (the states at its sites, of packed rows; its experts' report)."""
        rotation = rope(self.architecture, places.positions)
        attention = MeshAttention(partitioner=self.partitioner, max_segments=max_segments)
        owners = None if self.architecture.delta is None else continued(places.segments)

        def states(layer: Layer, x: jax.Array, at: At) -> tuple[States, Report | None]:
            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
                return self._by_window(at.layer, lambda window: attention(q, k, v, places, places, window)), None

            def mix(mixer: Attention | GatedDeltaNet, x: jax.Array) -> tuple[jax.Array, None]:
                if isinstance(mixer, GatedDeltaNet):
                    assert owners is not None
                    return mixer(x, owners, places.segments > 0)[0], None
                return attended(mixer, x, rotation, attend)

            routed = Routed(places.segments > 0, at.routes, replay)
            found, _, report = layer.states(x, mix, routed)
            return {**found, "layer_out": self.partitioner.constrain(found["layer_out"], ROWS)}, report

        return states

    def extend(
        self,
        cache: Cache,
        tokens: Int[Array, "S T"],
        positions: Int[Array, "S T"],
        *,
        fresh: bool,
        counts: Int[Array, " S"] | None = None,
        apart: Apart | None = None,
    ) -> tuple[Float[Array, "S T D"], Cache, Report | None]:
        """Returns hidden states after the final norm of tokens that follow the cached ones, the cache with these tokens written, and the
        experts' report.

        Where the cache is `fresh`, that is empty, tokens attend to each other as a packed row of one segment does. The first `counts` tokens
        of each slot, or all of them, enter the states of layers that hold one. Where `apart` is given, the layers are run one by one.
        """
        slots, length = cache["k"].shape[1], cache["k"].shape[caches.entry_axis()]
        rotation = rope(self.architecture, positions)
        attention = MeshAttention(partitioner=self.partitioner, cached=True, max_segments=1 if fresh else None)
        queries = Places(positions, jnp.ones_like(positions))
        key_positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (slots, length))
        keys = Places(key_positions, jnp.ones_like(key_positions))

        def step(layer: Layer, carry: tuple[jax.Array, Cache], at: At) -> tuple[Any, Report | None]:
            (x, cache), index = carry, self._entry(at.layer)

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Cache]:
                new = {name: stored(x, cache[name].dtype) for name, x in (("k", k), ("v", v))}
                if (caches.heads_first() or "table" in cache) and tokens.shape[1] == 1 and not fresh:
                    own = {name: x[:, 0] for name, x in new.items()}
                    place = index, positions[:, 0]
                    both = lambda window: mesh_step(self.partitioner, q[:, 0], own, cache, *place, window)  # noqa: E731
                    out, entries = self._by_window(at.layer, both)
                    return out[:, None], entries
                # Into the scan's carry, which XLA updates in place.
                entries = {name: caches.write(cache[name], new[name], index, positions, fresh=fresh) for name in new}
                if fresh:
                    return self._by_window(
                        at.layer, lambda window: attention(q, k, v, queries, queries, window)
                    ), entries
                if tokens.shape[1] == 1:
                    one = lambda window: mesh_decode(self.partitioner, q[:, 0], entries, index, positions[:, 0], window)  # noqa: E731
                    return self._by_window(at.layer, one)[:, None], entries
                k, v = (caches.of_layer(entries[name], index).astype(q.dtype) for name in "kv")
                return self._by_window(at.layer, lambda window: attention(q, k, v, queries, keys, window)), entries

            def mix(mixer: Attention | GatedDeltaNet, x: jax.Array) -> tuple[jax.Array, Cache]:
                if not isinstance(mixer, GatedDeltaNet):
                    out, entries = attended(mixer, x, rotation, attend)
                    return out, {**cache, **entries}
                held = Held(*(cache[n] for n in Held._fields))
                if tokens.shape[1] == 1 and counts is None:
                    out, held = mixer.decode(x, held, index)
                    return out, {**cache, **held._asdict()}
                taken = tokens.shape[1] if counts is None else counts[:, None]
                valid = jnp.broadcast_to(jnp.arange(tokens.shape[1]) < taken, tokens.shape)
                held = Held(*(jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for x in held))
                out, held = mixer(x, jnp.ones_like(positions), valid, held)
                return out, {**cache, **{n: cache[n].at[index].set(part) for n, part in held._asdict().items()}}

            routed = Routed(jnp.ones(x.shape[:2], bool), None)
            found, cache, report = layer.states(x, mix, routed)
            return (self.partitioner.constrain(found["layer_out"], ("batch", None, None)), cache), report

        x = self.partitioner.constrain(self._embed(tokens), ("batch", None, None))
        (x, cache), reports = (
            self._scan(step, (x, cache), None) if apart is None else self._each(step, (x, cache), apart)
        )
        return self.norm(x), cache, reports

    def apart(self) -> Apart:
        """Returns the parameters of each layer by itself."""
        split = [nnx.split(getattr(self, stack))[1] for stack in self.architecture.stacks]
        places = (divmod(layer, self.architecture.period) for layer in range(self.architecture.layers))
        return [jax.tree.map(lambda leaf, row=row: leaf[row], split[stack]) for row, stack in places]

    def _each(self, step: Callable[[Layer, Any, At], tuple[Any, Any]], carry: Any, apart: Apart) -> tuple[Any, Any]:
        """Runs `step(layer, carry, at)` over layers whose parameters are given one by one; returns as `_scan` does."""
        graphs = [nnx.split(getattr(self, stack))[0] for stack in self.architecture.stacks]
        outs = []
        for layer, state in enumerate(apart):
            whole = nnx.merge(graphs[layer % len(graphs)], state)
            carry, out = step(whole, carry, At(jnp.asarray(layer), None))
            outs.extend([] if out is None else [out])
        return carry, jax.tree.map(lambda *x: jnp.stack(x), *outs) if outs else None

    def _entry(self, layer: jax.Array) -> jax.Array:
        """Returns the index of a layer's entries in the cache: its number among the layers of its kind."""
        kinds = self.architecture.recurrent
        if not any(kinds):
            return layer
        return jnp.array([sum(other == kind for other in kinds[:i]) for i, kind in enumerate(kinds)])[layer]

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        # Gathered before it is cast, so that the gradient of a frequent token is summed in float32. Each device looks up its share
        # of the width for all rows and they exchange activations, fewer bytes than the table and its gradient have.
        table = self.partitioner.constrain(self.embedding[...], ("vocabulary", "embed"))
        found = looked_up(table, self.partitioner.constrain(tokens, ("lookup", "length")))
        return self.partitioner.constrain(rounded(found, self.dtype), ("lookup", "length", "embed"))

    def _by_window(self, index: jax.Array, attend: Callable[[int | None], Any]) -> Any:
        """Calls `attend` with the window of layer `index`; windows stay static, as fused attention kernels want them."""
        windows = self.architecture.windows
        if len(set(windows)) == 1:
            return attend(windows[0])
        slides = jnp.array([window is not None for window in windows])[index]
        return jax.lax.cond(slides, lambda: attend(self.architecture.window), lambda: attend(None))

    def _of_layer(self, routes: Routes | None, layer: int) -> jax.Array | None:
        """Returns the recorded experts of a layer, [B, T, k]; None without a record or where the layer has no experts."""
        sparse = self.architecture.sparse
        return None if routes is None or not sparse[layer] else routes[:, :, sum(sparse[:layer])]

    def _scan(
        self,
        step: Callable[[Layer, Any, At], tuple[Any, Any]],
        carry: Any,
        layers: int | None,
        routes: Routes | None = None,
    ) -> tuple[Any, Any]:
        """Runs `step(layer, carry, at)` over the first `layers` layers under the remat policy.

        Returns the last carry, and the steps' second results, stacked in the layers' order over those that are not None.
        """
        depth, period = self.architecture.layers if layers is None else layers, self.architecture.period
        split = [nnx.split(getattr(self, stack)) for stack in self.architecture.stacks]
        blocks = depth // period
        unroll = max(min(self.run.unroll // period, blocks), 1)

        def one(graph: Any) -> Callable[[Any, tuple[Any, At]], tuple[Any, Any]]:
            def run(carry: Any, inputs: tuple[Any, At]) -> tuple[Any, Any]:
                state, at = inputs
                return step(nnx.merge(graph, read(state)), carry, at)

            if self.run.remat == "none":
                return run
            # Without a loop between them, XLA would merge the forward pass and its recomputation.
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
        for layer in range(blocks * period, depth):  # the first layers of a partial block
            state = jax.tree.map(lambda leaf: leaf[blocks], split[layer % period][1])
            at = At(jnp.asarray(layer), self._of_layer(routes, layer))
            carry, out = runs[layer % period](carry, (state, at))
            if out is not None:
                outs = jax.tree.map(lambda old, new: jnp.concatenate([old, new[None]]), outs, out)
        return carry, outs

    def _recorded(self, routes: Routes | None, position: int, blocks: int) -> jax.Array | None:
        """Returns the recorded experts of the layers at a position of the period, [blocks, B, T, k]."""
        period = self.architecture.period
        layers = [self._of_layer(routes, block * period + position) for block in range(blocks)]
        there = [layer for layer in layers if layer is not None]  # all of them, or none
        return jnp.stack(there) if there else None


def _in_order(found: list[Any]) -> Any:
    """Stacks the outputs of the positions of a period, [blocks, ...] each, in the layers' order; positions without any are left out."""
    there = [out for out in found if out is not None]
    if len(there) <= 1:
        return there[0] if there else None
    return jax.tree.map(lambda *x: jnp.stack(x, axis=1).reshape(-1, *x[0].shape[1:]), *there)
