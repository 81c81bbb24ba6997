"""Group loading on several processes: rows are split over them and read in one global order, or process 0 samples for all."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from jaxrl_llm.data.pipeline import PromptStream
from jaxrl_llm.distributed.preemption import Preemption, Stopping
from jaxrl_llm.distributed.processes import Processes
from jaxrl_llm.experience import Group, Prompt
from jaxrl_llm.protocols import GroupLoader

Row = TypeVar("Row", Prompt, Group)


class SharedStream(PromptStream[Row]):
    """Encoded rows in one global order, of which each process of a run holds a part; all processes read the same batches.

    A batch is the same on any number of processes, since the processes exchange the rows of it that each of them holds.

    Args:
      part: this process's rows; the parts of all processes, one after the other, are the rows.
      processes: the processes of the run.
      seed: seed of the order.

    Raises:
      ValueError: no process has a row.
    """

    def __init__(self, part: Sequence[Row], processes: Processes, *, seed: int) -> None:
        self._part: Sequence[Row] = part
        self._processes = processes
        self._starts = np.cumsum([0, *processes.gathered(len(part))]).tolist()
        super().__init__(range(self._starts[-1]), seed=seed)  # type: ignore[arg-type]

    def numbered(self, numbers: Sequence[int]) -> list[Row]:
        """Returns the rows of these numbers, all of them on every process."""
        first, end = self._starts[self._processes.index : self._processes.index + 2]
        held = [[i, self._part[i - first]] for i in numbers if first <= i < end]
        found = {i: row for part in self._processes.gathered(held) for i, row in part}
        return [found[i] for i in numbers]


@dataclass(frozen=True, kw_only=True, eq=False)
class BroadcastGroups:
    """A group loader that gives every process the groups of process 0, which alone calls the sampler.

    Attributes:
      loader: the group loader of process 0; None on the others.
      preemption: listens for signals, at which process 0 gives up what it is sampling.
    """

    loader: GroupLoader | None
    preemption: Preemption

    async def next(self, step: int) -> list[Group]:
        """Returns the groups of a step; raises Stopping on every process where a signal came first."""
        groups: list[Group] | None = None
        if self.loader is not None:
            with contextlib.suppress(Stopping):
                groups = await self.preemption.unless(self.loader.next(step))
        # A thread waits here, so that the event loop is free for publishing and sampling.
        groups = await asyncio.to_thread(self.preemption.processes.broadcast, groups)
        if groups is None:
            raise Stopping
        return groups

    def state(self) -> dict[str, Any]:
        return {} if self.loader is None else self.loader.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        if self.loader is not None:
            self.loader.restore(state)

    def take(self) -> dict[str, float]:
        return {} if self.loader is None else self.loader.take()
