"""The parts of a step: the watchdog hears which one a run is in, and the seconds of each are counted."""

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

from jaxrl_llm.metrics.watchdog import Watching


class Progress:
    """Where a run is, and the seconds between the laps of a step.

    Args:
      watching: hears what the run does.
    """

    def __init__(self, watching: Watching) -> None:
        self.watching = watching
        self.begin()

    def begin(self) -> None:
        """Starts the laps of a step anew."""
        self.laps: dict[str, float] = {}
        self._began = self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Adds the seconds since the last lap to `name`."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each lap, and of the "step" so far."""
        return {**self.laps, "step": time.perf_counter() - self._began}


def part(doing: str, lap: str) -> Callable[[Callable[..., Any]], Callable[..., Awaitable[Any]]]:
    """Wraps a method that is part of a step: it is awaited, the watchdog hears what it does, and its seconds count as `lap`.

    The owner has a `progress`, and `overlaps`: where that is True a method that is no coroutine runs in a thread, since the sampler
    needs the event loop while the learner computes.
    """

    def wrap(method: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(method)
        async def run(owner: Any, *arguments: Any, **named: Any) -> Any:
            owner.progress.watching.at(doing)
            if inspect.iscoroutinefunction(method):
                found = await method(owner, *arguments, **named)
            elif owner.overlaps:
                found = await asyncio.to_thread(method, owner, *arguments, **named)
            else:
                found = method(owner, *arguments, **named)
            owner.progress.lap(lap)
            return found

        return run

    return wrap
