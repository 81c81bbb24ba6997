"""Group statistics, returns and advantage estimates on the sequences of a whole batch; pure functions, one estimate each.

Groups are ragged: statistics are segment sums over `group`, and only sequences with `counted` enter them. Each
group's smallest reward is subtracted before its statistics are computed, so that the advantages of a group of equal
rewards are exactly 0.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Singleton = Literal["zero", "raw"]


class GroupStatistics(NamedTuple):
    """Statistics of each sequence's group, [S] each.

    Attributes:
      size: float32 [S] number of counted members.
      centered: float32 [S] the value less the group's mean; 0 where not counted.
      std: float32 [S] standard deviation with n - 1; 1 where fewer than two members count.
      mean: float32 [S] mean of the counted members; 0 where there are none.
    """

    size: Array
    centered: Array
    std: Array
    mean: Array


def group_sum(
    x: Float[Array, " S"], group: Int[Array, " S"], counted: Bool[Array, " S"], groups: int
) -> Float[Array, " S"]:
    """Returns, at each sequence, the sum of `x` over the counted members of its group."""
    return jax.ops.segment_sum(jnp.where(counted, x, 0.0), group, groups)[group]


def group_statistics(
    x: Float[Array, " S"], group: Int[Array, " S"], counted: Bool[Array, " S"], groups: int
) -> GroupStatistics:
    """Returns the size, mean and standard deviation (n - 1) of each group's counted members, and the centered values."""
    low = jax.ops.segment_min(jnp.where(counted, x, jnp.inf), group, groups)[group]
    shifted = jnp.where(counted, x - low, 0.0)
    count = group_sum(jnp.ones_like(x), group, counted, groups)
    mean = group_sum(shifted, group, counted, groups) / jnp.maximum(count, 1.0)
    centered = jnp.where(counted, shifted - mean, 0.0)
    variance = group_sum(jnp.square(centered), group, counted, groups) / jnp.maximum(count - 1.0, 1.0)
    std = jnp.where(count > 1, jnp.sqrt(variance), 1.0)
    return GroupStatistics(count, centered, std, jnp.where(count > 0, mean + low, 0.0))


def least_group(singleton: Singleton) -> int:
    """The fewest rollouts of a group that have an advantage: two, or one whose reward is its advantage."""
    return 1 if singleton == "raw" else 2


def settle_singletons(
    advantage: Float[Array, " S"], reward: Float[Array, " S"], count: Float[Array, " S"], singleton: Singleton
) -> Float[Array, " S"]:
    """Sets the advantage in a group of one, which has nothing to compare with, to 0 ("zero") or to its reward ("raw")."""
    return jnp.where(count > 1, advantage, reward if singleton == "raw" else 0.0)


def group_relative(
    reward: Float[Array, " S"], stats: GroupStatistics, *, std: bool, singleton: Singleton, epsilon: float = 1e-6
) -> Float[Array, " S"]:
    """Returns GRPO's advantage, (r - mean) / (std + epsilon) within the group; without `std`, Dr. GRPO's r - mean."""
    scaled = stats.centered / (stats.std + epsilon) if std else stats.centered
    return settle_singletons(scaled, reward, stats.size, singleton)


def to_tokens(advantage: Float[Array, " S"], mask: Bool[Array, "S T"]) -> Float[Array, "S T"]:
    """Copies each sequence's advantage to every token of its mask; other tokens get 0."""
    return jnp.where(mask, advantage[:, None], 0.0)


def on_last_token(reward: Float[Array, " S"], mask: Bool[Array, "S T"]) -> Float[Array, "S T"]:
    """Places each sequence's reward on the last token of its mask; other tokens get 0."""
    after = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1]
    return jnp.where(mask & (after == 1), reward[:, None], 0.0)


