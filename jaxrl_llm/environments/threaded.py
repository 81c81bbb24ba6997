"""Blocking environments in threads of their own, so that they never block the run."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from jaxrl_llm import components
from jaxrl_llm.experience import Action, Observation, Prompt, Task


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
    def _workers(self) -> "Workers":
        return Workers(self.workers)


class Workers:
    """Runs functions in daemon threads, at most `most` at a time; the end of the process waits for none of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def run(self, function: Callable[[], Any]) -> Any:
        """Returns what `function` returns; where the caller is cancelled, the function goes on and keeps its thread until it returns."""
        loop = asyncio.get_running_loop()
        if self._free is None or self._free[0] is not loop:
            self._free = loop, asyncio.Semaphore(self._most)
        free = self._free[1]
        await free.acquire()
        result: asyncio.Future[Any] = loop.create_future()

        def ended(value: Any, error: BaseException | None) -> None:
            free.release()
            if not result.done():
                result.set_result(value) if error is None else result.set_exception(error)

        def work() -> None:
            value, failed = None, None
            try:
                value = function()
            except BaseException as error:  # it is raised again where the call is awaited
                failed = RuntimeError(f"StopIteration: {error}") if isinstance(error, StopIteration) else error
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(ended, value, failed)

        threading.Thread(target=work, name="environment", daemon=True).start()
        return await result


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
