"""An MLP of experts: a router sends each token to k of E gated MLPs, and their outputs are added by its weights.

    p = softmax(x W_r)     c = the k largest of p     w = p[c], divided by their sum where the architecture says so
    y = sum_j w_j  down_c( silu(gate_c(x)) * up_c(x) )

Where the architecture has a shared expert, every token goes to it too: y + sigmoid(x w_s) shared(x).

Router, weights and the sum over j are float32 whatever the compute dtype is; the gradient reaches the router through w alone.
A bias of each expert may be added to p where c is chosen, and nowhere else (https://arxiv.org/abs/2408.15664).
Experts that were recorded for a token take the place of c, and w is computed from the live p at them (replay of routes,
https://arxiv.org/abs/2510.11370). Tokens of no segment go to no expert.

On a mesh the weights are gathered over `fsdp` where they are used, and split over `tensor` by their width. Over `expert` each device keeps
its own experts. It routes its own tokens, receives those of the axis's other devices with their choices, and computes the outputs of its
experts, which are summed on the tokens' own devices. Where the axis has at most k devices all tokens are gathered: (ways - 1)
n D numbers each way for the n tokens of a device. Where it has more, a token goes only to the devices that hold its experts (`exchange`): at
most k n D numbers each way. Every token reaches every expert that it goes to; none has a capacity.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxrl_llm.distributed.mesh import Partitioner, names
from jaxrl_llm.kernels.grouped_matmul.api import expert_mlp
from jaxrl_llm.models import exchange
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.layers import MLP, ROUTER, named, parameter
from jaxrl_llm.models.linear import linear


@partial(jax.tree_util.register_dataclass, data_fields=["valid", "routes"], meta_fields=["replay"])
@dataclass(frozen=True)
class Routed:
    """The tokens that a layer of experts routes, and their recorded experts.

    Attributes:
      valid: bool [B, T] tokens that are routed; the others get 0.
      routes: [B, T, k] recorded experts of each token; ids at or beyond the number of experts stand for none, and the token's live choice is
        taken. None records nothing.
      replay: whether recorded experts take the place of the live choice; False only compares them with it.
    """

    valid: Any
    routes: Any
    replay: bool = True


class Report(NamedTuple):
    """A report on the valid tokens of a layer of experts; stacked over layers where several report.

    Attributes:
      counts: int32 [E] tokens that each expert took.
      mass: float32 [E] sum of the probabilities p.
      tokens: int32 [] valid tokens.
      entropy: float32 [] sum of the entropies of p, nats.
      top: float32 [] sum of the largest weight of each token.
      recorded: int32 [] tokens with recorded experts.
      differs: int32 [] of these, those whose live choice is another set.
      overlap: float32 [] sum over them of the share of the recorded experts that are in the live choice.
      chosen: uint8 or uint16 [B, T, k] the experts that were taken, the likeliest first where they were chosen live.
    """

    counts: Int[Array, " E"]
    mass: Float[Array, " E"]
    tokens: Int[Array, ""]
    entropy: Float[Array, ""]
    top: Float[Array, ""]
    recorded: Int[Array, ""]
    differs: Int[Array, ""]
    overlap: Float[Array, ""]
    chosen: Integer[Array, "B T k"]


class Over(NamedTuple):
    """The mesh axes that divide a layer of experts; on one device none do.

    Attributes:
      tokens: axes that divide the tokens.
      experts: axes that divide the experts.
      width: axes that divide each expert's width.
    """

    tokens: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    width: tuple[str, ...] = ()


def check_division(architecture: Architecture, partitioner: Partitioner) -> None:
    """Raises ValueError where the mesh axis `expert` does not divide the experts of a layer."""
    ways = partitioner.axis_sizes["expert"]
    if architecture.experts is not None and architecture.experts.count % ways:
        count = architecture.experts.count
        fitting = [n for n in range(2, count + 1) if count % n == 0]
        raise ValueError(
            f"train.MeshConfig.expert = {ways} does not divide the {count} experts of a layer: set it to 1 or one of {fitting}"
        )


class ExpertMLP(nnx.Module):
    """The router and the experts of one layer."""

    def __init__(self, architecture: Architecture, partitioner: Partitioner, *, rngs: nnx.Rngs):
        assert architecture.experts is not None
        self.sizes, self.partitioner = architecture.experts, partitioner
        width, sizes, std = architecture.width, self.sizes, architecture.init_std
        self.router = parameter(rngs, (width, sizes.count), ("embed", "experts"), std)
        gate_up, down = (sizes.count, width, 2, sizes.width), (sizes.count, sizes.width, width)
        self.gate_up = parameter(rngs, gate_up, ("experts", "embed", None, "mlp"), std)
        self.down = parameter(rngs, down, ("experts", "mlp", "embed"), std)
        bias = nnx.Param(jnp.zeros(sizes.count, jnp.float32), axes=("experts",))
        self.choice_bias = bias if sizes.choice_bias else None
        if sizes.shared is not None:
            self.shared = MLP(architecture, sizes.shared, rngs=rngs)
            self.share = parameter(rngs, (width, 1), ("embed", None), std)

    def __call__(self, x: Float[Array, "B T D"], routed: Routed) -> tuple[Float[Array, "B T D"], Report]:
        """Returns the experts' weighted outputs, 0 for tokens that are not valid, with that of the shared expert, and the report."""
        y, report = self._chosen(x, routed)
        if self.sizes.shared is None:
            return y, report
        share = jax.nn.sigmoid(linear(x, self.share[...]).astype(jnp.float32)).astype(x.dtype)
        return y + share * self.shared(x), report

    def _chosen(self, x: Float[Array, "B T D"], routed: Routed) -> tuple[Float[Array, "B T D"], Report]:
        """Returns the weighted outputs of the chosen experts, and the report."""
        bias = None if self.choice_bias is None else self.choice_bias[...]
        weights = ((self.router[...], bias), self.gate_up[...], self.down[...])
        if self.partitioner.mesh.size == 1:
            return self._local(Over(), x, *weights, routed)
        rows = self.partitioner.spec(("batch", "length"), x.shape[:2])
        held, split = self.partitioner.spec(("experts", "mlp"), (self.sizes.count, self.sizes.width))
        tokens, whole = PartitionSpec(*rows, None), PartitionSpec()
        over = Over(tokens=names(rows[0]) + names(rows[1]), experts=names(held), width=names(split))
        given = replace(routed, valid=rows, routes=None if routed.routes is None else tokens)
        of_weights = (whole, PartitionSpec(held, None, None, split), PartitionSpec(held, split, None))
        of_report: dict[str, Any] = dict.fromkeys(Report._fields, whole) | {"chosen": tokens}

        def local(x: jax.Array, router: Any, gate_up: jax.Array, down: jax.Array, routed: Routed) -> tuple:
            return self._local(over, x, router, gate_up, down, routed)

        return jax.shard_map(
            local,
            mesh=self.partitioner.mesh,
            in_specs=(tokens, *of_weights, given),
            out_specs=(tokens, Report(**of_report)),
            check_vma=False,  # kernels' outputs carry no varying-axes types
        )(x, *weights, routed)

    def _local(
        self,
        over: Over,
        x: Float[Array, "B T D"],
        router: tuple[Float[Array, "D E"], Float[Array, " E"] | None],
        gate_up: Float[Array, "own D 2 M"],
        down: Float[Array, "own M D"],
        routed: Routed,
    ) -> tuple[Float[Array, "B T D"], Report]:
        """Computes the layer for a device's own tokens, by its own experts and those of the devices that share them; the report is of all tokens."""
        logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), router[0].astype(jnp.float32), precision="highest")
        p = jax.nn.softmax(logits, axis=-1)
        scores = p if router[1] is None else p + router[1]
        live = jax.lax.top_k(jax.lax.stop_gradient(scores), self.sizes.chosen)[1]
        chosen, record, recorded = live, live, jnp.zeros(live.shape[:2], bool)
        if routed.routes is not None:
            recorded = jnp.all(routed.routes < self.sizes.count, axis=-1) & routed.valid
            record = jnp.where(recorded[..., None], routed.routes.astype(live.dtype), live)
            chosen = record if routed.replay else live
        chosen = named(chosen, ROUTER)
        weights = jnp.take_along_axis(p, chosen, axis=-1)
        if self.sizes.normalised:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        ids = jnp.where(routed.valid[..., None], chosen, self.sizes.count)
        flat = (math.prod(x.shape[:2]), -1)
        y = _computed(over, x.reshape(flat), gate_up, down, ids.reshape(flat), weights.reshape(flat)).reshape(x.shape)
        fields = self._counted(p, weights, ids, routed.valid)
        shared = jnp.sum(jnp.any(live[..., None] == record[..., None, :], axis=-1), axis=-1)
        fields |= {
            "recorded": jnp.sum(recorded.astype(jnp.int32)),
            "differs": jnp.sum((recorded & (shared < self.sizes.chosen)).astype(jnp.int32)),
            "overlap": jnp.sum(jnp.where(recorded, shared / self.sizes.chosen, 0.0)),
        }
        if over.tokens:
            fields = {name: jax.lax.psum(total, over.tokens) for name, total in fields.items()}
        return y, Report(**fields, chosen=chosen.astype(self.sizes.record_dtype))

    def _counted(
        self,
        p: Float[Array, "B T E"],
        weights: Float[Array, "B T k"],
        ids: Int[Array, "B T k"],
        valid: Bool[Array, "B T"],
    ) -> dict[str, jax.Array]:
        """Returns a report's sums over the valid tokens; only the sum of p has a gradient."""
        total = lambda x, where: jnp.sum(jnp.where(where, x, 0))  # noqa: E731
        constant, w = jax.lax.stop_gradient(p), jax.lax.stop_gradient(weights)
        logs = jnp.where(constant > 0, jnp.log(jnp.where(constant > 0, constant, 1.0)), 0.0)
        return {
            "counts": jnp.zeros(self.sizes.count, jnp.int32).at[ids].add(1, mode="drop"),
            "mass": jnp.sum(jnp.where(valid[..., None], p, 0.0), axis=(0, 1)),
            "tokens": jnp.sum(valid.astype(jnp.int32)),
            "entropy": total(-jnp.sum(constant * logs, axis=-1), valid),
            "top": total(jnp.max(w, axis=-1), valid),
        }


