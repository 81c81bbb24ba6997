"""Rubric reward: a judge rates a piece by many criteria, as EQ-Bench's creative writing (version 3) does; their mean, 0 to 20.

    piece = mean over rated criteria of r_c, or of 20 - r_c where lower is better

Criteria and directions are those of github.com/EQ-bench/creative-writing-bench; the question is this module's own wording. The
judge's text before the heading [Scores] is not read, and a criterion rated outside 0 to 20 is left out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.experience import Rollout, Scores
from jaxrl_llm.rewards.endpoint import Endpoint
from jaxrl_llm.rewards.wrap import Failed, PlainReward, judge_together

MOST = 20.0
CRITERIA = (
    "Adherence to Instructions", "Believable Character Actions", "Nuanced Characters", "Consistent Voice/Tone of Writing",
    "Imagery and Descriptive Quality", "Elegant Prose", "Emotionally Engaging", "Emotionally Complex", "Coherent",
    "Meandering", "Weak Dialogue", "Tell-Don't-Show", "Unsurprising or Uncreative", "Amateurish", "Purple Prose",
    "Overwrought", "Incongruent Ending Positivity", "Unearned Transformations", "Well-earned Lightness or Darkness",
    "Sentences Flow Naturally", "Overall Reader Engagement", "Overall Impression",
)  # fmt: skip
LOWER_IS_BETTER = (
    "Meandering", "Weak Dialogue", "Tell-Don't-Show", "Unsurprising or Uncreative", "Amateurish", "Purple Prose",
    "Overwrought", "Incongruent Ending Positivity", "Unearned Transformations",
)  # fmt: skip
QUESTION = """Judge the piece of creative writing below, which answers the writing prompt above it. It may have been cut off; \
judge what is there. Write a few sentences of analysis under the heading [Analysis]. Then, under the heading [Scores], rate every \
criterion from 0 to 20, one a line, as "Criterion: number". For the criteria {lower}, a lower number is better; for all \
others, a higher one. Be critical: most writing deserves the middle of the scale.

[Criteria]
{criteria}

[Writing prompt]
{prompt}

[Piece]
{judged}"""


@dataclass(frozen=True, kw_only=True)
class Rubric(PlainReward):
    """Gives part "rubric", the mean over criteria, 0 to 20; invalid where the judge fails or the piece is too short.

    Attributes:
      endpoint: the model that is asked.
      criteria: criteria to rate.
      lower_is_better: criteria for which 20 minus the rating counts.
      question: the question, with {prompt}, {judged}, {criteria} and {lower}.
      least_rated: smallest number of criteria that an answer must rate to count.
      least_characters: number of characters below which a piece is invalid.
    """

    endpoint: Endpoint
    criteria: Sequence[str] = CRITERIA
    lower_is_better: Sequence[str] = LOWER_IS_BETTER
    question: str = QUESTION
    least_rated: int = 11
    least_characters: int = 500

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.lower_is_better) - set(self.criteria)):
            raise ValueError(f"rubric.Rubric.lower_is_better names {unknown}, which rubric.Rubric.criteria lacks")
        components.within(self, f"[1, {len(self.criteria)}]", "least_rated")

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns one part [G]."""
        del stats
        return await judge_together("rubric", [self._one(rollout) for rollout in rollouts], rollouts)

    async def _one(self, rollout: Rollout) -> float:
        if len(rollout.text.strip()) < self.least_characters:
            raise Failed(f"{len(rollout.text.strip())} characters are no piece (at least {self.least_characters})")
        prompt = rollout.prompt
        asked = prompt.extra.get("instruction") or prompt.question
        # All texts are inserted by one format call, so braces inside them stay as they are.
        content = self.question.format(
            prompt=asked, judged=rollout.text, criteria="\n".join(self.criteria), lower=", ".join(self.lower_is_better)
        )
        return await self.endpoint.reply([{"role": "user", "content": content}], rollout.text, self.mean)

    def mean(self, answer: str) -> float:
        """Returns the mean of the criteria that an answer rates; raises ValueError where it rates fewer than `least_rated`."""
        rated = self.rated(answer)
        if len(rated) < self.least_rated:
            raise ValueError(f"{len(rated)} criteria are rated, at least {self.least_rated} must be: {answer[:200]!r}")
        return float(np.mean([MOST - x if name in self.lower_is_better else x for name, x in rated.items()]))

    def rated(self, answer: str) -> dict[str, float]:
        """Returns {criterion: rating as given}; reads "Name: 12", "**Name**: [12]" and "Name: 12/20"."""
        text = answer.rpartition("[Scores]")[2]
        found = {}
        for name in self.criteria:
            pattern = (
                rf"(?im)^[\s*\-\d.)]*{re.escape(name)}[\s*]*:[\s*]*\[?\s*(\d+(?:\.\d+)?)(?:\s*/\s*20)?\s*\]?[\s*]*$"
            )
            numbers = [float(x) for x in re.findall(pattern, text)]
            if numbers and numbers[-1] <= MOST:
                found[name] = numbers[-1]
        return found
