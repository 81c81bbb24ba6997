"""How many samplers a learner should have, by how long it waits for them; what starts and stops them is a command of the launcher.

Of a step that took T seconds, with n samplers: the learner waited w T for samples, and the samplers were at work for b T. So it has work of its own
for (1 - w) T, and one sampler alone would need n b T.

- More: where w is above `high`, as many as make their part as short as the learner's own, n b / (1 - w), at most twice as many at a time.
- Fewer: where w is below `low`, as few as leave their part `slack` shorter than the learner's own, n b / ((1 - w) (1 - slack)), where those are
  fewer by half of `slack` at least; by halves at most.
- Else, and within `steps` steps after a change, as many as now.

Between the two there is a gap, so a change is not taken back: after fewer, the samplers' part is shorter than the learner's by `slack`, so it does
not wait; after more, the learner's own part is as long as theirs, so none is spare.
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
_TEXT = 400  # characters of a failed command's output that are shown


class Load(NamedTuple):
    """One step, as parts of its time: the learner waited for samples, and samplers had requests."""

    waiting: float
    busy: float


@dataclass(frozen=True, kw_only=True)
class Autoscale:
    """Asks the launcher for more samplers or fewer while a run goes on; `Discovery` finds those that come and go.

    Attributes:
      command: what brings the number of samplers to {samplers}, such as "launch/gke.sh scale {samplers}", run without a shell in the folder of
        the launch; empty for a fleet that stays as it is.
      least: fewest samplers.
      most: most samplers.
      low: part of a step that the learner waits for samples below which there may be fewer.
      high: part above which there should be more.
      slack: part of the learner's own time that samplers are idle for, before there are fewer.
      steps: steps that are looked at together; so many pass after a change before the next one.
      start_s: most seconds until the samplers that were asked for serve, before they are asked for again.
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
        """Returns how many samplers there should be, `least` to `most`.

        Args:
          now: how many there are.
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
    """Carries out what a rule wants.

    Attributes:
      rule: how many samplers are wanted, and by which command.
      counters: of the fleet: changes that were asked for, and commands that failed.
      wanted: how many were asked for last; 0 before the first change.
    """

    rule: Autoscale
    counters: Counter[str]
    wanted: int = 0
    _loads: deque[Load] = field(default_factory=deque, init=False)
    _asked_at: float = field(default=0.0, init=False)
    _running: asyncio.Task[None] | None = field(default=None, init=False)

    def step(self, serving_now: int, load: Load, clock_s: float) -> None:
        """Notes a step with so many samplers that served, and asks for another number of them where the rule wants one.

        Samplers that were asked for are waited for, as steps before they serve say nothing of them; `clock_s` is time.monotonic.
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
        """Runs the command; where it fails, that is told and counted, and the rule may ask again."""
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
        """Ends a command that runs."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)


def load_of(step: Mapping[str, float]) -> Load | None:
    """Reads a step's metrics; None where they do not tell, as of a step without sampling."""
    whole = step.get("time/step_s", 0.0) - step.get("time/evaluate_s", 0.0)
    if whole <= 0 or "time/sample_s" not in step:
        return None
    part = lambda name: min(max(step.get(name, 0.0) / whole, 0.0), 1.0)  # noqa: E731
    return Load(waiting=part("time/sample_s"), busy=part("sampler/seconds"))
