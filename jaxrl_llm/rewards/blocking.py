"""Functions that block, of a reward or an environment, in threads, so that they never hold up the event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any


class Workers:
    """Runs functions in daemon threads, at most `most` at a time, in the order of the calls; a process that ends waits for none of them."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
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
            except BaseException as error:  # it is raised where the call is awaited
                failed = RuntimeError(f"StopIteration: {error}") if isinstance(error, StopIteration) else error
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(ended, value, failed)

        threading.Thread(target=work, name=self._name, daemon=True).start()
        return await result
