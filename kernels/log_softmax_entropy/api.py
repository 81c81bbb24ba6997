"""Computes log-prob and entropy of given logits: one function with several backends.

No part of a run calls it, since token_stats needs no logits, and the embedded sampler needs no entropy. It serves programs that have
logits, and `kernels.bench` measures it.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import dispatch

# Tried in this order; a backend is the module of that name, with `refusal(call)` and `compute(...)`.
BACKENDS = ("triton", "xla", "reference")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class Call:
    """The static description of a call, by which a backend accepts or refuses it.

    Attributes:
      platform: platform on which the call runs, "cpu", "gpu" or "tpu".
      dtype: name of the dtype of the logits.
      tokens: number of rows of the logits.
      vocabulary: number of columns of the logits.
      temperature: divisor of the logits.
    """

    platform: str
    dtype: str
    tokens: int
    vocabulary: int
    temperature: float


def log_softmax_entropy(
    logits: Float[Array, "T V"],
    targets: Int[Array, " T"],
    *,
    temperature: float = 1.0,
    backend: str | None = None,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Returns the log-prob of the targets and the entropy of softmax(logits / temperature), differentiable in the logits by both.

    Args:
      logits: bfloat16, float16 or float32; -inf excludes an entry from the softmax.
      targets: token ids in [0, V); -1 skips the row: exact zeros, zero gradients. Others give a NaN log-prob.
      temperature: divisor of the logits, > 0.
      backend: one of BACKENDS, or None for the first that supports the call.

    Returns:
      (logprob, entropy), float32 [T] each.

    Raises:
      ValueError: shapes, dtypes or values do not fit, or the named backend is unknown or does not support the call.
    """
    if targets.shape != logits.shape[:1]:
        raise ValueError(f"targets must be [T] = {logits.shape[:1]} (got {targets.shape})")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets must be integers (got {targets.dtype})")
    if 0 in logits.shape:
        raise ValueError(f"log_softmax_entropy needs T and V of at least 1 (got logits {logits.shape})")
    if np.dtype(logits.dtype).name not in DTYPES:
        raise ValueError(f"logits must be one of {DTYPES} (got {logits.dtype})")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be positive and finite (got {temperature})")
    call = call_of(logits, temperature)
    module = dispatch.choose("log_softmax_entropy", BACKENDS, call, backend)
    out: tuple[jax.Array, jax.Array] = module.compute(logits, targets, call)
    return out


def call_of(logits: Float[Array, "T V"], temperature: float) -> Call:
    """Returns the static description of a call of log_softmax_entropy, by which backends accept or refuse it."""
    return Call(
        platform=dispatch.device().platform,
        dtype=logits.dtype.name,
        tokens=logits.shape[0],
        vocabulary=logits.shape[1],
        temperature=float(temperature),
    )
