"""Accuracy of a policy on held-out prompts, greedy and sampled, during a run and alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxrl_llm.collect import Collector
from jaxrl_llm.experience import Prompt, SamplingSettings, ScoredGroup
from jaxrl_llm.protocols import Reward, Source
from jaxrl_llm.rollouts import Asking

# Every evaluation of a run draws with the same seed, so that a difference is the policy's.
SEED = 20_011


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A set of prompts and how it is answered.

    Attributes:
      name: names the metrics, "eval/NAME/...".
      data: the held-out dataset.
      limit: first prompts used; None takes all.
      greedy: measures greedy answers.
      samples: answers drawn per prompt by `settings`; 0 draws none.
      settings: how answers are drawn; greedy answers share its token limits.
      reward: what an answer is worth; None takes the stage's reward.
    """

    name: str = "heldout"
    data: Source
    limit: int | None = None
    greedy: bool = True
    samples: int = 1
    settings: SamplingSettings = field(default_factory=SamplingSettings)
    reward: Reward | None = None

    def __post_init__(self) -> None:
        if not self.greedy and self.samples < 1:
            raise ValueError(
                f"Evaluation {self.name!r} measures nothing: set Evaluation.greedy or Evaluation.samples >= 1"
            )
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"Evaluation.limit must be >= 1, or None for all prompts (got {self.limit})")


async def evaluate(
    evaluation: Evaluation, prompts: Sequence[Prompt], asking: Asking, reward: Reward
) -> tuple[dict[str, float], list[ScoredGroup]]:
    """Metrics of encoded `prompts`, and the scored groups (greedy ones first where both were asked for).

    Returns:
      {"eval/NAME/greedy": mean reward of greedy answers, "eval/NAME/sampled": of drawn ones, and of each kind the share
      cut off ("_truncated"), the mean length ("_length") and the number of distinct answers ("_distinct")}.

    Raises:
      ValueError: a reward that waits for the learner's statistics.
    """
    if reward.needs_stats:
        raise ValueError(
            f"evaluation {evaluation.name!r} has no learner to give {type(reward).__name__} its statistics: "
            "set Evaluation.reward to a reward that needs none"
        )
    metrics: dict[str, float] = {}
    shown: list[ScoredGroup] = []
    for kind, count in (("greedy", int(evaluation.greedy)), ("sampled", evaluation.samples)):
        if not count:
            continue
        settings = evaluation.settings.greedy() if kind == "greedy" else evaluation.settings
        collector = Collector(asking=asking, reward=reward, settings=settings, group_size=count)
        groups = await collector.score(prompts, (SEED,))
        metrics |= {f"eval/{evaluation.name}/{kind}{k}": v for k, v in summary(groups).items()}
        shown += groups
    asking.counters.clear()
    return metrics, shown


def summary(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Mean total reward over valid answers (""), and what else is worth knowing of them."""
    totals = np.concatenate([g.total()[g.valid()] for g in groups])
    answers = [r for g in groups for r in g.rollouts]
    invalid = len(answers) - len(totals)
    values = {
        "": float(totals.mean()) if len(totals) else float("nan"),
        "_truncated": float(np.mean([r.finish == "length" for r in answers])),
        "_length": float(np.mean([len(r.tokens) for r in answers])),
        "_distinct": float(len({r.text for r in answers})),
    }
    return values | ({"_invalid": float(invalid)} if invalid else {})
