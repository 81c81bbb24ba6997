"""Language-model judge and monitor: asks a model a question about each response and parses its answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Literal

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.experience import Prompt, Rollout, Scores
from jaxrl_llm.rewards import answers
from jaxrl_llm.rewards.endpoint import Endpoint
from jaxrl_llm.rewards.judge_answers import PARSERS
from jaxrl_llm.rewards.judge_templates import TEMPLATES
from jaxrl_llm.rewards.wrap import Failed, PlainReward, judge_together


@dataclass(frozen=True, kw_only=True)
class Judge(PlainReward):
    """Asks an endpoint about each rollout. Where the judge fails or its answer cannot be read, the score is invalid, never 0.

    Attributes:
      endpoint: the model that is asked.
      template: the question, with {prompt}, {asked} (the user's own question), {judged}, {reference}, and the prompt's columns by
        their names; or a name in rewards/judge_templates.py, such as "sycophancy". Empty asks to rate the quality of a response or
        output from 1 to 10, and for a thought to predict the rating of its output.
      parser: name of the answer's parser in rewards/judge_answers.py.
      sees: what {judged} is: the whole "response", its "output" (after </think>), or its "thought" (between the tags).
      opened: whether the prompt has opened <think>, so that a response without </think> is all thought.
      absent: the score of a rollout without that part; None makes it invalid. The original Classmate-CoT gives 0.
      name: the part's name; "log/..." is logged and never summed, as for a monitor beside the reward.
    """

    endpoint: Endpoint
    template: str = ""
    parser: str = "rating"
    sees: Literal["response", "output", "thought"] = "response"
    opened: bool = False
    absent: float | None = None
    name: str = "judge"

    def __post_init__(self) -> None:
        components.one_of(self, PARSERS, "parser")
        components.choices(self)
        if "judged" not in fields(self._template):
            raise ValueError(
                f"Judge.template must have the field {{judged}} (other braces are doubled), or be one of {sorted(TEMPLATES)}"
            )

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns one part, float64 [G], as read by the parser."""
        del stats
        return await judge_together(self.name, [self._one(rollout) for rollout in rollouts], rollouts)

    async def _one(self, rollout: Rollout) -> float | None:
        judged = self.judged(rollout.text)
        if judged is None:
            return self.absent
        question = self.question(rollout.prompt, judged)
        try:
            return await self.endpoint.reply([{"role": "user", "content": question}], judged, PARSERS[self.parser])
        except ValueError as error:
            raise Failed(str(error)) from error

    def judged(self, text: str) -> str | None:
        """Returns the part of a response that the judge is given; None where it has no such part."""
        if self.sees == "response":
            return text
        thought, output = answers.thought(text, self.opened)
        if self.sees == "output":
            return output
        return None if output is None else thought.strip() or None

    def question(self, prompt: Prompt, judged: str) -> str:
        """Returns the filled template.

        Raises:
          ValueError: the prompt lacks a column that the template names.
        """
        asked = prompt.extra.get("raw_question_for_monitor") or prompt.question
        columns = {
            "asked": asked,
            **prompt.extra,
            "prompt": prompt.whole,
            "judged": judged,
            "reference": prompt.reference,
        }
        missing = fields(self._template) - set(columns)
        if missing:
            raise ValueError(f"Judge.template names {sorted(missing)}, which prompt {prompt.id!r} lacks in `extra`")
        return self._template.format(**columns)

    @property
    def _template(self) -> str:
        name = self.template or ("prediction" if self.sees == "thought" else "quality")
        return TEMPLATES.get(name, name)


def fields(template: str) -> set[str]:
    """Returns the names in braces of a template."""
    return {name for _, name, _, _ in Formatter().parse(template) if name is not None}
