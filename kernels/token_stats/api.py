"""Computes per-token statistics of the next-token distribution from hidden states and head: one function with several backends."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jaxtyping import Array, Float, Int, Key, UInt32

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.token_stats.definition import DTYPES, OUTPUTS, Call

# Tried in this order; a backend is the module of that name, with `refusal(call)` and `compute(...)`.
BACKENDS = ("mosaic_gpu", "mosaic_tpu", "xla", "reference", "ordered")


def token_stats(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " T"],
    *,
    temperature: float = 1.0,
    outputs: Sequence[str] = ("logprob", "entropy"),
    bias: Float[Array, " V"] | None = None,
    soft_cap: float | None = None,
    noise_key: Key[Array, ""] | UInt32[Array, "..."] | None = None,
    chunk: int | None = None,
    backend: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    checked: bool = False,
) -> dict[str, Float[Array, " T"]]:
    """Computes statistics of softmax((cap(hidden @ head.T) + bias) / temperature); each as defined in `reference`.

    Differentiable in hidden, head and bias by every output. Sums are float32; products are computed in the dtype of `hidden`. The
    log-prob of a target outside V is NaN.

    Args:
      hidden: final hidden states, bfloat16 or float32.
      head: output embedding, bfloat16 or float32.
      targets: token ids in [0, V); -1 skips the row: exact zeros, zero gradients.
      temperature: divisor of the logits, > 0.
      outputs: the members of OUTPUTS to return.
      bias: added to the (capped) logits; -inf excludes an entry from the softmax.
      soft_cap: bound of the logits, by soft_cap * tanh(z / soft_cap).
      noise_key: key of the noise; only "noise_logprob" needs it.
      chunk: vocabulary entries of a tile, where the backend has tiles; None chooses automatically.
      backend: one of BACKENDS, or None for the first that supports the call.
      mesh: splits tokens over the axes data, fsdp and context and the head over tensor; None, or a mesh of one
        device, runs on one device.
      checked: whether a target outside V is an error under `checkify` (user checks). JAX numbers such checks in the order in which a
        process traces them, so a process that traces others before it does not find a cached program with one again.

    Returns:
      {name: float32 [T]} in the order of `outputs`.

    Raises:
      ValueError: shapes, dtypes or values do not fit, an output or the backend is unknown, the key is missing, or the named backend
        does not support the call.
    """
    _check(hidden, head, targets, bias)
    _check_options(tuple(outputs), temperature, soft_cap, chunk, noise_key)
    mesh = None if mesh is not None and mesh.size == 1 else mesh
    call = call_of(
        hidden,
        head,
        outputs=tuple(outputs),
        temperature=float(temperature),
        bias=bias,
        soft_cap=soft_cap,
        chunk=chunk,
        mesh=mesh,
    )
    module = dispatch.choose("token_stats", BACKENDS, call, backend)
    if checked:
        checkify.debug_check(
            jnp.all((targets >= -1) & (targets < head.shape[0])),
            f"a target lies outside [0, {head.shape[0]}) and is not -1 (a skipped row)",
        )
    words = jnp.zeros(2, jnp.uint32) if noise_key is None else jax.random.bits(noise_key, (2,), jnp.uint32)
    return module.compute(hidden, head, targets, bias, words, call, mesh)


def call_of(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    *,
    outputs: tuple[str, ...] = ("logprob", "entropy"),
    temperature: float = 1.0,
    bias: Float[Array, " V"] | None = None,
    soft_cap: float | None = None,
    chunk: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Call:
    """Returns the static description of a call of token_stats, by which backends accept or refuse it."""
    return Call(
        platform=dispatch.device().platform if mesh is None else mesh.devices.flat[0].platform,
        dtype=hidden.dtype.name,
        tokens=hidden.shape[0],
        width=hidden.shape[1],
        vocabulary=head.shape[0],
        outputs=outputs,
        temperature=temperature,
        soft_cap=soft_cap,
        biased=bias is not None,
        chunk=chunk,
        shards=1 if mesh is None else mesh.size,
    )


def _check(hidden: jax.Array, head: jax.Array, targets: jax.Array, bias: jax.Array | None) -> None:
    if hidden.shape[1] != head.shape[1]:
        raise ValueError(f"hidden [T, D] and head [V, D] must share D (got {hidden.shape} and {head.shape})")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets must be [T] = {hidden.shape[:1]} (got {targets.shape})")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets must be integers (got {targets.dtype})")
    if bias is not None and bias.shape != head.shape[:1]:
        raise ValueError(f"bias must be [V] = {head.shape[:1]} (got {bias.shape})")
    if 0 in hidden.shape or 0 in head.shape:
        raise ValueError(f"token_stats needs T, D and V of at least 1 (got hidden {hidden.shape}, head {head.shape})")
    for name, x in {"hidden": hidden, "head": head}.items():
        if np.dtype(x.dtype).name not in DTYPES:
            raise ValueError(f"{name} must be one of {DTYPES} (got {x.dtype}): cast it, or set Policy's compute_dtype")


def _check_options(
    outputs: tuple[str, ...], temperature: float, soft_cap: float | None, chunk: int | None, noise_key: Any
) -> None:
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown or not outputs or len(set(outputs)) < len(outputs):
        raise ValueError(f"outputs must be distinct members of {OUTPUTS}, at least one (got {outputs})")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be positive and finite (got {temperature})")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive, or None for no cap (got {soft_cap})")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 vocabulary entry, or None to choose (got {chunk})")
    if "noise_logprob" in outputs and noise_key is None:
        raise ValueError("output 'noise_logprob' draws random numbers: give noise_key=jax.random.key(...)")
