"""Exact-match reward: 1 where the response equals the reference, after white space around both is stripped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.experience import Prompt, Rollout, Scores
from jaxrl_llm.rewards.wrap import PlainReward, judge_each


@dataclass(frozen=True, kw_only=True)
class Exact(PlainReward):
    """Compares the response with the reference.

    Attributes:
      end: text at which the answer ends ("\\n", a stop string); empty takes the whole response.
      ignore_case: whether letter case is ignored.
    """

    end: str = ""
    ignore_case: bool = False

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns part "exact", 0 or 1 [G]."""
        del stats
        return judge_each("exact", self.judge, rollouts)

    def judge(self, prompt: Prompt, text: str) -> float:
        """Returns 1 for a match, else 0."""
        if not prompt.reference.strip():
            raise ValueError(f"prompt {prompt.id!r} has no reference to match")
        answer = (text.split(self.end, 1)[0] if self.end else text).strip()
        reference = prompt.reference.strip()
        return float(answer.casefold() == reference.casefold() if self.ignore_case else answer == reference)
