"""Rewards from a sequence classifier or a reward model: served over HTTP, run in this process, or any object that scores texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.experience import Rollout, Scores
from jaxrl_llm.rewards.service import Service
from jaxrl_llm.rewards.wrap import Failed, PlainReward, none_judged, part


@runtime_checkable
class Scorer(Protocol):
    """A scorer of texts: `Served`, `hf_classifier.HfClassifier`, or a user's own model."""

    async def scores(self, texts: Sequence[Any]) -> Sequence[float | None]:
        """Returns the score of each text, or None for a text that has none; raises wrap.Failed where no scores could be obtained."""
        ...


@dataclass(frozen=True, kw_only=True)
class Served:
    """A scorer that asks the server of rewards/services/classifier_server.py.

    Attributes:
      service: the server's address and time limits.
    """

    service: Service

    async def scores(self, texts: Sequence[Any]) -> list[float | None]:
        """Returns the server's scores; raises wrap.Failed where their number differs from that of the texts."""

        def read(answer: Any) -> list[float | None]:
            found = [None if score is None else float(score) for score in answer["scores"]]
            if len(found) != len(texts):
                raise ValueError(f"{len(found)} scores for {len(texts)} texts")
            return found

        return await self.service.post("/score", {"texts": list(texts)}, read)


@dataclass(frozen=True, kw_only=True)
class Classifier(PlainReward):
    """A scorer as a reward.

    Attributes:
      scorer: scores texts.
      sees: text that the scorer gets: the "response" alone, the "pair" of prompt text and response, or the whole "chat".
      minimum: lower bound to which scores are clipped; None for no bound.
      maximum: upper bound to which scores are clipped (TokenBuncher: 1.5 in its second objective); None for no bound.
      name: the part's name.
    """

    scorer: Scorer
    sees: Literal["response", "pair", "chat"] = "response"
    minimum: float | None = None
    maximum: float | None = None
    name: str = "classifier"

    def __post_init__(self) -> None:
        components.choices(self)
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise ValueError(f"Classifier.minimum must be <= maximum (got {self.minimum} and {self.maximum})")

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns one part, float64 [G]; invalid where the scorer failed or a score is not finite."""
        del stats
        if not rollouts:
            return part(self.name, [])
        try:
            found = list(await self.scorer.scores([self.shown(rollout) for rollout in rollouts]))
            if len(found) != len(rollouts):
                raise Failed(f"{type(self.scorer).__name__} gave {len(found)} scores for {len(rollouts)} responses")
        except Failed as failure:
            return none_judged(self.name, rollouts, failure)
        scores = part(self.name, found)
        low = -np.inf if self.minimum is None else self.minimum
        high = np.inf if self.maximum is None else self.maximum
        clipped = np.clip(scores.parts[self.name], low, high)
        return Scores(parts={self.name: np.where(scores.valid[self.name], clipped, 0.0)}, valid=scores.valid)

    def shown(self, rollout: Rollout) -> Any:
        """Returns the text, pair or chat of a rollout that the scorer gets.

        Raises:
          ValueError: `sees` is "chat" and the prompt has no messages.
        """
        prompt = rollout.prompt
        if self.sees == "response":
            return rollout.text
        if self.sees == "pair":
            return [prompt.whole, rollout.text]
        if prompt.messages is None:
            raise ValueError(f"prompt {prompt.id!r} is no chat: set Classifier.sees = 'pair' or 'response'")
        return [*map(dict, prompt.messages), {"role": "assistant", "content": rollout.text}]
