"""AdamW with a schedule, gradient clipping and sharded moments, from optax."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) under a learning-rate schedule.

    Attributes:
      learning_rate: peak learning rate.
      warmup_steps: updates over which the rate rises linearly from 0.
      schedule: "constant", "linear" or "cosine" decay after the warm-up.
      final_fraction: share of the peak that the decay ends at.
      b1: decay of the first moment.
      b2: decay of the second moment.
      epsilon: added to the root of the second moment.
      weight_decay: decoupled weight decay, on matrices alone.
      max_grad_norm: global norm that gradients are clipped to; 0 never clips.
      moments_dtype: dtype of the first moment.
    """

    learning_rate: float = 1e-6
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_fraction: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    moments_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.learning_rate < 0 or self.max_grad_norm < 0 or self.warmup_steps < 0:
            raise ValueError(
                f"Optimizer needs learning_rate, max_grad_norm and warmup_steps >= 0 (got {self.learning_rate}, {self.max_grad_norm}, {self.warmup_steps})"
            )
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ValueError(f"Optimizer.schedule {self.schedule!r} is not one of constant, linear, cosine")

    def rate(self, updates: int) -> optax.Schedule:
        """Learning rate by update, for a run of `updates` updates."""
        decay = max(updates - self.warmup_steps, 1)
        after = {
            "constant": optax.constant_schedule(self.learning_rate),
            "linear": optax.linear_schedule(self.learning_rate, self.learning_rate * self.final_fraction, decay),
            "cosine": optax.cosine_decay_schedule(self.learning_rate, decay, self.final_fraction)
            if self.learning_rate
            else optax.constant_schedule(0.0),
        }[self.schedule]
        # The first update of a warm-up of n takes 1/n of the peak: a rate of 0 would waste it.
        warmup = lambda step: self.learning_rate * (step + 1) / self.warmup_steps  # noqa: E731
        return optax.join_schedules([warmup, after], [self.warmup_steps]) if self.warmup_steps else after

    def transform(self, updates: int) -> optax.GradientTransformation:
        """The optax chain for a run of `updates` updates; clipping is the learner's, which knows the global norm."""
        return optax.adamw(
            self.rate(updates), b1=self.b1, b2=self.b2, eps=self.epsilon, weight_decay=self.weight_decay,
            mu_dtype=jnp.dtype(self.moments_dtype), mask=decays,
        )  # fmt: skip


def decays(params: Any) -> Any:
    """True for the leaves that weight decay acts on: matrices, stacked over layers or not, never norms and biases."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: not any("norm" in str(p) or "bias" in str(p) or "scale" in str(p) for p in path), params
    )


def state_shardings(transform: optax.GradientTransformation, params: Any, replicated: Any) -> Any:
    """Shardings of the optimizer's state: moments lie as their parameters do, everything else is replicated.

    Args:
      params: tree of ShapeDtypeStruct with shardings.
      replicated: sharding of scalars.
    """
    state = jax.eval_shape(transform.init, params)
    return optax.tree_utils.tree_map_params(
        transform, lambda _, p: p.sharding, state, params, transform_non_params=lambda _: replicated
    )
