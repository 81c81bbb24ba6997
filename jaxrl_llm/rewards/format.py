"""Format reward: 1 where the response matches a regular expression."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.experience import Prompt, Rollout, Scores
from jaxrl_llm.rewards.wrap import PlainReward, judge_each


@dataclass(frozen=True, kw_only=True)
class Format(PlainReward):
    """Matches the response against a pattern; "." matches line ends too.

    Attributes:
      pattern: regular expression.
      whole: whether the pattern must match the whole response, white space at its ends aside; False finds it anywhere.
    """

    pattern: str
    whole: bool = True

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"Format.pattern={self.pattern!r} is no regular expression: {error}") from error

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns part "format", 0 or 1 [G]."""
        del stats
        return judge_each("format", self.judge, rollouts)

    def judge(self, prompt: Prompt, text: str) -> float:
        """Returns 1 for a match, else 0."""
        del prompt
        match = re.fullmatch if self.whole else re.search
        return float(match(self.pattern, text.strip(), re.DOTALL) is not None)
