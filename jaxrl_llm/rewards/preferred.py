"""The share of comparisons with another model's output that a judge decides for a response, as in AlpacaEval (arXiv 2404.04475).

    part = mean over both orders of [the response is chosen]        1, 0.5 (the order decided) or 0

Asking in both orders cancels the judge's bias for the first or the second place; AlpacaEval draws one order for each instruction.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.experience import Rollout, Scores
from jaxrl_llm.rewards.endpoint import Endpoint
from jaxrl_llm.rewards.judge import fields
from jaxrl_llm.rewards.wrap import Failed, PlainReward, judge_together

QUESTION = (
    "Two assistants have answered an instruction. Which answer would most people prefer: the more helpful, right and complete one? Length, "
    "order and layout count for nothing by themselves. Answer with one letter and nothing else, m for the first or M for the second.\n\n"
    "[Instruction]\n{asked}\n\n[Answer m]\n{first}\n\n[Answer M]\n{second}"
)


def second_is_chosen(text: str) -> float:
    """Returns 1 for "M" and 0 for "m", the last that stands alone; raises ValueError where neither does."""
    found = re.findall(r"(?<![\w'])([mM])(?![\w'])", text)
    if not found:
        raise ValueError(f"neither m nor M stands alone in {text[:200]!r}")
    return float(found[-1] == "M")


@dataclass(frozen=True, kw_only=True)
class Preferred(PlainReward):
    """Compares each response with its prompt's reference, another model's output. An empty response loses without a question.

    Attributes:
      endpoint: the model that is asked.
      question: the question, with {asked} (the instruction), {first} and {second}; the answer is m for the first, M for the second.
    """

    endpoint: Endpoint
    question: str = QUESTION

    def __post_init__(self) -> None:
        if fields(self.question) != {"asked", "first", "second"}:
            components.refuse(self, "question", "a text with {asked}, {first} and {second}")

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns part "preferred", 0, 0.5 or 1 [G]; invalid where an answer could not be obtained or read."""
        del stats
        return await judge_together("preferred", [self._one(rollout) for rollout in rollouts], rollouts)

    async def _one(self, rollout: Rollout) -> float:
        prompt, own = rollout.prompt, rollout.text
        other = prompt.reference
        if not other.strip():
            raise Failed(f"prompt {prompt.id!r} has no output to compare with: set instructions.Instructions.reference")
        if not own.strip():
            return 0.0
        asked = str(prompt.extra.get("instruction") or prompt.question)
        behind, before = await asyncio.gather(self._second(asked, other, own), self._second(asked, own, other))
        return (behind + 1.0 - before) / 2

    async def _second(self, asked: str, first: str, second: str) -> float:
        content = self.question.format(asked=asked, first=first, second=second)
        try:
            return await self.endpoint.reply([{"role": "user", "content": content}], second, second_is_chosen)
        except ValueError as error:
            raise Failed(str(error)) from error
