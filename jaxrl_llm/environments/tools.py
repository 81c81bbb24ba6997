"""Tools that a policy calls in its turns: each turn's calls are answered, and a turn without a call ends the rollout.

A tool is a component. Its state for one rollout, such as an interpreter, is made at the first call and closed with the rollout. A
call that cannot be read, of an unknown tool or with wrong arguments is the policy's mistake: the answer says what was wrong, and the
rollout goes on. An error of the tool itself makes the rollout invalid.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jaxrl_llm.experience import Action, Observation, Prompt, Task, ToolCall


class Mistake(ValueError):
    """An error of the policy in a call; its text is the answer."""


class Failed(Mistake):
    """A call that was made and came to nothing, such as code that raised an exception; its text is the answer."""


@runtime_checkable
class InUse(Protocol):
    """A tool in one rollout."""

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Returns the answer to a call; raises Mistake for arguments that the tool cannot take."""
        ...

    async def close(self) -> None:
        """Releases what the rollout held of the tool."""
        ...


@runtime_checkable
class Tool(Protocol):
    """A tool, as a component."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """The tool's function in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}."""
        ...

    def use(self, prompt: Prompt, seed: int) -> InUse:
        """Returns the tool for one rollout, without waiting for anything."""
        ...


def function(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """Returns the schema of a tool whose arguments are texts, all of them required; `parameters` is {name: description}."""
    properties = {n: {"type": "string", "description": text} for n, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def text_argument(arguments: Mapping[str, Any], name: str) -> str:
    """Returns the text that a call gives as `name`; raises Mistake where it gives none."""
    value = arguments.get(name)
    if not isinstance(value, str):
        raise Mistake(f"error: the argument {name!r} is needed, a text (got {sorted(arguments)})")
    return value


@dataclass(frozen=True, kw_only=True)
class Tools:
    """Makes the environment in which a rollout may call `tools`.

    Attributes:
      tools: the tools that may be called; each has a name of its own.
      max_calls: most calls of one turn that are answered; the answer to further ones says so.
    """

    tools: Sequence[Tool]
    max_calls: int = 8

    def __post_init__(self) -> None:
        names = [_name(tool) for tool in self.tools]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"Tools.tools needs at least one tool, each with a name of its own (got {names})")

    def build(self, prompt: Prompt, sample: int, seed: int) -> "Episode":
        """Returns the environment of one rollout."""
        del sample
        return Episode(factory=self, prompt=prompt, seed=seed)


def _name(tool: Tool) -> str:
    return str(tool.schema["function"]["name"])


@dataclass(eq=False, kw_only=True)
class Episode:
    """The tools of one rollout.

    Attributes:
      counts: numbers of calls by outcome: "ok", "failed", "mistake", and the statuses of calls that could not be read.
    """

    factory: Tools
    prompt: Prompt
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    _used: dict[str, InUse] = field(default_factory=dict)

    def tools(self, prompt: Prompt) -> list[Mapping[str, Any]]:
        """Returns the schemas of all tools."""
        del prompt
        return [tool.schema for tool in self.factory.tools]

    async def reset(self, task: Task) -> Observation:
        """Returns no message, since the task is the prompt."""
        del task
        return Observation()

    async def step(self, action: Action) -> Observation:
        """Answers each call of a turn, in their order; a turn without a call ends the rollout."""
        messages = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": await self._answer(call, place)}
            for place, call in enumerate(action.calls)
        ]
        info = {f"calls/{name}": count for name, count in self.counts.items()}
        return Observation(messages=messages, done=not messages, info=info)

    async def close(self) -> None:
        """Closes every tool that was used."""
        used, self._used = list(self._used.values()), {}
        for tool in used:
            await tool.close()

    async def _answer(self, call: ToolCall, place: int) -> str:
        kept = {_name(tool): tool for tool in self.factory.tools}
        if call.status == "ok" and call.name not in kept:
            call = ToolCall(id=call.id, name=call.name, arguments=None, raw=call.raw, status="unknown_tool")
        if call.status != "ok" or call.arguments is None:
            self.counts[call.status] += 1
            return _refusal(call, sorted(kept))
        if place >= self.factory.max_calls:
            self.counts["mistake"] += 1
            return f"error: at most {self.factory.max_calls} calls of one turn are answered"
        if call.name not in self._used:
            self._used[call.name] = kept[call.name].use(self.prompt, self.seed)
        try:
            answer = await self._used[call.name].call(call.arguments)
        except Mistake as mistake:
            self.counts["failed" if isinstance(mistake, Failed) else "mistake"] += 1
            return str(mistake)
        self.counts["ok"] += 1
        return answer


def _refusal(call: ToolCall, names: Sequence[str]) -> str:
    """Returns the answer to a call that cannot be made."""
    if call.status == "unknown_tool":
        return f"error: there is no tool {call.name!r}; there are {', '.join(names)}"
    if call.status == "unclosed":
        return "error: the call was not closed, so it was not made"
    return 'error: the call is no JSON object with "name" and "arguments", so it was not made'
