"""Tools that are not there: a call is answered by the result that a recorded dialogue has for it (data/tool_dialogues.py)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm import components
from jaxrl_llm.experience import Action, Observation, Prompt, Task, ToolCall


@dataclass(frozen=True, kw_only=True)
class ReplayedTools:
    """Plays the rest of a recorded dialogue, `Prompt.extra["recorded"]`, with the tools of `Prompt.extra["tools"]`.

    A call with the name and the arguments of a recorded one, as parsed, gets the recorded result; any other is answered with `unrecorded`, and counted. A turn
    without a call is followed by what the user said next in the recording, whatever the policy said, and ends the rollout after the last call.

    The reward `calls` is the number of recorded calls that were made, each once, divided by all calls that were recorded or made: 1 where the
    recorded calls were made and no others.

    Attributes:
      unrecorded: the answer to a call that the recording does not have.
      most_calls: most calls of one turn that are answered; further ones are told so.
    """

    unrecorded: str = "error: there is no result for this call"
    most_calls: int = 8

    def __post_init__(self) -> None:
        components.at_least(self, 1, "most_calls")

    def build(self, prompt: Prompt, sample: int, seed: int) -> "Episode":
        """The recording of one rollout; raises ValueError where the row has none."""
        del sample, seed
        recorded = prompt.extra.get("recorded")
        if not isinstance(recorded, list | tuple) or not any("name" in step for step in recorded):
            raise ValueError(
                f"the row {prompt.id!r} has no recorded calls in Prompt.extra['recorded']: DATA is tool_dialogues.ToolDialogues, or gives that"
            )
        return Episode(self, recorded)


class Episode:
    """A recording in one rollout."""

    def __init__(self, config: ReplayedTools, recorded: Sequence[Mapping[str, Any]]) -> None:
        self._config = config
        self._calls = [step for step in recorded if "name" in step]
        self._replies = [str(step["user"]) for step in recorded if "user" in step]
        self._made = set[int]()  # numbers of the recorded calls that were made
        self._counts = Counter[str]()

    async def reset(self, task: Task) -> Observation:
        """Adds nothing to the task's messages."""
        del task
        return Observation()

    async def step(self, action: Action) -> Observation:
        """Answers each call of a turn; after a turn without one the user says what was recorded, or the rollout is done."""
        messages = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": self._answer(call, place)}
            for place, call in enumerate(action.calls)
        ]
        if not messages and self._replies:
            messages = [{"role": "user", "content": self._replies.pop(0)}]
        return Observation(messages=messages, done=not messages, info=self._info())

    async def score(self) -> Mapping[str, float]:
        """The reward `calls`."""
        others = sum(self._counts.values()) - len(self._made)
        return {"calls": len(self._made) / (len(self._calls) + others)}

    async def close(self) -> None:
        """Nothing is held."""

    def _answer(self, call: ToolCall, place: int) -> str:
        """What a call is answered; it is counted as "ok", "repeated", "unrecorded", "mistake" or by why it could not be read."""
        if call.status != "ok" or call.arguments is None:
            self._counts[call.status] += 1
            return f"error: the call was not made ({call.status})"
        if place >= self._config.most_calls:
            self._counts["mistake"] += 1
            return f"error: at most {self._config.most_calls} calls of one turn are answered"
        equal = [
            i for i, one in enumerate(self._calls) if (one["name"], one["arguments"]) == (call.name, call.arguments)
        ]
        if not equal:
            self._counts["unrecorded"] += 1
            return self._config.unrecorded
        chosen = next((i for i in equal if i not in self._made), None)
        self._counts["repeated" if chosen is None else "ok"] += 1
        self._made.add(equal[-1] if chosen is None else chosen)
        return str(self._calls[equal[-1] if chosen is None else chosen]["result"])

    def _info(self) -> dict[str, Any]:
        return {f"calls/{name}": count for name, count in self._counts.items()}
