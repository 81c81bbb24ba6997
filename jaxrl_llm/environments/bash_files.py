"""An agent that works on files by the shell: it calls the chat gateway as any client does, and the sandbox confines its commands."""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from jaxrl_llm import components
from jaxrl_llm.environments import tools
from jaxrl_llm.environments.python_tool import GOES_ON, InUse, Python
from jaxrl_llm.experience import Ending, Prompt, Task
from jaxrl_llm.protocols import Endpoint

MOST_FILE = 100_000  # most characters of a file that are compared
BASH = tools.function(
    "bash", "Runs a command of bash in the current folder, and returns what it prints.", command="the command"
)
# The first cell, before any file is there that could stand in for a module.
BEGIN = """
import subprocess
def bash(command):
    done = subprocess.run(["/bin/bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    print(done.stdout, end="")
    print(done.stderr, end="")
    if done.returncode:
        print(f"[status {{done.returncode}}]")
def read(name):
    try:
        with open(name, encoding="utf-8", errors="replace") as file:
            return file.read({most})
    except OSError:
        return None
for name, text in {files}.items():
    with open(name, "w", encoding="utf-8") as file:
        file.write(text)
"""


@dataclass(frozen=True, kw_only=True)
class BashFiles:
    """Lets the policy call `bash` on the files of a prompt (`data.file_tasks`), until it calls no more.

    The reward "files" is 1.0 where all of the prompt's "wanted" files are there with the wanted text, else 0.0.

    Attributes:
      python: opens sessions of the sandbox; its limits of time, memory and text apply to commands.
      turns: most turns of the policy.
    """

    python: Python = field(default_factory=Python)
    turns: int = 6

    def __post_init__(self) -> None:
        components.at_least(self, 1, "turns")

    def build(self, prompt: Prompt, sample: int, seed: int) -> "Agent":
        """Returns the agent of one rollout; raises ValueError where the prompt has no files."""
        del sample, seed
        if not {"files", "wanted"} <= prompt.extra.keys():
            raise ValueError(
                f"the prompt {prompt.id!r} has no files: its columns must have 'files' and 'wanted' (got {sorted(prompt.extra)})"
            )
        return Agent(self, prompt.extra["files"], prompt.extra["wanted"])


@dataclass(eq=False)
class Agent:
    """The agent of one rollout."""

    config: BashFiles
    files: Mapping[str, str]
    wanted: Mapping[str, str]
    commands: int = 0
    lost: bool = False

    async def run(self, task: Task, endpoint: Endpoint) -> Ending:
        """Plays the episode to its end; raises RuntimeError where the policy or the sandbox cannot be reached."""
        shell = InUse(self.config.python)
        try:
            begun = await shell.cell(BEGIN.format(files=repr(dict(self.files)), most=MOST_FILE))
            if begun is None or begun["status"] != "passed":
                raise RuntimeError(f"the files could not be written: {begun}")
            await self._talk(task, endpoint, shell)
            right = 0.0 if self.lost else float(await self._found(shell) == dict(self.wanted))
        finally:
            await shell.close()
        return Ending(rewards={"files": right}, info={"commands": self.commands, "lost": self.lost})

    async def _talk(self, task: Task, endpoint: Endpoint, shell: InUse) -> None:
        """Asks the policy and answers its calls, until it makes none or a limit is reached."""
        messages: list[Mapping[str, Any]] = list(task.messages)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.key}"}) as http:
            for _ in range(self.config.turns):
                said = await _said(http, endpoint, messages)
                calls: Sequence[Mapping[str, Any]] = (said or {}).get("tool_calls") or ()
                if said is None or not calls:
                    return
                messages.append(said)
                for call in calls:
                    text = await self._called(call["function"], shell)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
                if self.lost:
                    return

    async def _called(self, call: Mapping[str, Any], shell: InUse) -> str:
        """Returns the answer to a call."""
        try:
            command = tools.text_argument(json.loads(call["arguments"]), "command")
        except tools.Mistake as mistake:
            return str(mistake)
        if call["name"] != "bash":
            return f"error: there is no tool {call['name']!r}; there is bash"
        if self.lost:
            return "error: the session was lost"
        self.commands += 1
        found = await shell.cell(f"bash({command!r})")
        self.lost = found is None or found["status"] not in GOES_ON
        return "error: the session was lost" if found is None else self.config.python.answer(found)

    async def _found(self, shell: InUse) -> Any:
        """Returns {name: text, or None where there is no such file} of the wanted files."""
        found = await shell.cell(f"print(ascii({{name: read(name) for name in {sorted(self.wanted)!r}}}))")
        if found is None or found["status"] != "passed" or found["truncated"]:
            return None
        return ast.literal_eval(found["stdout"])


async def _said(
    http: aiohttp.ClientSession, endpoint: Endpoint, messages: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Returns the policy's next message; None where a limit of the rollout ends it. Raises RuntimeError for any other refusal."""
    body = {"model": endpoint.model, "messages": list(messages), "tools": [BASH]}
    async with http.post(f"{endpoint.base_url}/chat/completions", json=body) as answer:
        found = await answer.json()
        if answer.status == 403 or found.get("error", {}).get("code") == "context_length_exceeded":
            return None
        if answer.status != 200:
            raise RuntimeError(f"the policy answered {answer.status}: {found}")
        said: dict[str, Any] = found["choices"][0]["message"]
        return said
