"""Rewards that environments and agents give, as parts of a group's scores beside those of reward components."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_llm.experience import Rollout, Scores
from jaxrl_llm.protocols import Reward

UNKNOWN = "env/reward"  # the part of a group that nothing scored


async def scored(
    reward: Reward | None,
    rollouts: Sequence[Rollout],
    weights: Mapping[str, float],
    stats: Mapping[str, np.ndarray] | None = None,
) -> Scores:
    """Returns the parts of a group [G]: those of `reward`, which scores the valid rollouts alone, and "env/NAME" for the rewards of
    environments.

    Args:
      reward: the reward component; None where the environments alone give rewards.
      rollouts: the rollouts of one prompt.
      weights: {NAME: weight} of what environments gave; 1 for others.
      stats: {name: [G]}, means of token stats, for a reward that needs them.
    """
    kept = [i for i, rollout in enumerate(rollouts) if rollout.valid]
    found = Scores(parts={}, valid={})
    if reward is not None and kept:
        if len(kept) == len(rollouts):
            found = await reward.score(rollouts, stats) if stats is not None else await reward.score(rollouts)
        else:
            known = None if stats is None else {name: np.asarray(x)[kept] for name, x in stats.items()}
            valid = [rollouts[i] for i in kept]
            found = _widened(
                await (reward.score(valid) if known is None else reward.score(valid, known)), kept, len(rollouts)
            )
    return with_given(found, rollouts, weights, alone=reward is None)


def with_given(scores: Scores, rollouts: Sequence[Rollout], weights: Mapping[str, float], *, alone: bool) -> Scores:
    """Returns the scores with the parts that environments gave; where they `alone` give rewards and gave none, with an invalid part."""
    names = sorted({name for rollout in rollouts for name in rollout.rewards})
    if not names and not alone:
        return scores
    parts, valid, weight = dict(scores.parts), dict(scores.valid), dict(scores.weights)
    for name in names:
        values = [rollout.rewards.get(name) if rollout.valid else None for rollout in rollouts]
        had = np.array([value is not None and bool(np.isfinite(value)) for value in values], bool)
        part = f"env/{name}"
        parts[part] = np.array([float(v or 0.0) if ok else 0.0 for v, ok in zip(values, had, strict=True)], np.float64)
        valid[part] = had
        if name in weights:
            weight[part] = float(weights[name])
    if not names:
        parts[UNKNOWN], valid[UNKNOWN] = np.zeros(len(rollouts)), np.zeros(len(rollouts), bool)
    return Scores(parts=parts, valid=valid, weights=weight)


def _widened(scores: Scores, rows: Sequence[int], count: int) -> Scores:
    """Spreads scores of the rollouts numbered `rows` over all `count` rollouts; the others are invalid."""

    def wide(values: np.ndarray, dtype: type) -> np.ndarray:
        out: np.ndarray = np.zeros(count, dtype)
        out[list(rows)] = values
        return out

    parts = {name: wide(x, float) for name, x in scores.parts.items()}
    return Scores(parts=parts, valid={name: wide(x, bool) for name, x in scores.valid.items()}, weights=scores.weights)
