"""Sums as chats with a tool: asked "47+85", the assistant calls a calculator, hears its result, and answers "132"."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxrl_llm import components
from jaxrl_llm.data.sums import Sums
from jaxrl_llm.experience import Prompt

CALCULATOR: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Calculates a+b, a-b or a*b.",
        "parameters": {
            "type": "object",
            "properties": {"of": {"type": "string", "description": "Two numbers and what is between them."}},
            "required": ["of"],
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class ChatSums:
    """Sums as messages, with the calculator's schema in `Prompt.extra["tools"]` and demonstrations in turns.

    Attributes:
      sums: the problems.
      called_share: share of the demonstrations that call the calculator; the others answer directly, with errors by `sums.noise`.
      call: how the model calls a tool, with {sum} for the problem.
      heard: what the chat template writes between a call and the next turn of the assistant, with {result} for the result.
    """

    sums: Sums = field(default_factory=Sums)
    called_share: float = 1.0
    call: str = '<tool_call>{{"name": "calc", "arguments": {{"of": "{sum}"}}}}</tool_call><eos>'
    heard: str = ">{result};:"

    def __post_init__(self) -> None:
        components.within(self, "[0, 1]", "called_share")

    def rows(self) -> Sequence[Prompt]:
        """Returns the sums' prompts; of every hundred, the first show a call, as many as `called_share` demands."""
        return [self._chat(p, i % 100 < 100 * self.called_share) for i, p in enumerate(self.sums.rows())]

    def _chat(self, prompt: Prompt, called: bool) -> Prompt:
        problem = (prompt.text or "").rstrip("=")
        extra: dict[str, Any] = {**prompt.extra, "tools": [CALCULATOR]}
        response = prompt.response
        if called:
            call = self.call.format(sum=problem)
            heard = self.heard.format(result=prompt.reference)
            extra["turns"] = [("policy", call), ("environment", heard), ("policy", prompt.reference)]
            response = call + prompt.reference
        messages = [{"role": "user", "content": problem}]
        return replace(prompt, text=None, messages=messages, response=response, extra=extra, source="chat_sums")
