"""Decides how many samplers a learner should have, by how long it waits for them; a command of the launcher starts and stops them.

In a step of T seconds with n samplers, the learner waited w T for samples, and the samplers worked for b T. So the learner's own work
takes (1 - w) T, and one sampler alone would need n b T.

- More: where w is above `high`, as many as make the samplers' part as short as the learner's own, n b / (1 - w), at most twice as many at a time.
- Fewer: where w is below `low`, as few as leave the samplers' part `slack` shorter than the learner's own, n b / ((1 - w) (1 - slack)),
where those are
  fewer by half of `slack` at least; by halves at most.
- Else, and within `steps` steps after a change, as many as now.

The gap between the two keeps a change from being reversed: after fewer, the samplers' part is shorter than the learner's by `slack`, so
the learner does not wait; after more, the learner's own part is as long as the samplers', so none is idle.
"""

import asyncio
import logging
import math
import shlex
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxrl_llm import components, serving

_log = logging.getLogger(__name__)
_TEXT = 400  # characters of a failed command's output that are logged


class Load(NamedTuple):
    """One step, as parts of its time: in which the learner waited for samples, and in which samplers had requests."""

    waiting: float
    busy: float


@dataclass(frozen=True, kw_only=True)
class Autoscale:
    """Has the launcher start or stop samplers during a run; `Discovery` finds those that come and go.

    Attributes:
      command: command that sets the number of samplers to {samplers}, such as "launch/gke.sh scale {samplers}", run without a shell in
        the folder of the launch; empty for a fleet that does not change.
      least: fewest samplers.
      most: most samplers.
      low: part of a step waiting for samples, below which there may be fewer samplers.
      high: part of a step waiting for samples, above which there should be more samplers.
      slack: part of the learner's own time for which samplers are to stay idle after a reduction.
      steps: steps over which the parts are averaged; so many pass after a change before the next one.
      start_s: most seconds for requested samplers to serve, before the command runs again.
      command_s: most seconds of the command.
    """

    command: str = ""
    least: int = 1
    most: int = 8
    low: float = 0.05
    high: float = 0.2
    slack: float = 0.2
    steps: int = 4
    start_s: float = 900.0
    command_s: float = 300.0

    def __post_init__(self) -> None:
        components.above(self, 0, "least", "steps", "start_s", "command_s")
        if self.least > self.most:
            raise ValueError(f"Autoscale.least must be at most `most` (got {self.least} and {self.most})")
        if not 0 <= self.low < self.high < 1 or not 0 < self.slack < 1:
            raise ValueError(
                f"Autoscale needs 0 <= low < high < 1 and slack in (0, 1) (got {self.low}, {self.high} and {self.slack})"
            )
        if self.command and "{samplers}" not in self.command:
            raise ValueError(
                f"Autoscale.command must say where the number of samplers goes, by {{samplers}} (got {self.command!r})"
            )

    def __bool__(self) -> bool:
        return bool(self.command)

    def wanted(self, now: int, loads: Sequence[Load]) -> int:
        """Returns the number of samplers that there should be, `least` to `most`.

        Args:
          now: number of samplers that serve.
          loads: the steps since the last change.
        """
        kept = min(max(now, self.least), self.most)
        if len(loads) < self.steps or kept != now:
            return kept
        recent = loads[-self.steps :]
        waiting = sum(load.waiting for load in recent) / self.steps
        busy = sum(load.busy for load in recent) / self.steps
        own = max(1 - waiting, 1e-9)
        if waiting > self.high:
            return min(max(math.ceil(now * busy / own), now + 1), 2 * now, self.most)
        if waiting < self.low:
            enough = math.ceil(now * busy / (own * (1 - self.slack)))
            return max(enough, -(-now // 2), self.least) if enough <= (1 - self.slack / 2) * now else now
        return now


@dataclass(eq=False, kw_only=True)
class Scaler:
    """Runs the launcher's command where the rule's number of samplers differs from those that serve.

    Attributes:
      rule: the rule of the number of samplers, and the command.
      counters: the fleet's counters, with the numbers of changes and of commands that failed.
      wanted: number of samplers last requested; 0 before the first change.
    """

    rule: Autoscale
    counters: Counter[str]
    wanted: int = 0
    _loads: deque[Load] = field(default_factory=deque, init=False)
    _asked_at: float = field(default=0.0, init=False)
    _running: asyncio.Task[None] | None = field(default=None, init=False)

    def step(self, serving_now: int, load: Load, clock_s: float) -> None:
        """Records a step with the number of samplers that served, and requests another number where the rule gives one.

        It first waits for requested samplers, since steps before they serve do not reflect them; `clock_s` is time.monotonic.
        """
        if self._running is not None and not self._running.done():
            return
        if self.wanted and serving_now != self.wanted and clock_s < self._asked_at + self.rule.start_s:
            self._loads.clear()
            return
        self._loads.append(load)
        while len(self._loads) > self.rule.steps:
            self._loads.popleft()
        wanted = self.rule.wanted(serving_now, list(self._loads))
        if wanted != serving_now and serving_now > 0:
            self._ask(serving_now, wanted, clock_s)

    def _ask(self, now: int, wanted: int, clock_s: float) -> None:
        waiting = sum(load.waiting for load in self._loads) / len(self._loads)
        _log.warning(
            "%d samplers are asked for, %d serve: the learner waited %.0f%% of its time", wanted, now, 100 * waiting
        )
        self.counters["scaled"] += 1
        self.wanted, self._asked_at = wanted, clock_s
        self._loads.clear()
        self._running = asyncio.get_running_loop().create_task(self._run(wanted))

    async def _run(self, wanted: int) -> None:
        """Runs the command; a failure is logged and counted, and the rule may request again."""
        words = [word.replace("{samplers}", str(wanted)) for word in shlex.split(self.rule.command)]
        problem = ""
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                env=dict(serving.without_secrets()), start_new_session=True,
            )  # fmt: skip
            try:
                said, _ = await asyncio.wait_for(process.communicate(), self.rule.command_s)
            except BaseException:
                process.kill()
                await process.wait()
                raise
            if process.returncode:
                problem = f"exit code {process.returncode}: {said.decode(errors='replace').strip()[-_TEXT:]}"
        except TimeoutError:
            problem = f"it took more than {self.rule.command_s:g} s"
        except OSError as error:
            problem = str(error)
        if problem:
            self.counters["scale_failed"] += 1
            self.wanted = 0
            _log.warning("%s failed (%s): the samplers stay as they are", shlex.join(words), problem)

    async def close(self) -> None:
        """Ends a running command."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)


def load_of(step: Mapping[str, float]) -> Load | None:
    """Reads a step's metrics; returns None where they lack the times, as for a step without sampling."""
    whole = step.get("time/step_s", 0.0) - step.get("time/evaluate_s", 0.0)
    if whole <= 0 or "time/sample_s" not in step:
        return None
    part = lambda name: min(max(step.get(name, 0.0) / whole, 0.0), 1.0)  # noqa: E731
    return Load(waiting=part("time/sample_s"), busy=part("sampler/seconds"))
