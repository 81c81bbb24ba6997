"""Reward from reasoning-gym's own verifiers, between 0 and 1."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.experience import Rollout, Scores
from jaxrl_llm.rewards import answers
from jaxrl_llm.rewards.services.pool import Pool
from jaxrl_llm.rewards.wrap import PlainReward, judge_together


@dataclass(frozen=True, kw_only=True)
class ReasoningGym(PlainReward):
    """Scores the rows of data/procedural.py in worker processes, since verifiers evaluate what the model wrote.

    Attributes:
      answer: text that is scored: the "whole" response, or the content of its last <answer></answer> ("tag", which scores 0
        where there is none).
      workers: number of processes, which start at the first response; None takes one for each core, from 2 to 16.
      limit_s: time limit of one response in seconds.
      memory_gb: address space of a process in GiB (Linux).
    """

    answer: Literal["whole", "tag"] = "whole"
    workers: int | None = None
    limit_s: float = 10.0
    memory_gb: float = 4.0
    _pool: Pool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        components.choices(self)
        warm = (__name__, "load")
        pool = Pool(workers=self.workers, limit_s=self.limit_s, memory_gb=self.memory_gb, warm=warm)
        object.__setattr__(self, "_pool", pool)

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns part "reasoning_gym", shape `[G]`, in [0, 1]; invalid where the verifier failed or took too long.

        Raises:
          ValueError: a prompt is not a row of data/procedural.py.
        """
        del stats
        arguments = []
        for rollout in rollouts:
            missing = {"task", "config", "entry"} - set(rollout.prompt.extra)
            if missing:
                raise ValueError(
                    f"prompt {rollout.prompt.id!r} has no {sorted(missing)} in `extra`: the reward ReasoningGym "
                    "scores the rows of the data source procedural.ReasoningGym alone"
                )
            text = answers.tagged(rollout.text) if self.answer == "tag" else rollout.text.strip()
            extra = rollout.prompt.extra
            arguments.append((extra["task"], json.dumps(extra["config"], sort_keys=True), extra["entry"], text))
        judgements = [self._pool.call(__name__, "judge", *each) for each in arguments]
        return await judge_together("reasoning_gym", judgements, rollouts)

    def isolation(self) -> str:
        """Returns how the verifier's processes are isolated."""
        return self._pool.isolation()

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()


def judge(task: str, config: str, entry: Mapping[str, Any], answer: str | None) -> float:
    """Returns the verifier's score of `answer` to `entry`; runs in a worker process."""
    return float(_dataset(task, config).score_answer(answer, entry))


def load() -> None:
    """Imports the package, which takes a second."""
    import reasoning_gym  # noqa: F401


@lru_cache(maxsize=64)
def _dataset(task: str, config: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0, **json.loads(config))
