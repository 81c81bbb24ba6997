"""Sums that a calculator solves: after "47+85=" the policy writes "[47+85]", the calculator "132;", and the policy "132"."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jaxrl_llm import components
from jaxrl_llm.data.sums import Sums
from jaxrl_llm.experience import Prompt


@dataclass(frozen=True, kw_only=True)
class ToolSums:
    """Sums with demonstrations in turns; the policy does not learn from the calculator's turns.

    Attributes:
      sums: the problems.
      called_share: share of the demonstrations that call the calculator; the others answer directly, with errors by `sums.noise`.
      end: text that follows the calculator's result.
    """

    sums: Sums = field(default_factory=Sums)
    called_share: float = 1.0
    end: str = ";"

    def __post_init__(self) -> None:
        components.within(self, "[0, 1]", "called_share")

    def rows(self) -> Sequence[Prompt]:
        """Returns the sums' prompts; of every hundred, the first show a call, as many as `called_share` demands."""
        return [self._called(p) if i % 100 < 100 * self.called_share else p for i, p in enumerate(self.sums.rows())]

    def _called(self, prompt: Prompt) -> Prompt:
        call = f"[{(prompt.text or '').rstrip('=')}]"
        turns = [("policy", call), ("environment", prompt.reference + self.end), ("policy", prompt.reference)]
        return replace(
            prompt, response=call + prompt.reference, extra={**prompt.extra, "turns": turns}, source="tool_sums"
        )
