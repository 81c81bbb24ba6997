"""Tracks the progress of a step: tells the watchdog which part of the step runs, and counts the seconds of each part."""

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

from jaxrl_llm.distributed.mesh import TURN
from jaxrl_llm.metrics.watchdog import Watching


class Progress:
    """The watchdog's record of a run, and the seconds between the laps of a step.

    Args:
      watching: receives what the run is doing.
    """

    def __init__(self, watching: Watching) -> None:
        self.watching = watching
        self.begin()

    def begin(self) -> None:
        """Resets the laps at the beginning of a step."""
        self.laps: dict[str, float] = {}
        self._began = self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Adds the seconds since the last lap to `name`."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each lap, and of the "step" so far."""
        return {**self.laps, "step": time.perf_counter() - self._began}


def _in_turn(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with TURN:
        return method(*arguments, **named)


def part(doing: str, lap: str) -> Callable[[Callable[..., Any]], Callable[..., Awaitable[Any]]]:
    """Wraps a method that is part of a step: it is awaited, the watchdog is told what it does, and its seconds count as `lap`.

    The owner has a `progress`, and `overlaps`: where that is True, a method that is not a coroutine runs in a thread, since the
    sampler needs the event loop while the learner computes.
    """

    def wrap(method: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(method)
        async def run(owner: Any, *arguments: Any, **named: Any) -> Any:
            owner.progress.watching.at(doing)
            if inspect.iscoroutinefunction(method):
                found = await method(owner, *arguments, **named)
            elif owner.overlaps:
                found = await asyncio.to_thread(_in_turn, method, owner, *arguments, **named)
            else:
                found = method(owner, *arguments, **named)
            owner.progress.lap(lap)
            return found

        return run

    return wrap
