"""Format-times-answer reward: 1 where a response has the required form and its answer equals the reference as mathematics.

R1-Zero's form is a closed thought and an answer in tags; the other form is a box. Form and answer are both logged and give
four classes; in CS336's assignment a response without the form has no answer (three classes), unless it is graded whole.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.experience import Rollout, Scores
from jaxrl_llm.rewards import maths
from jaxrl_llm.rewards.maths import Maths
from jaxrl_llm.rewards.wrap import PlainReward

# Patterns that must all occur in a response of the form.
FORMS: Mapping[str, tuple[str, ...]] = {
    "r1_zero": ("</think> <answer>", "</answer>"),
    "r1_zero_lines": (r"</think>\s*<answer>", "</answer>"),
    "boxed": (r"\\boxed\{",),
}


@dataclass(frozen=True, kw_only=True)
class FormatAnswer(PlainReward):
    """Rewards as Dr. GRPO's r1_zero grader (arXiv 2503.20783) and its question-only grader do.

    Attributes:
      form: "r1_zero" (both "</think> <answer>" and "</answer>" occur), "r1_zero_lines" (any white space may
        stand between the tags), "boxed" (a box occurs).
      grade_unformatted: whether a response without the form is graded as a whole, and may so have the right answer.
      maths: judges the answers.
    """

    form: Literal["r1_zero", "r1_zero_lines", "boxed"] = "r1_zero"
    grade_unformatted: bool = False
    maths: Maths = field(default_factory=Maths)

    def __post_init__(self) -> None:
        components.choices(self)

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns part "format_answer" = log/format x log/answer, 0 or 1 [G]; invalid where the answer could not be judged."""
        del stats
        spans = [self.answer(rollout.text) for rollout in rollouts]
        formed = np.array([self.formatted(rollout.text) for rollout in rollouts], float)
        graded = [i for i, span in enumerate(spans) if span is not None]
        answer, valid = np.zeros(len(rollouts)), np.ones(len(rollouts), bool)
        if graded:
            asked = [(references(rollouts[i]), spans[i]) for i in graded]
            found = await self.maths.judge_all(__name__, "judge", asked, [rollouts[i] for i in graded])
            answer[graded], valid[graded] = found.parts["maths"], found.valid["maths"]
        sure = np.ones(len(rollouts), bool)
        return Scores(
            parts={"format_answer": formed * answer, "log/format": formed, "log/answer": answer},
            valid={"format_answer": valid | (formed == 0), "log/format": sure, "log/answer": valid},
        )

    def formatted(self, text: str) -> bool:
        """Returns whether the response has the form."""
        return all(re.search(pattern, text) for pattern in FORMS[self.form])

    def answer(self, text: str) -> str | None:
        """Returns the text to be graded; None where nothing is graded."""
        if not self.formatted(text):
            return text if self.grade_unformatted else None
        if self.form == "boxed":
            return text
        span = text.rpartition("<answer>")[2].replace("</answer>", "")
        return span if "\\boxed" in span else maths.delimited(span)


def references(rollout: Rollout) -> list[str]:
    """Returns the right answers: the column "references" of the prompt where it has one, else its reference."""
    several = rollout.prompt.extra.get("references")
    return [str(one) for one in several] if several else [rollout.prompt.reference]


def judge(references: Sequence[str], text: str) -> float:
    """Returns 1 where `text` ends in an expression equal to one of `references`; runs in a worker process."""
    return max(maths.judge(reference, text) for reference in references)
