"""Runs the fenced blocks of Python that a policy writes and answers with what they print: a tool for models whose chat template has no calls."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm import components
from jaxrl_llm.environments.python_tool import LOST, Python
from jaxrl_llm.experience import Action, Observation, Prompt, Task

BLOCK = re.compile(r"^```(?:python|py)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class CodeBlocks:
    """Runs the blocks of Python of each turn, one after the other in one interpreter, and answers with a message of the user.

    A turn without a whole block ends the rollout, and so does one that gives its answer after its last block, which is then not run.

    Attributes:
      python: opens the interpreters, with limits of time, memory and text.
      answer: text that marks an answer where it follows the last block of a turn; empty for none.
      told: template of the message, with {output} in the place of what the blocks printed.
      most_blocks: most blocks of one turn that are run; the message says that further ones were not run.
    """

    python: Python = field(default_factory=Python)
    answer: str = "\\boxed"
    told: str = "Output:\n{output}"
    most_blocks: int = 4

    def __post_init__(self) -> None:
        components.at_least(self, 1, "most_blocks")
        if self.told.count("{output}") != 1:
            components.refuse(self, "told", "a text that has {output} once")

    def build(self, prompt: Prompt, sample: int, seed: int) -> "Episode":
        """Returns the environment of one rollout."""
        del sample
        return Episode(self, prompt, seed)


class Episode:
    """The interpreter of one rollout; the first block starts it."""

    def __init__(self, config: CodeBlocks, prompt: Prompt, seed: int) -> None:
        self._config, self._interpreter = config, config.python.use(prompt, seed)
        self._counts = {"blocks": 0, "failed_blocks": 0}

    async def reset(self, task: Task) -> Observation:
        """Returns no message, since the task is the prompt."""
        del task
        return Observation()

    async def step(self, action: Action) -> Observation:
        """Runs the blocks of a turn."""
        config, found = self._config, list(BLOCK.finditer(action.text))
        if not found or (config.answer and config.answer in action.text[found[-1].end() :]):
            return Observation(done=True, info=dict(self._counts))
        outputs = [await self._run(block[1]) for block in found[: config.most_blocks]]
        if len(found) > config.most_blocks:
            outputs.append(f"error: at most {config.most_blocks} blocks of one turn are run")
        message = {"role": "user", "content": config.told.replace("{output}", "\n".join(outputs))}
        return Observation(messages=[message], info=dict(self._counts))

    async def close(self) -> None:
        """Ends the interpreter."""
        await self._interpreter.close()

    async def _run(self, code: str) -> str:
        found: Mapping[str, Any] | None = await self._interpreter.cell(code)
        self._counts["blocks"] += 1
        self._counts["failed_blocks"] += found is None or found["status"] != "passed"
        return LOST if found is None else self._config.python.answer(found)
