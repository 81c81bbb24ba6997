"""A function as an agent: it gets the task and the policy's endpoint, and returns its rewards."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxrl_llm import components
from jaxrl_llm.environments.command import numbers
from jaxrl_llm.experience import Ending, Prompt, Task
from jaxrl_llm.protocols import Endpoint
from jaxrl_llm.rewards import found_function
from jaxrl_llm.rewards.blocking import Workers


@dataclass(frozen=True, kw_only=True)
class Coroutine:
    """Lets a function (task, endpoint) play each rollout: an async one on the run's event loop, a plain one in a thread.

    It returns an `Ending`, {name: reward or None}, a number, which is the reward "reward", or None for no rewards. A thread whose
    rollout a limit has ended runs on until the function returns, and counts among `workers`; its calls of the policy are refused.

    Attributes:
      function: a callable, "path/to/file.py:name" or "package.module:name".
      workers: most threads at a time.
    """

    function: Callable[..., Any] | str = field(compare=False)
    workers: int = 64
    content: str = field(init=False, repr=False, default="")
    _found: Callable[..., Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        components.at_least(self, 1, "workers")
        found = found_function.load(self.function, "Coroutine.function")
        object.__setattr__(self, "_found", found)
        object.__setattr__(self, "content", found_function.content(found))

    def build(self, prompt: Prompt, sample: int, seed: int) -> "Played":
        """Returns the agent of one rollout."""
        del prompt, sample, seed
        return Played(self._found, self._workers)

    @cached_property
    def _workers(self) -> Workers:
        return Workers(self.workers, "agent")


@dataclass(frozen=True)
class Played:
    """The function as the agent of one rollout."""

    function: Callable[..., Any]
    workers: Workers

    async def run(self, task: Task, endpoint: Endpoint) -> Ending:
        """Calls the function; raises what it raises, and ValueError for a return value that is no ending and no rewards."""
        if inspect.iscoroutinefunction(self.function):
            found = await self.function(task, endpoint)
        else:
            found = await self.workers.run(lambda: self.function(task, endpoint))
            found = await found if inspect.isawaitable(found) else found
        if isinstance(found, Ending):
            return found
        if found is None or isinstance(found, Mapping):
            return Ending(rewards=numbers(found or {}))
        return Ending(rewards=numbers({"reward": found}))
