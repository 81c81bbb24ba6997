"""Group statistics, returns and advantage estimates on the unpacked global view; pure functions, one estimate each.

Groups are ragged: statistics are segment sums over `group`, and only sequences with `counted` enter them. Statistics
are taken of rewards less the group's smallest, which makes those of equal rewards exact: such a group's advantages
are 0.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Singleton = Literal["zero", "raw"]


class Group(NamedTuple):
    """Statistics of its group at each sequence.

    Attributes:
      size: float32 [S] counted members.
      centered: float32 [S] the value less the group's mean; 0 where not counted.
      std: float32 [S] standard deviation with n - 1; 1 where fewer than two members count.
      mean: float32 [S].
    """

    size: Array
    centered: Array
    std: Array
    mean: Array


def group_sum(
    x: Float[Array, " S"], group: Int[Array, " S"], counted: Bool[Array, " S"], groups: int
) -> Float[Array, " S"]:
    """The sum over the counted members of its group, at each sequence."""
    return jax.ops.segment_sum(jnp.where(counted, x, 0.0), group, groups)[group]


def group_statistics(x: Float[Array, " S"], group: Int[Array, " S"], counted: Bool[Array, " S"], groups: int) -> Group:
    """Count, mean and standard deviation of the counted members of each group."""
    low = jax.ops.segment_min(jnp.where(counted, x, jnp.inf), group, groups)[group]
    shifted = jnp.where(counted, x - low, 0.0)
    count = group_sum(jnp.ones_like(x), group, counted, groups)
    mean = group_sum(shifted, group, counted, groups) / jnp.maximum(count, 1.0)
    centered = jnp.where(counted, shifted - mean, 0.0)
    variance = group_sum(jnp.square(centered), group, counted, groups) / jnp.maximum(count - 1.0, 1.0)
    std = jnp.where(count > 1, jnp.sqrt(variance), 1.0)
    return Group(count, centered, std, jnp.where(count > 0, mean + low, 0.0))


def settle_singletons(
    advantage: Float[Array, " S"], reward: Float[Array, " S"], count: Float[Array, " S"], singleton: Singleton
) -> Float[Array, " S"]:
    """A group of one compares with nobody: its advantage is 0 ("zero") or its reward ("raw")."""
    return jnp.where(count > 1, advantage, reward if singleton == "raw" else 0.0)


def group_relative(
    reward: Float[Array, " S"], stats: Group, *, std: bool, singleton: Singleton, epsilon: float = 1e-6
) -> Float[Array, " S"]:
    """GRPO: (r - mean) / (std + epsilon) within the group; without the division, Dr. GRPO."""
    scaled = stats.centered / (stats.std + epsilon) if std else stats.centered
    return settle_singletons(scaled, reward, stats.size, singleton)


def to_tokens(advantage: Float[Array, " S"], mask: Bool[Array, "S T"]) -> Float[Array, "S T"]:
    """The advantage of its sequence at every token of the mask, 0 elsewhere."""
    return jnp.where(mask, advantage[:, None], 0.0)


def on_last_token(reward: Float[Array, " S"], mask: Bool[Array, "S T"]) -> Float[Array, "S T"]:
    """The reward of a sequence at the last token of its mask, 0 elsewhere."""
    after = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1]
    return jnp.where(mask & (after == 1), reward[:, None], 0.0)
