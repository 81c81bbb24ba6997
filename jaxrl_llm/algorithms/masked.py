"""Masked statistics and loss aggregations; losses take the mask that they are given and derive none of their own.

Values outside the mask never matter, not even NaN: they are replaced before any arithmetic, so gradients stay finite
too. Sums are accumulated in float32, or in float64 where the values are.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "constant"]


def masked_sum(x: Float[Array, "..."], mask: Bool[Array, "..."], axis: int | None = None) -> Float[Array, "..."]:
    """Returns the sum over the mask."""
    return jnp.sum(jnp.where(mask, x, 0.0), axis=axis, dtype=jnp.promote_types(x.dtype, jnp.float32))


def masked_mean(x: Float[Array, "..."], mask: Bool[Array, "..."], axis: int | None = None) -> Float[Array, "..."]:
    """Returns the mean over the mask; 0 where the mask is empty."""
    total = masked_sum(x, mask, axis)
    return total / jnp.maximum(jnp.sum(mask, axis=axis, dtype=total.dtype), 1.0)


def masked_var(x: Float[Array, "..."], mask: Bool[Array, "..."], ddof: int = 0) -> Float[Array, ""]:
    """Returns the variance over the mask with `ddof` degrees of freedom taken off; 0 where too few entries are left."""
    mean = masked_mean(x, mask)
    count = jnp.sum(mask, dtype=mean.dtype)
    squares = masked_sum(jnp.square(jnp.where(mask, x, mean) - mean), mask)
    return jnp.where(count > ddof, squares / jnp.maximum(count - ddof, 1.0), 0.0)


def whiten(x: Float[Array, "..."], mask: Bool[Array, "..."], epsilon: float = 1e-8) -> Float[Array, "..."]:
    """Scales `x` to zero mean and unit variance (n - 1) over the mask; 0 outside it, and everywhere with fewer than two entries."""
    scale = jnp.where(jnp.sum(mask) > 1, 1.0 / jnp.sqrt(masked_var(x, mask, ddof=1) + epsilon), 0.0)
    return jnp.where(mask, (jnp.where(mask, x, 0.0) - masked_mean(x, mask)) * scale, 0.0)


def sequence_sum(
    x: Float[Array, "B T"], sequence: Int[Array, "B T"], mask: Bool[Array, "B T"], sequences: int
) -> Float[Array, " S"]:
    """Sums a packed array over each sequence's mask; `sequence` numbers the sequences of the micro-batch from 0."""
    index = jnp.where(mask, sequence, sequences)
    zeros = jnp.zeros(sequences + 1, jnp.promote_types(x.dtype, jnp.float32))
    return zeros.at[index].add(jnp.where(mask, x, 0.0))[:-1]


def sequence_mean(
    x: Float[Array, "B T"], sequence: Int[Array, "B T"], mask: Bool[Array, "B T"], sequences: int
) -> Float[Array, " S"]:
    """Averages a packed array over each sequence's mask; 0 for a sequence without tokens."""
    tokens = sequence_sum(jnp.ones_like(x), sequence, mask, sequences)
    return sequence_sum(x, sequence, mask, sequences) / jnp.maximum(tokens, 1.0)


def spread(x: Float[Array, " S"], sequence: Int[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Copies each sequence's value to every token of its mask; other tokens get 0."""
    return jnp.where(mask, x[jnp.where(mask, sequence, 0)], 0.0)


def aggregate(
    x: Float[Array, "B T"], mask: Bool[Array, "B T"], sequence: Int[Array, "B T"], sequences: int, how: Aggregation
) -> tuple[Float[Array, ""], str]:
    """Returns the sum of a per-token loss and the name of the global count that divides it.

    token-mean: all tokens weigh the same; token-sum: no division; seq-mean-token-sum and seq-mean-token-mean: all
    sequences weigh the same; constant: the sum over sequences and tokens divided by sequences x a constant length
    (Dr. GRPO). The learner divides by the count, which is global over the minibatch.
    """
    if how == "seq-mean-token-mean":
        return jnp.sum(sequence_mean(x, sequence, mask, sequences)), "sequences"
    denominator = {
        "token-mean": "tokens",
        "token-sum": "one",
        "seq-mean-token-sum": "sequences",
        "constant": "constant",
    }
    if how not in denominator:
        raise ValueError(f"aggregation {how!r} is not one of {[*denominator, 'seq-mean-token-mean']}")
    return masked_sum(x, mask), denominator[how]
