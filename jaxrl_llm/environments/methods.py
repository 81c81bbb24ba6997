"""Classes in the form of TRL's environment_factory: their public methods are tools, and the object returns the reward of an episode."""

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxrl_llm import components
from jaxrl_llm.experience import Action, Observation, Prompt, Task, ToolCall
from jaxrl_llm.rewards import found_function
from jaxrl_llm.rewards.blocking import Workers
from jaxrl_llm.rewards.function import asked, columns_of, number

OWN = ("reset", "get_reward")


@dataclass(frozen=True, kw_only=True)
class Methods:
    """Makes an object of a class for each rollout, and lets the policy call its methods.

    `reset(**row)` gets those of the row's columns that it takes, "prompt" and "reference" among them; a text that it returns is
    appended to the last message of the prompt. Every other public method is a tool, whose schema is read from its type hints and its
    docstring in Google's style. The policy reads the error that a method raises. `get_reward()`, where there is one, returns the
    reward, which has the class's name; None is unscored. Async methods run on the event loop, others in threads.

    Attributes:
      factory: a class or another callable without arguments, "path/to/file.py:Class" or "package.module:Class".
      workers: most threads at a time.
    """

    factory: Callable[..., Any] | str = field(compare=False)
    workers: int = 32
    content: str = field(init=False, repr=False, default="")
    _found: Callable[..., Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        components.at_least(self, 1, "workers")
        found = found_function.load(self.factory, "Methods.factory")
        if inspect.isclass(found) and not callable(getattr(found, "reset", None)):
            raise ValueError(f"Methods.factory: {found.__name__} has no method `reset`")
        object.__setattr__(self, "_found", found)
        object.__setattr__(self, "content", found_function.content(found))

    def build(self, prompt: Prompt, sample: int, seed: int) -> "Episode":
        """Returns the environment of one rollout, whose first call makes the object."""
        del sample, seed
        return Episode(self._found, self._threads, prompt)

    @cached_property
    def _threads(self) -> Workers:
        return Workers(self.workers, "environment")


class Episode:
    """The object of one rollout."""

    def __init__(self, make: Callable[[], Any], threads: Workers, prompt: Prompt) -> None:
        self._make, self._threads, self._prompt = make, threads, prompt
        self._one_at_a_time = threading.Lock()
        self._object: Any = None
        self.failed = 0

    async def tools(self, prompt: Prompt) -> list[Mapping[str, Any]]:
        """Returns the schemas of the methods; raises transformers' error for a method without type hints or docstring."""
        del prompt
        from transformers.utils import get_json_schema

        kept = methods_of(await self._made())
        found: list[Mapping[str, Any]] = await self._threads.run(lambda: [get_json_schema(m) for m in kept.values()])
        return found

    async def reset(self, task: Task) -> Observation:
        """Begins the episode; raises TypeError where `reset` returns something other than a text or None."""
        del task
        reset = (await self._made()).reset
        row = {**columns_of(self._prompt), "prompt": asked(self._prompt)}
        taken = inspect.signature(reset).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            row = {name: value for name, value in row.items() if name in taken}
        said = await self._called(reset, row)
        if not isinstance(said, str | None):
            raise TypeError(f"reset returns a text or None (got {type(said).__name__})")
        return Observation(appended=said or "")

    async def step(self, action: Action) -> Observation:
        """Answers the calls of a turn in their order; a turn without a call ends the rollout."""
        kept = methods_of(await self._made())
        messages = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": await self._answer(call, kept)}
            for call in action.calls
        ]
        return Observation(messages=messages, done=not messages, info={"failed_calls": self.failed})

    async def score(self) -> dict[str, float | None]:
        """Returns the reward of the object, by its class's name; {} where it gives none."""
        made = await self._made()
        reward = getattr(made, "get_reward", None)
        return {} if reward is None else {type(made).__name__: number(await self._called(reward, {}))}

    async def close(self) -> None:
        """Drops the object, since no other resource is held."""
        self._object = None

    async def _made(self) -> Any:
        if self._object is None:
            self._object = await self._threads.run(self._make)
        return self._object

    async def _called(self, method: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(**given)

        def work() -> Any:
            with self._one_at_a_time:
                return method(**given)

        return await self._threads.run(work)

    async def _answer(self, call: ToolCall, kept: Mapping[str, Callable[..., Any]]) -> str:
        if call.name in kept and call.arguments is not None and call.status == "ok":
            try:
                return str(await self._called(kept[call.name], call.arguments))
            except Exception as error:  # as TRL does: the policy reads what a tool raises, and training goes on
                self.failed += 1
                return f"error: {type(error).__name__}: {error}"
        self.failed += 1
        if call.status in ("bad_json", "unclosed"):
            return f"error: the call could not be read ({call.status}), so it was not made"
        return f"error: there is no tool {call.name!r}; there are {', '.join(kept)}"


def methods_of(made: Any) -> dict[str, Callable[..., Any]]:
    """Returns the public methods of an object's class, but for OWN, as {name: method}."""
    named = inspect.getmembers(type(made), predicate=inspect.isfunction)
    return {name: getattr(made, name) for name, _ in named if not name.startswith("_") and name not in OWN}
