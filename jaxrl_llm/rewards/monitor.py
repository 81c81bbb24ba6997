"""A monitor beside a reward: it sees only the prompt and the chain of thought, and predicts the judge's verdict on the output.

Monitorability (Classmate-CoT) is how well the chain of thought predicts the output. The monitor's rating is
logged and never learned from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from jaxrl_llm.experience import Group, Rollout, Scores
from jaxrl_llm.protocols import Reward
from jaxrl_llm.rewards.judge import Judge
from jaxrl_llm.rewards.wrap import Failed, none_judged


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """Adds a monitor's prediction to a reward.

    Attributes:
      reward: the reward that is learned from; the monitor predicts its total.
      monitor: a judge with sees = "thought".
    """

    reward: Reward
    monitor: Judge

    def __post_init__(self) -> None:
        if self.monitor.sees != "thought":
            raise ValueError(f"Monitor.monitor must see the thought alone: set Judge.sees (got {self.monitor.sees!r})")

    @property
    def needs_stats(self) -> bool:
        """Whether the reward needs the learner's token stats."""
        return self.reward.needs_stats

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns the reward's parts, "log/monitor" and "log/monitor_squared_error" [G].

        A monitor that fails invalidates no rollout, only its own two parts.
        """
        scores = await self.reward.score(rollouts, stats)
        group = Group(rollouts=rollouts, scores=scores)
        try:
            found = await self.monitor.score(rollouts)
        except Failed as failure:
            found = none_judged(self.monitor.name, rollouts, failure)
        seen, valid = found.parts[self.monitor.name], found.valid[self.monitor.name]
        both = valid & group.valid()
        return Scores(
            parts={
                **scores.parts,
                "log/monitor": seen,
                "log/monitor_squared_error": np.where(both, (seen - group.total()) ** 2, 0.0),
            },
            valid={**scores.valid, "log/monitor": valid, "log/monitor_squared_error": both},
            weights=scores.weights,
        )


def agreement(
    predicted: Float[np.ndarray, "N"], truth: Float[np.ndarray, "N"], valid: Bool[np.ndarray, "N"]
) -> dict[str, float]:
    """Measures how well a monitor's ratings predict the judge's: mse, rmse, both means, Pearson and Spearman correlation.

    Only valid pairs count; `count` is their number. A correlation with a constant is nan.
    """
    p, t = predicted[valid].astype(np.float64), truth[valid].astype(np.float64)
    if not len(p):
        nothing = ("mse", "rmse", "prediction_mean", "ground_truth_mean", "pearson", "spearman")
        return {"count": 0.0, **dict.fromkeys(nothing, float("nan"))}
    mse = float(np.mean((p - t) ** 2))
    return {
        "count": float(len(p)),
        "mse": mse,
        "rmse": float(np.sqrt(mse)),
        "prediction_mean": float(p.mean()),
        "ground_truth_mean": float(t.mean()),
        "pearson": _correlation(p, t),
        "spearman": _correlation(_ranks(p), _ranks(t)),
    }


def detection(
    predicted: Float[np.ndarray, "N"],
    truth: Float[np.ndarray, "N"],
    valid: Bool[np.ndarray, "N"],
    threshold: float = 0.5,
) -> dict[str, float]:
    """Counts a monitor's positives (above `threshold`) against the truth's; gives precision, recall and F1 (0 where undefined)."""
    p, t = predicted[valid] > threshold, truth[valid] > threshold
    tp, tn, fp, fn = (float(np.sum(x)) for x in (p & t, ~p & ~t, p & ~t, ~p & t))
    precision, recall = tp / max(tp + fp, 1), tp / max(tp + fn, 1)
    f1 = 2 * tp / max(2 * tp + fp + fn, 1)
    return {"tp": tp, "tn": tn, "fp": fp, "fn": fn, "precision": precision, "recall": recall, "f1": f1}


def _correlation(a: Float[np.ndarray, "N"], b: Float[np.ndarray, "N"]) -> float:
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """Returns ranks from 1; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + 1 + ends) / 2)[inverse.reshape(-1)]
