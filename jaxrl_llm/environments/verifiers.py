"""Tasksets of verifiers by name, played by a worker in a Python environment of its own, whose train client calls the generate route for
tokens."""

import asyncio
import json
import os
import secrets
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm import components
from jaxrl_llm.environments import processes
from jaxrl_llm.environments.command import PASSED, numbers
from jaxrl_llm.experience import Ending, Prompt, Task
from jaxrl_llm.protocols import Endpoint

WORKER = Path(__file__).with_name("verifiers_worker.py")
MOST_LINE = 1 << 26
COLUMN = "verifiers_task"  # column of a prompt that holds the task's number


@dataclass(frozen=True, kw_only=True)
class Taskset:
    """A taskset of verifiers: its tasks are a dataset, and its worker is started by these settings.

    Attributes:
      python: the Python of an environment in which verifiers is installed.
      environment: what verifiers' `resolve_env_config` reads, such as {"taskset": {"id": "textarena", "game": "Wordle-v0"}, "player": {"harness": {"id":
        "null"}, "runtime": {"type": "subprocess"}}}. Without a "runtime", verifiers asks for a remote one.
      tokenizer: the folder of the policy's tokenizer, by which the worker renders messages.
      renderer: the settings of renderers, such as {"name": "qwen3", "thinking_retention": "all"}; empty finds them by the tokenizer's name.
      first: number of the first task that is used.
      count: most tasks.
      path: folders in which the worker's Python finds one's own tasksets and harnesses.
      passed: names of the run's environment variables that the worker gets, where they are set.
      start_s: most seconds until a worker is ready.
      workers: processes that play; what a game computes holds up the others of its process.
    """

    python: str
    environment: Mapping[str, Any]
    tokenizer: str
    renderer: Mapping[str, Any] = field(default_factory=dict)
    first: int = 0
    count: int = 256
    path: Sequence[str] = ()
    passed: Sequence[str] = (*PASSED, "NLTK_DATA", "HF_HOME", "HF_HUB_OFFLINE")
    start_s: float = 300.0
    workers: int = 1

    def __post_init__(self) -> None:
        components.at_least(self, 0, "first")
        components.at_least(self, 1, "count", "workers")
        components.above(self, 0, "start_s")

    def rows(self) -> Sequence[Prompt]:
        """Returns the tasks; their first messages serve the log and the limits of length, since the worker renders them itself.

        Raises:
          ValueError: the worker does not start, or there is no task from `first` on.
        """
        asked = json.dumps({"list": self.first + self.count}) + "\n"
        try:
            done = subprocess.run(
                self.command(), input=asked, capture_output=True, text=True, env=self.variables(), timeout=self.start_s
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ValueError(f"the worker of verifiers cannot be started by {self.python!r}: {error}") from error
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        if done.returncode or len(lines) != 2:
            raise ValueError(f"the worker of verifiers ended with status {done.returncode}: {done.stderr[-2000:]}")
        found = lines[1]["tasks"][self.first :]
        if not found:
            raise ValueError(f"the taskset has no task from number {self.first} on: set Taskset.first lower")
        name = str(self.environment.get("taskset", {}).get("id", "verifiers"))
        return [
            Prompt(id=f"{name}/{row['index']}", messages=row["messages"], source=name, extra={COLUMN: row["index"]})
            for row in found
        ]

    def command(self) -> list[str]:
        """Returns the command that starts the worker; -P keeps this package's folder off its path, since its files shadow other
        packages' names."""
        renderer = {"config": dict(self.renderer) or None, "folder": str(Path(self.tokenizer).expanduser())}
        settings = {"environment": dict(self.environment), "renderer": renderer}
        return [self.python, "-P", str(WORKER), json.dumps(settings)]

    def variables(self) -> dict[str, str]:
        """Returns the worker's environment variables."""
        kept = {name: os.environ[name] for name in self.passed if name in os.environ}
        found = os.pathsep.join(str(Path(folder).expanduser().resolve()) for folder in self.path)
        return {**kept, "PYTHONPATH": found} if found else kept


@dataclass(frozen=True, kw_only=True)
class Verifiers:
    """Lets workers of verifiers play the rollouts; tokens and versions are those of the rollout's own session.

    The rewards of the traces have names and verifiers' weights; an error that verifiers records makes the rollout invalid. Text from outside is
    encoded by verifiers' renderers, which do not keep control tokens out of it.

    Attributes:
      taskset: the taskset whose `rows` are the stage's prompts.
      sampling: further fields of verifiers' SamplingConfig, such as max_tokens of a turn.
    """

    taskset: Taskset
    sampling: Mapping[str, Any] = field(default_factory=dict)
    _workers: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Workers]" = field(
        init=False, repr=False, compare=False, default_factory=weakref.WeakKeyDictionary
    )

    def build(self, prompt: Prompt, sample: int, seed: int) -> "Player":
        """Returns the agent of one rollout; raises ValueError where the prompt is none of the taskset's."""
        del sample, seed
        if COLUMN not in prompt.extra:
            raise ValueError(f"the prompt {prompt.id!r} is no task of verifiers: take Taskset as the stage's data")
        return Player(self, int(prompt.extra[COLUMN]))

    def workers(self) -> "Workers":
        """Returns the workers of this event loop."""
        return self._workers.setdefault(asyncio.get_running_loop(), Workers(self.taskset))

    async def close(self) -> None:
        """Ends the workers; a later rollout starts one anew."""
        await self.workers().close()


