"""Computes the MLP of experts around a backend's products: plan, gather, products, combination, and its gradient.

    y_t = sum_j w_tj h_tj Wd_c,   h_tj = silu(x_t Wg_c) (x_t Wu_c),   c = c_tj

The gradient of w_tj is <dh_tj, h_tj> with dh_tj = dy_t Wd_c^T, so that no expert's output is kept. Both sums over j are gathers in
float32, so that every result has the same bits each time.
"""

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl_llm.kernels.grouped_matmul.definition import (
    Blocks,
    Call,
    Plan,
    activation,
    activation_gradient,
    float32_or_wider,
    plan_of_experts,
    rows_of,
)

Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def compute(backend: ModuleType, call: Call, inputs: Inputs) -> jax.Array:
    """Returns y [n, D] of x [n, D], gate_up [E, D, 2, M], down [E, M, D], experts [n, k] and weights [n, k]."""
    return _forward(backend, call, inputs, keep=False)[0]


def _forward(backend: ModuleType, call: Call, inputs: Inputs, *, keep: bool) -> tuple[jax.Array, jax.Array | None]:
    x, gate_up, down, experts, weights = inputs
    plan = _plan(backend, call, experts)
    rows = backend.spread(x, plan, call)
    hidden, gate = _gated(backend, rows, _both(gate_up, x.dtype), plan.blocks, call, keep=keep)
    out = backend.product(hidden, down.astype(x.dtype), plan.blocks, call)
    return _combine(out, plan, weights, experts.shape, x.dtype), gate


def _keep(backend: ModuleType, call: Call, inputs: Inputs) -> tuple[jax.Array, Any]:
    out, gate = _forward(backend, call, inputs, keep=True)
    return out, (inputs, checkpoint_name(gate, "expert_gate"))


def _gradient(backend: ModuleType, call: Call, kept: Any, dy: jax.Array) -> tuple[Any]:
    (x, gate_up, down, experts, weights), gate = kept
    plan = _plan(backend, call, experts)
    rows, drows = backend.spread(x, plan, call), backend.spread(dy.astype(x.dtype), plan, call)
    weight = rows_of(weights.reshape(-1), plan.row)
    dh = backend.product(drows, down.astype(x.dtype), plan.blocks, call, transposed=True)
    hidden, dgate, dweights = activation_gradient(gate, dh, weight)
    ddown = backend.weight_gradient(hidden, drows, plan.blocks, call, down.dtype)
    both = _both(gate_up, x.dtype)
    dx = _combine(backend.product(dgate, both, plan.blocks, call, transposed=True), plan, None, experts.shape, x.dtype)
    dgate_up = backend.weight_gradient(rows, dgate, plan.blocks, call, gate_up.dtype).reshape(gate_up.shape)
    dweights = rows_of(dweights, plan.slot).reshape(experts.shape).astype(weights.dtype)
    return ((dx, dgate_up, ddown, None, dweights),)


compute.defvjp(_keep, _gradient)


def _plan(backend: ModuleType, call: Call, experts: jax.Array) -> Plan:
    return plan_of_experts(experts.reshape(-1), call.experts, backend.block_rows(call))


def _gated(
    backend: ModuleType, rows: jax.Array, gate_up: jax.Array, blocks: Blocks, call: Call, *, keep: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Returns silu(g) u [P, M], and where `keep` g and u side by side; by the backend's `gated` where it has one."""
    if hasattr(backend, "gated"):
        hidden, gate = backend.gated(rows, gate_up, blocks, call, keep=keep)
        return hidden, gate
    both = backend.product(rows, gate_up, blocks, call)
    return activation(both), both if keep else None


def _both(gate_up: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Reshapes [E, D, 2, M] to [E, D, 2 M] in the dtype of the products."""
    return gate_up.astype(dtype).reshape(*gate_up.shape[:2], -1)


def _combine(
    y: jax.Array, plan: Plan, weights: jax.Array | None, shape: tuple[int, ...], dtype: jnp.dtype
) -> jax.Array:
    """Returns sum_j w_tj y_tj [n, D] (w 1 where None), summed in float32 and rounded once."""
    wide = float32_or_wider(dtype)
    chosen = rows_of(y, plan.slot).reshape(*shape, -1).astype(wide)
    if weights is not None:
        chosen = chosen * weights.astype(wide)[..., None]
    return chosen.sum(axis=1).astype(dtype)
