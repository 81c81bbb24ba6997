"""Evaluation of a policy on held-out prompts during a run, greedy and sampled; eval/harness.py evaluates outside of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.eval.answered import KINDS, Answered, Extract, Measure, estimate, mean, records, value
from jaxrl_llm.experience import Group, Prompt, SamplingParams
from jaxrl_llm.protocols import Dataset, Reward
from jaxrl_llm.rollouts.collect import Collector, RolloutGenerator

# Every evaluation of a run samples with the same seed, so that differences come from the policy.
SEED = 20_011


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A set of prompts, the way in which they are answered, and the measures of the answers.

    Attributes:
      name: its name in the metrics, "eval/NAME/...".
      data: the held-out dataset.
      limit: number of first prompts that are used; None takes all.
      greedy: whether greedy answers are measured.
      samples: answers sampled per prompt with `settings`; 0 samples none.
      settings: sampling params; greedy answers share its token limits.
      reward: reward that grades an answer; None takes the stage's reward, and grades nothing outside of a run.
      answer: function from a response to its answer, which is kept in the records and counts as a vote for maj@k; None extracts nothing.
      measures: families of metrics beside the mean reward.
    """

    name: str = "heldout"
    data: Dataset
    limit: int | None = None
    greedy: bool = True
    samples: int = 1
    settings: SamplingParams = field(default_factory=SamplingParams)
    reward: Reward | None = None
    answer: Extract | None = None
    measures: Sequence[Measure] = ()

    def __post_init__(self) -> None:
        if self.samples < 0 or (not self.greedy and self.samples < 1):
            raise ValueError(
                f"Evaluation {self.name!r} measures nothing: set Evaluation.greedy or Evaluation.samples >= 1"
            )
        components.at_least(self, 1, "limit")
        if not isinstance(self.data, Dataset):
            raise ValueError(
                f"EVAL_DATA (evaluate.Evaluation.data of {self.name!r}) must be a dataset, such as @rows.Rows() (got {self.data!r}); a run "
                "without evaluations sets train.Stage.evaluations = []"
            )

    @property
    def kinds(self) -> dict[str, int]:
        """Number of answers per prompt by kind, {"greedy": 1, "sampled": samples}, without the kinds that are switched off."""
        return {kind: n for kind, n in zip(KINDS, (int(self.greedy), self.samples), strict=True) if n}

    def asked(self, kind: str) -> SamplingParams:
        """Returns the sampling params of a kind."""
        return self.settings.greedy() if kind == "greedy" else self.settings

    def metrics(self, answered: Sequence[Answered]) -> dict[str, np.ndarray]:
        """Returns every metric, either one value per prompt [N] or a scalar.

        Raises:
          ValueError: two measures give the same name.
        """
        found: dict[str, np.ndarray] = {}
        for kind in self.kinds:
            found |= {f"{kind}{name}": v for name, v in summary(answered, kind).items()}
        for family in self.measures:
            more = family.measure(answered)
            if twice := sorted(set(more) & set(found)):
                raise ValueError(f"evaluation {self.name!r} has two measures that give {twice}: leave one out")
            found |= more
        return found


async def evaluate(
    evaluation: Evaluation, prompts: Sequence[Prompt], generator: RolloutGenerator, reward: Reward | None
) -> tuple[dict[str, float], list[Group]]:
    """Answers encoded `prompts` and returns the metrics and the scored groups, greedy ones first; an environment may give the rewards
    in place of `reward`.

    Returns:
      {"eval/NAME/greedy": mean reward of greedy answers, "eval/NAME/sampled": of sampled ones, and for each kind the share of
      truncated answers ("_truncated"), the mean length ("_length") and the number of distinct answers ("_distinct"); "eval/NAME/prompts"},
      and the metrics of the evaluation's measures.

    Raises:
      ValueError: the reward needs the learner's token stats.
    """
    check_reward(evaluation.name, reward)
    answered = [Answered(prompt=prompt, records=[]) for prompt in prompts]
    shown: list[Group] = []
    for kind, count in evaluation.kinds.items():
        collector = Collector(generator=generator, reward=reward, settings=evaluation.asked(kind), group_size=count)
        groups = await collector.score(prompts, (SEED,))
        for one, group in zip(answered, groups, strict=True):
            one.records = [*one.records, *records(group.rollouts, group.scores, kind, evaluation.answer)]
        shown += groups
    generator.counters.clear()
    generator.take_played()
    found = evaluation.metrics(answered)
    metrics = {f"eval/{evaluation.name}/{name}": estimate(values).mean for name, values in found.items()}
    return metrics | {f"eval/{evaluation.name}/prompts": float(len(prompts))}, shown


def check_reward(name: str, reward: Reward | None) -> None:
    """Raises ValueError where the reward of the evaluation `name` needs the learner's token stats."""
    if reward is not None and reward.needs_stats:
        raise ValueError(
            f"evaluation {name!r} has no learner to give {type(reward).__name__} its statistics: "
            "set Evaluation.reward to a reward that needs none"
        )


def summary(answered: Sequence[Answered], kind: str) -> Mapping[str, np.ndarray]:
    """Returns the metrics of one kind of answers, with their mean total reward over valid answers (""), where they are graded."""
    groups = [one.of(kind) for one in answered]
    values = {
        "_truncated": np.array([np.mean([r["finish"] == "length" for r in group]) for group in groups]),
        "_length": np.array([np.mean([r["tokens"] for r in group]) for group in groups]),
        "_distinct": np.array(float(len({r["response"] for group in groups for r in group}))),
    }
    if not any(record["scores"] for group in groups for record in group):
        return values
    scores = [[value(record) for record in group] for group in groups]
    invalid = int(np.isnan([x for group in scores for x in group]).sum())
    values[""] = np.array([mean(group) for group in scores])
    return values | ({"_invalid": np.array(float(invalid))} if invalid else {})
