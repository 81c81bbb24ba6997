"""A calculator as a tool in plain text: the policy writes [47+85], and the answer 132 is appended to the transcript."""

import operator
import re
from dataclasses import dataclass

from jaxrl_llm.experience import Action, Observation, Prompt, Task

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True, kw_only=True)
class Calculator:
    """Answers the call at the end of a turn, and ends the rollout where a turn does not end with a call.

    Attributes:
      most_digits: most digits of an operand that is answered.
      end: text that follows an answer, so that the policy knows where it ends.
      error: the answer to a call that cannot be read.
    """

    most_digits: int = 9
    end: str = ";"
    error: str = "?"

    def build(self, prompt: Prompt, sample: int, seed: int) -> "Calculating":
        """Returns the calculator of one rollout."""
        del prompt, sample, seed
        return Calculating(self)

    def answer(self, call: str) -> str:
        """Returns the value of "a+b", "a-b" or "a*b"; `error` for any other call."""
        digits = f"{{1,{self.most_digits}}}"
        found = re.fullmatch(rf"(\d{digits})([-+*])(\d{digits})", call)
        return str(OPERATORS[found[2]](int(found[1]), int(found[3]))) if found else self.error


@dataclass(frozen=True)
class Calculating:
    """A calculator in one rollout; it keeps no state between turns."""

    calculator: Calculator

    async def reset(self, task: Task) -> Observation:
        """Returns no message, since the task is the prompt."""
        del task
        return Observation()

    async def step(self, action: Action) -> Observation:
        """Answers the call at the end of the turn; without one the rollout ends."""
        text = action.text.rstrip()
        if not text.endswith("]") or "[" not in text:
            return Observation(done=True)
        answer = self.calculator.answer(text.rpartition("[")[2][:-1]) + self.calculator.end
        return Observation(messages=({"role": "tool", "content": answer},))

    async def close(self) -> None:
        """Does nothing, since no resource is held."""
