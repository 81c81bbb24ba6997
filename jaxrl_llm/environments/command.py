"""A program as an agent: it finds the policy through the variables that OpenAI's SDKs read, and the task on its standard input."""

import asyncio
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm import components
from jaxrl_llm.environments import processes
from jaxrl_llm.experience import Ending, Prompt, Task
from jaxrl_llm.protocols import Endpoint

PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "USER", "VIRTUAL_ENV", "SSL_CERT_FILE", "LD_LIBRARY_PATH")
MOST_READ = 1 << 20  # bytes that are read of a program's output, at its end
MOST_SHOWN = 2000  # characters of it in an error


@dataclass(frozen=True, kw_only=True)
class Command:
    """Starts a program for each rollout. The program runs its own loop, and is killed with all that it started when the rollout ends.

    It has OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment, TMPDIR as a folder of its own, and the task as a JSON
    object on its standard input: "id", "messages", "tools", "seed", "model", "folder" (TMPDIR), "reference" and "columns" of the row.
    The exit status 0 ends the rollout, any other makes it invalid. Where its last line is a JSON object with "rewards", {name: number
    or null}, these are the rollout's rewards, and its "info" and "stop" become the rollout's.

    Attributes:
      command: the program and its arguments; "python" is found by PATH.
      folder: working folder of the program; empty is the folder of the run.
      variables: further environment variables, {name: value}.
      passed: names of the run's own environment variables that the program gets, where they are set.
    """

    command: Sequence[str]
    folder: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    passed: Sequence[str] = PASSED

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command:
            components.refuse(
                self, "command", "a program and its arguments as several texts, such as ('python', 'agent.py')"
            )
        if self.folder and not Path(self.folder).expanduser().is_dir():
            components.refuse(self, "folder", "a folder that exists, or empty")

    def build(self, prompt: Prompt, sample: int, seed: int) -> "Program":
        """Returns the agent of one rollout, whose `run` starts the program."""
        del prompt, sample, seed
        return Program(self)


@dataclass(frozen=True)
class Program:
    """The program of one rollout."""

    config: Command

    async def run(self, task: Task, endpoint: Endpoint) -> Ending:
        """Lets the program work on the task to its end.

        Raises:
          RuntimeError: the program cannot be started, or its exit status is not 0; the message holds the end of its error output.
          ValueError: its last line is a JSON object with rewards that are no numbers.
        """
        with tempfile.TemporaryDirectory(prefix="agent", ignore_cleanup_errors=True) as folder:
            own = Path(folder) / "own"
            own.mkdir()
            given, said, errors = (Path(folder) / name for name in ("task.json", "output", "errors"))
            given.write_text(json.dumps(told(task, endpoint, str(own)), default=str), encoding="utf-8")
            status = await self._ran(endpoint, own, (given, said, errors))
            if status:
                raise RuntimeError(
                    f"{self.config.command[0]!r} ended with status {status}; its errors end with: {_end(errors)[-MOST_SHOWN:].strip()!r}"
                )
            return ending(_end(said))

    async def _ran(self, endpoint: Endpoint, own: Path, files: Sequence[Path]) -> int:
        """Runs the program, and returns its exit status when it and all that it started have ended."""
        config, marked = self.config, processes.mark()
        kept = {name: os.environ[name] for name in config.passed if name in os.environ}
        ours = {
            "OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.key, "OPENAI_MODEL": endpoint.model,
            "TMPDIR": str(own), processes.MARK: marked,
        }  # fmt: skip
        place = Path(config.folder or ".").expanduser()
        given, said, errors = files
        with given.open("rb") as task, said.open("wb") as output, errors.open("wb") as problems:
            try:
                process = await asyncio.create_subprocess_exec(
                    *config.command, stdin=task, stdout=output, stderr=problems, cwd=place, start_new_session=True,
                    env={**kept, **config.variables, **ours},
                )  # fmt: skip
            except OSError as error:
                raise RuntimeError(f"{config.command[0]!r} cannot be started: {error}") from error
        try:
            return await process.wait()
        finally:
            await asyncio.shield(processes.end(process, marked))


def told(task: Task, endpoint: Endpoint, folder: str) -> dict[str, Any]:
    """Returns the task as the JSON object that the program reads."""
    prompt = task.prompt
    return {
        "id": prompt.id, "messages": [dict(message) for message in task.messages], "tools": [dict(tool) for tool in task.tools],
        "seed": task.seed, "model": endpoint.model, "folder": folder, "reference": prompt.reference, "columns": dict(prompt.extra),
    }  # fmt: skip


def ending(said: str) -> Ending:
    """Reads the ending from a program's last line; it has no rewards where that is no JSON object with "rewards".

    Raises:
      ValueError: the object's rewards or info have the wrong types.
    """
    lines = [line for line in said.splitlines() if line.strip()]
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        found = None
    if not isinstance(found, dict) or "rewards" not in found:
        return Ending()
    rewards, info = numbers(found["rewards"]), found.get("info", {})
    if not isinstance(info, dict):
        raise ValueError(f'the "info" of an agent is a JSON object (got {info!r})')
    return Ending(rewards=rewards, stop=str(found.get("stop", "done")), info=info)


def numbers(rewards: Any) -> dict[str, float | None]:
    """Checks rewards that came from outside, and returns them as {name: number or None}; raises ValueError for anything else."""
    known = isinstance(rewards, Mapping) and all(
        value is None or (isinstance(value, bool | int | float) and math.isfinite(value)) for value in rewards.values()
    )
    if not known:
        raise ValueError(f"the rewards of an agent are {{name: finite number or null}} (got {rewards!r})")
    return {str(name): None if value is None else float(value) for name, value in rewards.items()}


def _end(file: Path) -> str:
    """Returns the end of a file's text, of at most MOST_READ bytes."""
    with file.open("rb") as held:
        held.seek(max(0, file.stat().st_size - MOST_READ))
        return held.read().decode("utf-8", "replace")
