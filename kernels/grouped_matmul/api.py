"""Multiplies rows by the weights of their experts: two functions with several backends, without work or memory of E times the rows."""

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.grouped_matmul import expert_mlp as mlp
from jaxrl_llm.kernels.grouped_matmul.definition import DTYPES, Call, Plan, plan_of_sizes, rows_of

# Tried in this order; a backend is the module of that name, with the functions of `reference`, and `gated` where it fuses that.
BACKENDS = ("mosaic_gpu", "tpu", "xla", "reference")


def grouped_matmul(
    x: Float[Array, "R A"], w: Float[Array, "E A B"], sizes: Int[Array, " E"], *, backend: str | None = None
) -> Float[Array, "R B"]:
    """Computes x_r W_e for rows that are sorted by expert: the first sizes[0] rows are expert 0's, and so on.

    Differentiable in x and w. Products are taken in the dtype of `x` and summed in float32; the gradient of `w` is summed in float32
    and returned in the dtype of `w`, exactly 0 for an expert without rows. Rows past the sum of the sizes are not read: their result and
    their gradient are 0.

    Args:
      x: rows, sorted by expert.
      w: one matrix per expert.
      sizes: rows of each expert, none negative; their sum is at most R.
      backend: one of BACKENDS, or None for the first that supports the call.

    Returns:
      [R, B] in the dtype of `x`.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown backend, or a named one that does not support the call.
    """
    _check_products(x, w.shape, sizes)
    call = call_of(x, x.shape[0], *w.shape[::2], gated=False)
    return _multiply(dispatch.choose("grouped_matmul", BACKENDS, call, backend), call, x, w, sizes)


def expert_mlp(
    x: Float[Array, "n D"],
    gate_up: Float[Array, "E D 2 M"],
    down: Float[Array, "E M D"],
    experts: Int[Array, "n k"],
    weights: Float[Array, "n k"],
    *,
    backend: str | None = None,
) -> Float[Array, "n D"]:
    """Computes sum_j w_tj (silu(x_t Wg_c) (x_t Wu_c)) Wd_c with c = experts[t, j], dropless.

    Differentiable in x, gate_up, down and weights. Products are taken in the dtype of `x` and summed in float32, the sum over j is
    float32 and rounded once. Gradients of gate_up and down are summed in float32 and returned in the dtype of the argument, exactly 0
    for an expert without tokens. The gate and up products, 2 M per assignment, are the only residual besides the arguments;
    `expert_gate` is their name for `jax.checkpoint`'s policies.

    Args:
      x: tokens.
      gate_up: gate [:, :, 0] and up [:, :, 1] of each expert.
      down: down projection of each expert.
      experts: the experts of each token; an id outside [0, E) adds nothing and gets no gradient.
      weights: weight of each of those experts, float32.
      backend: one of BACKENDS, or None for the first that supports the call.

    Returns:
      [n, D] in the dtype of `x`.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown backend, or a named one that does not support the call.
    """
    _check_mlp(x, gate_up, down, experts, weights)
    call = call_of(x, experts.size, down.shape[0], down.shape[1], gated=True)
    module = dispatch.choose("grouped_matmul", BACKENDS, call, backend)
    return mlp.compute(module, call, (x, gate_up, down, experts, weights))


def call_of(x: Float[Array, "R A"], rows: int, experts: int, inner: int, *, gated: bool) -> Call:
    """Returns the static description of a call, by which backends accept or refuse it."""
    return Call(
        platform=dispatch.device().platform,
        dtype=x.dtype.name,
        rows=rows,
        experts=experts,
        width=x.shape[1],
        inner=inner,
        gated=gated,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(backend: ModuleType, call: Call, x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    plan = _plan(backend, call, sizes)
    y = backend.product(backend.spread(x, plan, call), w.astype(x.dtype), plan.blocks, call)
    return rows_of(y, plan.slot)


def _keep(backend: ModuleType, call: Call, x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
    return _multiply(backend, call, x, w, sizes), (x, w, sizes)


def _gradient(backend: ModuleType, call: Call, kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = kept
    plan = _plan(backend, call, sizes)
    rows, drows = (backend.spread(part, plan, call) for part in (x, dy))
    dx = backend.product(drows, w.astype(x.dtype), plan.blocks, call, transposed=True)
    dw = backend.weight_gradient(rows, drows, plan.blocks, call, w.dtype)
    return rows_of(dx, plan.slot), dw, None


_multiply.defvjp(_keep, _gradient)


def _plan(backend: ModuleType, call: Call, sizes: jax.Array) -> Plan:
    return plan_of_sizes(sizes, call.rows, backend.block_rows(call))


def _check_products(x: jax.Array, shape: tuple[int, ...], sizes: jax.Array) -> None:
    if x.ndim != 2 or len(shape) != 3 or x.shape[1] != shape[1]:
        raise ValueError(f"x [R, A] and w [E, A, B] must share A (got {x.shape} and {shape})")
    if sizes.shape != shape[:1] or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ValueError(f"sizes must be integers [E] = {shape[:1]} (got {sizes.dtype} {sizes.shape})")
    _check_sizes(x, shape)


def _check_mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array, experts: jax.Array, weights: jax.Array) -> None:
    if down.ndim != 3 or gate_up.shape != (down.shape[0], down.shape[2], 2, down.shape[1]):
        raise ValueError(f"gate_up [E, D, 2, M] and down [E, M, D] do not fit (got {gate_up.shape} and {down.shape})")
    if x.ndim != 2 or x.shape[1] != down.shape[2]:
        raise ValueError(f"x [n, D] and down [E, M, D] must share D (got {x.shape} and {down.shape})")
    if experts.ndim != 2 or len(experts) != len(x) or not jnp.issubdtype(experts.dtype, jnp.integer):
        raise ValueError(f"experts must be integers [{len(x)}, k] (got {experts.dtype} {experts.shape})")
    if weights.shape != experts.shape or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(f"weights must be float {experts.shape}, as experts are (got {weights.dtype} {weights.shape})")
    _check_sizes(x, (*down.shape, experts.shape[1]))


def _check_sizes(x: jax.Array, sizes: tuple[int, ...]) -> None:
    if 0 in x.shape or 0 in sizes:
        raise ValueError(f"every axis must have a length of at least 1 (got x {x.shape} and {sizes})")
    if np.dtype(x.dtype).name not in DTYPES:
        raise ValueError(f"x must be one of {DTYPES} (got {x.dtype}): cast it, or set Policy's compute_dtype")
