"""Sums that a calculator solves: "47+85=" -> call [47+85], hear 132;, answer 132."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jaxrl_llm import components
from jaxrl_llm.data.sums import Sums
from jaxrl_llm.experience import Prompt


@dataclass(frozen=True, kw_only=True)
class ToolSums:
    """Sums with demonstrations in turns; what the calculator says is not the policy's to learn.

    Attributes:
      sums: the problems.
      called_share: share of the demonstrations that call the calculator; the others answer at once, with `sums.noise`.
      end: what follows the calculator's answer.
    """

    sums: Sums = field(default_factory=Sums)
    called_share: float = 1.0
    end: str = ";"

    def __post_init__(self) -> None:
        components.within(self, "[0, 1]", "called_share")

    def rows(self) -> Sequence[Prompt]:
        """The sums' prompts; the first of every hundred up to `called_share` show a call."""
        return [self._called(p) if i % 100 < 100 * self.called_share else p for i, p in enumerate(self.sums.rows())]

    def _called(self, prompt: Prompt) -> Prompt:
        call = f"[{(prompt.text or '').rstrip('=')}]"
        turns = [("policy", call), ("environment", prompt.reference + self.end), ("policy", prompt.reference)]
        return replace(
            prompt, response=call + prompt.reference, extra={**prompt.extra, "turns": turns}, source="tool_sums"
        )
