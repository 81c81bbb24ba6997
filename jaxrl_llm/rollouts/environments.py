"""Environments: a calculator as a tool, where the policy writes [47+85] and 132 is put into the transcript after it."""

import operator
import re
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.experience import Rollout

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

    def step(self, rollout: Rollout, state: Any) -> tuple[str | None, Any]:
        """Returns the answer to the last call, or None where the last turn has none, and the number of calls so far."""
        calls = int(state or 0)
        if not rollout.text.rstrip().endswith("]") or "[" not in rollout.text:
            return None, calls
        return self.answer(rollout.text.rstrip().rpartition("[")[2][:-1]) + self.end, calls + 1

    def answer(self, call: str) -> str:
        """The value of "a+b", "a-b" or "a*b"; `error` for any other call."""
        digits = f"{{1,{self.most_digits}}}"
        found = re.fullmatch(rf"(\d{digits})([-+*])(\d{digits})", call)
        return str(OPERATORS[found[2]](int(found[1]), int(found[3]))) if found else self.error