def _computed(
    over: Over,
    x: Float[Array, "n D"],
    gate_up: Float[Array, "E D 2 M"],
    down: Float[Array, "E M D"],
    ids: Int[Array, "n k"],
    weights: Float[Array, "n k"],
) -> Float[Array, "n D"]:
    """Returns the weighted outputs of all experts for a device's own tokens; the device computes its own E experts; under shard_map.

    Where the axis that divides the experts divides the tokens too, tokens are gathered over it and their sums are scattered back, or tokens
    are exchanged where the axis has more devices than a token has experts. Where the devices of the axis have the same tokens, as of a batch
    that it does not divide, only the outputs are summed.
    """
    gathered = tuple(axis for axis in over.experts if axis in over.tokens)
    if gathered and jax.lax.axis_size(gathered) > ids.shape[1]:
        return _exchanged(over, gathered[0], x, gate_up, down, ids, weights)
    if gathered:
        x, ids, weights = (jax.lax.all_gather(part, gathered, tiled=True) for part in (x, ids, weights))
    if over.experts:
        ids = ids - jax.lax.axis_index(over.experts) * len(down)  # ids of other devices' experts are outside of [0, E)
    y = expert_mlp(x, gate_up, down, ids, weights)
    if not over.experts and not over.width:
        return y
    total = y.astype(jnp.float32)
    if gathered:
        total = jax.lax.psum_scatter(total, gathered, tiled=True)
    if others := tuple(axis for axis in (*over.experts, *over.width) if axis not in gathered):
        total = jax.lax.psum(total, others)
    return total.astype(x.dtype)


def _exchanged(
    over: Over, axis: str, x: jax.Array, gate_up: jax.Array, down: jax.Array, ids: jax.Array, weights: jax.Array
) -> Float[Array, "n D"]:
    """Returns the result of `_computed`, by sending each token to the devices of `axis` that hold its experts."""
    own, ways = len(down), jax.lax.axis_size(axis)
    route = exchange.route_of(ids // own, ways, axis)
    rows, shares = exchange.sent(x, route, axis), exchange.sent(weights, route, axis)
    # Rows that no device fills have zeros, which stand for no expert.
    there = exchange.sent((ids + 1).astype(jnp.float32), route, axis).astype(jnp.int32) - 1
    there = jnp.where(there < 0, own, there - jax.lax.axis_index(axis) * own)
    total = expert_mlp(rows, gate_up, down, there, shares).astype(jnp.float32)
    if over.width:
        total = jax.lax.psum(total, over.width)
    return exchange.returned(total, route, axis).astype(x.dtype)
