"""Gated MLPs with explicit gradients, down(silu(gate(x)) * up(x)).

The gradient of a gated product recomputes silu(gate) * up in the same pass as the gradients of gate and up. On TPUs these values, and
the MLP's input, are written once: their compiler would compute them again inside each product that reads them. Where the kernel
`gated_mlp` takes the call it makes gate and up again with them, so that neither is kept for the backward pass, whatever the remat policy.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxrl_llm.distributed.mesh import STORED as GATHERED
from jaxrl_llm.distributed.mesh import names
from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.gated_mlp import api, xla
from jaxrl_llm.kernels.ordered import arithmetic
from jaxrl_llm.models.linear import (
    Adapted,
    Quantized,
    Spread,
    Stored,
    applied,
    contracted,
    linear,
    linears,
    on_tpu,
    rows_product,
    summed,
    unwrapped,
    written,
)

GATE = "gate"  # what rematerialisation policies know the gate's product by


def gated_mlp(x: Float[Array, "B T D"], gate: Any, up: Any, down: Any) -> Float[Array, "B T D"]:
    """down(silu(gate(x)) * up(x)); the weights are [D, M], [D, M] and [M, D], in any form that `linear` takes."""
    x = written(x)
    if run := _kernel(x, (gate, up, down)):
        return run(x, *(unwrapped(w)[0] for w in (gate, up, down)))
    gate, up = linears(x, [gate, up])
    return gated_linear(checkpoint_name(gate, GATE), up, down)


def gated_linear(
    gate: Float[Array, "B T M"], up: Float[Array, "B T M"], weights: Float[Array, "M D"] | Adapted | Quantized | Spread
) -> Float[Array, "B T D"]:
    """Multiplies silu(gate) * up, rounded to the dtype of `gate`, by the weights; the result has that dtype too."""
    if isinstance(weights, Adapted | Quantized):
        return linear(_gated(gate, up), weights)
    weights, stored = unwrapped(weights)
    return _gated_product(gate, up, weights, stored)


def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    if dispatch.ordered():
        wide = gate.astype(jnp.float32)
        return arithmetic.rounded(wide * arithmetic.sigmoid(wide) * up.astype(jnp.float32), gate.dtype)
    return (jax.nn.silu(gate.astype(jnp.float32)) * up).astype(gate.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _gated_product(gate: jax.Array, up: jax.Array, weights: jax.Array, stored: Stored | None) -> jax.Array:
    return _gated_forward(gate, up, weights, stored)[0]


def _gated_forward(
    gate: jax.Array, up: jax.Array, weights: jax.Array, stored: Stored | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return applied(written(_gated(gate, up)), weights, 1, stored), (gate, up, weights)


def _gated_backward(
    stored: Stored | None, saved: tuple[jax.Array, jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    gate, up, weights = saved
    dtype, dh = gate.dtype, contracted(g, weights, ((2,), (1,)), stored, (1,))
    # XLA computes results of the same inputs in one pass, but not where those inputs come straight from products; on TPUs it does, in
    # the pass of a product that comes before, where the results are written.
    if not on_tpu():
        gate, up, dh = jax.lax.optimization_barrier((gate, up, dh))
    gate, up, dh = (x.astype(jnp.float32) for x in (gate, up, dh))
    h, dgate, dup = (x.astype(dtype) for x in xla.between(gate, up, dh))
    if on_tpu():
        h, dgate, dup = jax.lax.optimization_barrier((h, dgate, dup))
    dw = summed(partial(rows_product, count=2), stored, h, g)
    return dgate, dup, dw.astype(weights.dtype)


_gated_product.defvjp(_gated_forward, _gated_backward)


# -- on TPUs -----------------------------------------------------------------------------------------------------------

Weights = tuple[jax.Array, jax.Array, jax.Array]
Places = tuple[Stored | None, ...]


def _kernel(x: jax.Array, weights: Sequence[Any]) -> Any:
    """The MLP whose gradient a kernel makes, as a function of x and the three weights; None where XLA makes it."""
    if not on_tpu() or dispatch.ordered() or x.shape[1] == 1:
        return None
    if any(isinstance(w, Adapted | Quantized) for w in weights):
        return None
    (gate, *_), places = zip(*map(unwrapped, weights))
    stored = places[0]
    if stored is None or stored.rows is None:
        return None  # on one device, or where XLA alone knows which rows a device has
    ways = lambda axes: math.prod(stored.mesh.shape[axis] for axis in axes)  # noqa: E731
    tokens = math.prod(x.shape[:2]) // ways(axis for part in stored.rows for axis in names(part))
    inner = gate.shape[1] // ways(_apart(stored, 1))
    if api.chosen(tokens, x.shape[2], inner, x.dtype) is xla:
        return None
    return partial(_mlp, places)


def _apart(stored: Stored, dimension: int) -> tuple[Any, ...]:
    """The mesh axes that split a dimension of a weight also where it is used."""
    return tuple(axis for part in stored.spec[dimension : dimension + 1] for axis in names(part) if axis != GATHERED)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(places: Places, x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return _mlp_forward(places, x, gate, up, down)[0]


def _mlp_forward(
    places: Places, x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, Weights]]:
    gated = _gated(applied(x, gate, 1, places[0]), applied(x, up, 1, places[1]))
    return applied(written(gated), down, 1, places[2]), (x, (gate, up, down))


def _mlp_backward(places: Places, saved: tuple[jax.Array, Weights], g: jax.Array) -> tuple[jax.Array, ...]:
    x, weights = saved
    gate, up, down = (_gathered(w.astype(x.dtype), stored) for w, stored in zip(weights, places))
    h, dgate, dup = _between(places[0], x, g, (gate, up, down))
    dx = [contracted(d, w, ((2,), (1,)), stored, (1,)) for d, w, stored in zip((dgate, dup), (gate, up), places)]
    product = partial(rows_product, count=2)
    pairs = zip(weights, places, ((x, dgate), (x, dup), (h, g)))
    return dx[0] + dx[1], *(summed(product, stored, *pair).astype(w.dtype) for w, stored, pair in pairs)


def _gathered(weights: jax.Array, stored: Any) -> jax.Array:
    """The weights as each device uses them, for the kernel and for the products after it."""
    axes = (_apart(stored, dimension) or None for dimension in range(2))
    return jax.lax.with_sharding_constraint(weights, NamedSharding(stored.mesh, PartitionSpec(*axes)))


def _between(stored: Any, x: jax.Array, g: jax.Array, weights: Weights) -> tuple[jax.Array, ...]:
    """`api.gradients` of the rows of each device, by weights that are gathered."""

    def local(x: jax.Array, g: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        flat = api.gradients(*(part.reshape(-1, part.shape[-1]) for part in (x, g)), *weights)
        return tuple(part.reshape(*x.shape[:2], -1) for part in flat)

    inner, rows = _apart(stored, 1) or None, PartitionSpec(*stored.rows)
    inputs = PartitionSpec(None, inner)
    run = jax.shard_map(
        local,
        mesh=stored.mesh,
        in_specs=(rows, rows, inputs, inputs, PartitionSpec(inner)),
        out_specs=(PartitionSpec(*stored.rows, inner),) * 3,
        check_vma=False,
    )
    found: tuple[jax.Array, ...] = run(x, g, *weights)
    return found


_mlp.defvjp(_mlp_forward, _mlp_backward)