def _backward(x: Float[Array, "S T"], carry: Float[Array, "S T"]) -> Float[Array, "S T"]:
    """Computes y_t = x_t + carry_t y_{t+1} from the last token to the first."""

    def join(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        return earlier[0] + earlier[1] * later[0], earlier[1] * later[1]

    return jax.lax.associative_scan(join, (x, carry), reverse=True, axis=1)[0]


def returns_to_go(rewards: Float[Array, "S T"], mask: Bool[Array, "S T"], gamma: float = 1.0) -> Float[Array, "S T"]:
    """Returns the discounted sum of the rewards from each token on; tokens outside the mask are skipped as if they were not there."""
    rewards = jnp.where(mask, rewards, 0.0)
    return jnp.where(mask, _backward(rewards, jnp.where(mask, gamma, 1.0).astype(rewards.dtype)), 0.0)


def gae(
    rewards: Float[Array, "S T"], values: Float[Array, "S T"], mask: Bool[Array, "S T"], gamma: float, lam: float
) -> tuple[Float[Array, "S T"], Float[Array, "S T"]]:
    """Returns generalised advantage estimates and returns (https://arxiv.org/abs/1506.02438), 0 outside the mask.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  returns = A + V. t + 1 is the next token
    of the mask; after the last one V and A are 0.
    """
    values = jnp.where(mask, values, 0.0)
    held = _backward(values, jnp.where(mask, 0.0, 1.0).astype(values.dtype))
    following = jnp.pad(held[:, 1:], ((0, 0), (0, 1)))
    delta = jnp.where(mask, rewards + gamma * following - values, 0.0)
    advantages = jnp.where(mask, _backward(delta, jnp.where(mask, gamma * lam, 1.0).astype(delta.dtype)), 0.0)
    return advantages, advantages + values


def leave_one_out(reward: Float[Array, " S"], stats: GroupStatistics, singleton: Singleton) -> Float[Array, " S"]:
    """Returns RLOO's advantage: the reward less the mean of the other members' rewards, n / (n - 1) x (r - mean)."""
    scaled = stats.centered * stats.size / jnp.maximum(stats.size - 1.0, 1.0)
    return settle_singletons(scaled, reward, stats.size, singleton)


def length_weighted(
    reward: Float[Array, " S"],
    length: Float[Array, " S"],
    group: Int[Array, " S"],
    counted: Bool[Array, " S"],
    groups: int,
) -> Float[Array, " S"]:
    """Returns OPO's advantage: the reward less sum(length r) / sum(length) of the group; 0 where not counted."""
    low = jax.ops.segment_min(jnp.where(counted, reward, jnp.inf), group, groups)[group]
    shifted = jnp.where(counted, reward - low, 0.0)
    total = group_sum(length, group, counted, groups)
    baseline = group_sum(length * shifted, group, counted, groups) / jnp.maximum(total, 1.0)
    return jnp.where(counted, shifted - baseline, 0.0)


def best_over_second(
    reward: Float[Array, " S"], group: Int[Array, " S"], counted: Bool[Array, " S"], groups: int
) -> Float[Array, " S"]:
    """Returns the group's best reward less its second best at the best member; 0 at all others, in a tie, and in a group of one."""
    known = jnp.where(counted, reward, -jnp.inf)
    best = jax.ops.segment_max(known, group, groups)[group]
    leads = counted & (known == best)
    second = jax.ops.segment_max(jnp.where(leads, -jnp.inf, known), group, groups)[group]
    leaders = group_sum(jnp.ones_like(reward), group, leads, groups)
    alone = (leaders == 1) & jnp.isfinite(second)
    return jnp.where(leads & alone, best - jnp.where(alone, second, 0.0), 0.0)


def token_baseline(
    returns: Float[Array, "S T"],
    energy: Float[Array, "S T"],
    mask: Bool[Array, "S T"],
    group: Int[Array, " S"],
    groups: int,
) -> Float[Array, "S T"]:
    """Returns the optimal token baseline: the group's mean return at each step, weighted by the energy spent up to it.

    W_t = sum_{s <= t} energy_s;  B_t = sum_G W_t R_t / sum_G W_t over the members with a token at t. Where only one
    member is that long, the baseline is 0.
    """
    spent = jnp.where(mask, jnp.cumsum(jnp.where(mask, energy, 0.0), axis=1), 0.0)
    weighted = jax.ops.segment_sum(jnp.where(mask, spent * returns, 0.0), group, groups)
    total = jax.ops.segment_sum(spent, group, groups)
    members = jax.ops.segment_sum(mask.astype(jnp.float32), group, groups)
    return jnp.where(members > 1, weighted / jnp.maximum(total, 1e-8), 0.0)[group]
