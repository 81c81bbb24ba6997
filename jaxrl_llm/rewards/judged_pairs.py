"""A language model says whether two responses are of one class: DARLING's partition without a trained classifier (arXiv 2509.02534).

The question asks whether the two are the same, and "yes" is 1; the original's judge is asked whether they differ, and its "yes" is taken for
the same. Neither sees the prompt.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxrl_llm import components
from jaxrl_llm.rewards.endpoint import Endpoint
from jaxrl_llm.rewards.judge import fields
from jaxrl_llm.rewards.judge_answers import yes_no
from jaxrl_llm.rewards.pairs import Pair

VERDICT = "Think briefly, then end with [[yes]] or [[no]]."

SAME_MEANING = (
    "Two responses to one request are below. Would a reader who has seen the first learn or enjoy anything new from the second: is it about "
    "something else, or does it say something else of it? Answer yes where they are essentially the same and no where they differ. "
    f"{VERDICT}\n\n[First response]\n{{first}}\n\n[Second response]\n{{second}}"
)

SAME_STRATEGY = (
    "Two solutions of one problem are below. Do they follow the same strategy? They differ where they use another method or another concept, "
    "where their reasoning parts at a decisive step, or where the intermediate steps are materially different; other words, another order or "
    f"another layout make no difference. Answer yes where they are the same and no where they differ. {VERDICT}\n\n"
    "[First solution]\n{first}\n\n[Second solution]\n{second}"
)

QUESTIONS: Mapping[str, str] = {"meaning": SAME_MEANING, "strategy": SAME_STRATEGY}


@dataclass(frozen=True, kw_only=True)
class JudgedPairs:
    """Asks an endpoint about each pair: 1 for "yes, the same", 0 for "no". All pairs are asked at the same time, within the service's limits.

    Attributes:
      endpoint: the model that is asked.
      question: the question, with {first} and {second}; or "meaning" (chat) or "strategy" (solutions).
    """

    endpoint: Endpoint
    question: str = "meaning"

    def __post_init__(self) -> None:
        if fields(self._question) != {"first", "second"}:
            components.refuse(self, "question", f"a text with {{first}} and {{second}}, or one of {sorted(QUESTIONS)}")

    async def similar(self, pairs: Sequence[Pair]) -> list[float]:
        """Returns 0 or 1 for each pair; raises wrap.Failed where an answer could not be obtained or read."""
        return list(await asyncio.gather(*(self._one(pair) for pair in pairs)))

    async def _one(self, pair: Pair) -> float:
        first, second = pair
        content = self._question.format(first=first, second=second)
        return await self.endpoint.reply([{"role": "user", "content": content}], second, yes_no)

    @property
    def _question(self) -> str:
        return QUESTIONS.get(self.question, self.question)