@dataclass(frozen=True)
class Player:
    """One rollout that the worker plays."""

    config: Verifiers
    number: int

    async def run(self, task: Task, endpoint: Endpoint) -> Ending:
        """Lets the worker play the task; raises RuntimeError with the errors that verifiers recorded."""
        del task
        asked = {
            "task": self.number, "base_url": endpoint.base_url, "key": endpoint.key, "model": endpoint.model,
            "sampling": dict(self.config.sampling),
        }  # fmt: skip
        found = await self.config.workers().ask(asked)
        if not found["ok"]:
            raise RuntimeError("; ".join(found["errors"]) or "verifiers says that the episode is not ok, and no error")
        return Ending(rewards=numbers(found["rewards"]), stop=found["stop"], info=found["info"])


class Workers:
    """Processes of one taskset, of which each request goes to the one that plays least."""

    def __init__(self, taskset: Taskset) -> None:
        self._all = [Worker(taskset) for _ in range(taskset.workers)]

    async def ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request; raises as `Worker.ask` does."""
        return await min(self._all, key=lambda worker: worker.playing).ask(what)

    async def close(self) -> None:
        """Ends the processes and what they started."""
        await asyncio.gather(*(worker.close() for worker in self._all))


class Worker:
    """A worker process, started at the first use and anew after it ended; it ends when its standard input does.

    Attributes:
      playing: number of requests without an answer yet.
    """

    def __init__(self, taskset: Taskset) -> None:
        self.playing = 0
        self._taskset = taskset
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}

    async def ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request and returns its answer; a request that is given up is cancelled in the worker. Raises RuntimeError where the
        worker ends."""
        self.playing += 1
        try:
            return await self._answer(what)
        finally:
            self.playing -= 1

    async def _answer(self, what: Mapping[str, Any]) -> dict[str, Any]:
        process = await self._started()
        id = secrets.token_hex(8)
        answer = self._waiting[id] = asyncio.get_running_loop().create_future()
        try:
            await _send(process, {"id": id, **what})
            return await answer
        except asyncio.CancelledError:
            await _send(process, {"cancel": id})
            raise
        finally:
            self._waiting.pop(id, None)

    async def close(self) -> None:
        """Ends the worker and what it started."""
        process, self._process = self._process, None
        if process is not None:
            await processes.end(process, self._marked)
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _started(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return self._process
            self._marked = processes.mark()
            process = await asyncio.create_subprocess_exec(
                *self._taskset.command(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MOST_LINE,
                start_new_session=True, env={**self._taskset.variables(), processes.MARK: self._marked},
            )  # fmt: skip
            assert process.stdout is not None
            try:
                line = await asyncio.wait_for(process.stdout.readline(), self._taskset.start_s)
                if not line:
                    raise RuntimeError("the worker of verifiers ended at its start: what it wrote stands above")
            except BaseException:
                await processes.end(process, self._marked)
                raise
            self._process, self._reader = process, asyncio.create_task(self._read(process))
            return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            found = json.loads(line)
            answer = self._waiting.get(found["id"])
            if answer is not None and not answer.done():
                answer.set_result(found)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(RuntimeError(f"the worker of verifiers ended with status {await process.wait()}"))


async def _send(process: asyncio.subprocess.Process, what: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(what).encode() + b"\n")
        await process.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the worker ended, which its reader reports
