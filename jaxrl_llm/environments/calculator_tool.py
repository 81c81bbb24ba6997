"""A calculator as a tool of a chat: the policy calls it by its schema, and the result is a message of the role "tool"."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.data.chat_sums import CALCULATOR
from jaxrl_llm.environments.calculator import Calculator
from jaxrl_llm.experience import Action, Observation, Prompt, Task, ToolCall


@dataclass(frozen=True, kw_only=True)
class CalculatorTool:
    """Answers calls of `calc`, and ends the rollout with a turn without calls.

    Attributes:
      most_digits: most digits of an operand that is answered.
      error: the answer to a call that cannot be read or calculated.
    """

    most_digits: int = 9
    error: str = "?"

    def build(self, prompt: Prompt, sample: int, seed: int) -> "CalculatingTool":
        """Returns the calculator of one rollout."""
        del prompt, sample, seed
        return CalculatingTool(Calculator(most_digits=self.most_digits, error=self.error))


@dataclass(frozen=True)
class CalculatingTool:
    """A calculator in one rollout; it keeps no state between turns."""

    calculator: Calculator

    def tools(self, prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        """Returns the calculator's schema."""
        del prompt
        return (CALCULATOR,)

    async def reset(self, task: Task) -> Observation:
        """Returns no message, since the task is the prompt."""
        del task
        return Observation()

    async def step(self, action: Action) -> Observation:
        """Answers the calls of the turn; without one the rollout ends."""
        answers = [
            {"role": "tool", "content": self._answer(call), "tool_call_id": call.id, "name": "calc"}
            for call in action.calls
        ]
        return Observation(messages=answers, done=not answers)

    def _answer(self, call: ToolCall) -> str:
        asked = (call.arguments or {}).get("of") if call.status == "ok" else None
        return self.calculator.answer(asked) if isinstance(asked, str) else self.calculator.error

    async def close(self) -> None:
        """Does nothing, since no resource is held."""
