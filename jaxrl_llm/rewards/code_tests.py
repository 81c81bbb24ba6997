"""Rewards the share of its tests that the program in a response passes, run by the service of rewards/services/sandbox.py."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.experience import Prompt, Rollout, Scores
from jaxrl_llm.rewards.service import Service
from jaxrl_llm.rewards.wrap import PlainReward, judge_together

PATHS = {"assert": "/test_program", "stdio": "/test_program_stdio"}
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class CodeTests(PlainReward):
    """Tests the last fenced Python block of a response; a response without one scores 0.

    Attributes:
      service: the sandbox; its limit_s should cover all tests of a response, over the sandbox's workers.
      kind: "assert" (tests are Python that follows the program) or "stdio" (objects with `input` and `output`).
      column: column of the prompt that holds the tests, a list or its JSON text.
      test_limit_s: time limit of one test in seconds.
      least: smallest share of passed tests that earns anything; the score is the share. The original asks for 0.99. Where one
        failed test leaves nothing to earn, the tests after it are not run, and log/pass_rate counts them as not passed.
    """

    service: Service
    kind: Literal["assert", "stdio"] = "assert"
    column: str = "tests"
    test_limit_s: float = 5.0
    least: float = 0.99

    def __post_init__(self) -> None:
        components.choices(self)
        components.above(self, 0, "test_limit_s")
        components.within(self, "[0, 1]", "least")

    def isolation(self) -> str:
        """Returns how each server says that it isolates programs."""
        return ", ".join(
            f"{url}: {self.service.health(url).get('isolation', 'isolation unknown')}" for url in self.service.urls
        )

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns part "code", in [0, 1], and "log/pass_rate" [G]; invalid where the sandbox gave no answer.

        Raises:
          ValueError: a prompt has no tests.
        """
        del stats
        tests = [self.tests(rollout.prompt) for rollout in rollouts]
        asked = [self._rate(rollout.text, own) for rollout, own in zip(rollouts, tests)]
        found = await judge_together("code", asked, rollouts)
        rate, valid = found.parts["code"], found.valid["code"]
        return Scores(
            parts={"code": np.where(rate >= self.least, rate, 0.0), "log/pass_rate": rate},
            valid={"code": valid, "log/pass_rate": valid},
        )

    def tests(self, prompt: Prompt) -> list[Any]:
        """Returns the tests of a prompt; raises ValueError where there are none."""
        given = prompt.extra.get(self.column)
        tests = json.loads(given) if isinstance(given, str) else given
        if not isinstance(tests, Sequence) or not len(tests):
            raise ValueError(f"prompt {prompt.id!r} has no tests in the column {self.column!r}: set CodeTests.column")
        return list(tests)

    async def _rate(self, text: str, tests: Sequence[Any]) -> float:
        program = block(text)
        if program is None:
            return 0.0

        def read(answer: Any) -> float:
            results = [int(result) for result in answer["results"]]
            if len(results) != len(tests):
                raise ValueError(f"{len(results)} results for {len(tests)} tests")
            return sum(results) / len(results)

        body = {"program": program, "tests": list(tests), "max_execution_time": self.test_limit_s}
        body["stop_at_failure"] = len(tests) - 1 < self.least * len(tests)
        return await self.service.post(PATHS[self.kind], body, read)


def block(text: str) -> str | None:
    """Returns the last fenced block in Python or without a language; None where there is none."""
    found = _BLOCK.findall(text)
    return found[-1] if found else None
