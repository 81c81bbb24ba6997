"""Decides which rollouts are in progress: a bounded number, each replaced by the next one as soon as it ends.

No rollout waits for a group, for a batch or for another rollout's turn. The oldest prompt comes first, so that groups become complete.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

from jaxrl_llm.experience import Rollout

Play = Callable[[int, int], Awaitable[Rollout]]  # (number of the prompt, number of the rollout in its group)


@dataclass(kw_only=True, eq=False)
class Slots:
    """Bounds the rollouts in progress, for all callers together.

    Attributes:
      concurrency: most rollouts in progress.
      extra: rollouts that are started for each group beyond its size; the first valid ones that end are used, which favours short ones.
      counters: numbers of rollouts that `extra` left unused.
    """

    concurrency: int
    extra: int = 0
    counters: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.concurrency)

    async def groups(
        self, count: int, n: int, play: Play, *, plain: bool = False
    ) -> AsyncGenerator[tuple[int, list[Rollout]], None]:
        """Yields (number of the prompt, its n rollouts in their order) as groups become complete; what still runs at its end is cancelled.

        `plain` starts no extra rollouts.
        """
        members = n if plain else n + self.extra
        ended: asyncio.Queue[tuple[int, int, asyncio.Task[Rollout]]] = asyncio.Queue()
        groups = [self._start(i, members, play, ended) for i in range(count)]
        had: dict[int, dict[int, Rollout]] = {i: {} for i in range(count)}
        try:
            while had:
                i, k, task = await ended.get()
                if i not in had:  # the group is complete without this one
                    continue
                had[i][k] = task.result()
                if (used := _whole(had[i], n, members)) is not None:
                    left = [task for k, task in enumerate(groups[i]) if k not in used]
                    self.counters["extra/unused"] += len(left)
                    for task in left:
                        task.cancel()
                    del had[i]
                    yield i, list(used.values())
        finally:
            tasks = [task for group in groups for task in group]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(
        self, i: int, members: int, play: Play, ended: asyncio.Queue[tuple[int, int, asyncio.Task[Rollout]]]
    ) -> list[asyncio.Task[Rollout]]:
        """Starts the rollouts of a group, which wait for a slot in the order in which they were started."""
        tasks = [asyncio.create_task(self._slotted(i, k, play)) for k in range(members)]
        for k, task in enumerate(tasks):
            task.add_done_callback(lambda task, k=k: ended.put_nowait((i, k, task)))  # type: ignore[misc]
        return tasks

    async def _slotted(self, i: int, k: int, play: Play) -> Rollout:
        async with self._free:
            return await play(i, k)


def _whole(had: dict[int, Rollout], n: int, members: int) -> dict[int, Rollout] | None:
    """Returns the n rollouts of a complete group by number: the valid ones that ended first, then failed ones; else None."""
    valid = [k for k, rollout in had.items() if rollout.valid]
    if len(valid) < n and len(had) < members:
        return None
    used = [*valid, *(k for k in had if k not in valid)][:n]
    return {k: had[k] for k in sorted(used)}
