"""Blocking environments in threads of their own, so that they never block the run."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

from jaxrl_llm import components
from jaxrl_llm.experience import Action, Observation, Prompt, Task
from jaxrl_llm.rewards.blocking import Workers


@runtime_checkable
class BlockingEnvironment(Protocol):
    """An environment whose methods are plain functions, which may block."""

    def reset(self, task: Task) -> Observation: ...

    def step(self, action: Action) -> Observation: ...

    def close(self) -> None: ...


@runtime_checkable
class BlockingFactory(Protocol):
    """Makes a blocking environment for each rollout."""

    def build(self, prompt: Prompt, sample: int, seed: int) -> BlockingEnvironment: ...


@dataclass(frozen=True, kw_only=True)
class Threaded:
    """Runs the environments of a factory, whose methods are plain functions, in a bounded number of threads.

    A call that a time limit has given up keeps its thread until it returns; its environment is closed after that.

    Attributes:
      environment: the factory; its `build` runs in a thread too, before the first reset.
      workers: most calls at a time.
    """

    environment: BlockingFactory
    workers: int = 8

    def __post_init__(self) -> None:
        components.at_least(self, 1, "workers")

    def build(self, prompt: Prompt, sample: int, seed: int) -> "InThread":
        """Returns the environment of one rollout, which its first call makes."""
        return InThread(lambda: self.environment.build(prompt, sample, seed), self._workers)

    @cached_property
    def _workers(self) -> Workers:
        return Workers(self.workers, "environment")


class InThread:
    """An environment whose calls run in threads, one at a time."""

    def __init__(self, make: Callable[[], BlockingEnvironment], workers: Workers) -> None:
        self._make, self._workers = make, workers
        self._one_at_a_time = threading.Lock()
        self._environment: BlockingEnvironment | None = None

    async def reset(self, task: Task) -> Observation:
        """Makes the environment, and begins its episode."""

        def begin() -> Observation:
            with self._one_at_a_time:
                self._environment = self._make()
                return self._environment.reset(task)

        found: Observation = await self._workers.run(begin)
        return found

    async def step(self, action: Action) -> Observation:
        """Answers one turn of the policy."""

        def answer() -> Observation:
            with self._one_at_a_time:
                assert self._environment is not None, "step before reset"
                return self._environment.step(action)

        found: Observation = await self._workers.run(answer)
        return found

    async def close(self) -> None:
        """Closes the environment after the call in progress, where there is one."""

        def end() -> None:
            with self._one_at_a_time:
                if self._environment is not None:
                    self._environment.close()

        await self._workers.run(end)
