"""Maths reward: 1 where the response's final expression equals the reference, judged by the math-verify package.

The last boxed expression of the response counts, else the last expression that math-verify finds. An expression that
cannot be evaluated equals nothing; a response that exceeds its time or memory is invalid, not wrong.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_llm.experience import Rollout, Scores
from jaxrl_llm.rewards import answers
from jaxrl_llm.rewards.services.pool import Pool
from jaxrl_llm.rewards.wrap import PlainReward, judge_together

# A backslash before makes these a currency's sign and the end of a matrix's row.
_DELIMITED = re.compile(r"(?<!\\)(?:\$|\\\(|\\\[)|\\boxed")
_PLAIN_NUMBER = re.compile(r"-?(?:\d{1,3}(?:[, ]\d{3})+|\d+)(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class Maths(PlainReward):
    """Checks symbolic and numeric equality in worker processes.

    Attributes:
      workers: number of processes, which start at the first response; None takes one for each core, from 2 to 16.
      limit_s: time limit of one response in seconds.
      memory_gb: address space of a process in GiB (Linux).
      boxed_only: whether a response without \\boxed{} is wrong. Otherwise its last expression counts, even one that restates
        the problem: a response cut off after "we evaluate $(1+2i)6-3i$" is right where the answer is $6+9i$.
    """

    workers: int | None = None
    limit_s: float = 10.0
    memory_gb: float = 4.0
    boxed_only: bool = False
    _pool: Pool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        warm = (__name__, "judge", "1", "1")
        pool = Pool(workers=self.workers, limit_s=self.limit_s, memory_gb=self.memory_gb, warm=warm)
        object.__setattr__(self, "_pool", pool)

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns part "maths", 0 or 1 [G]; invalid where judging failed or took too long, or the reference cannot be parsed."""
        del stats
        arguments = [(rollout.prompt.reference, self.judged(rollout.text)) for rollout in rollouts]
        return await self.judge_all(__name__, "judge", arguments, rollouts)

    def judged(self, text: str) -> str:
        """Returns the text of a response that is judged."""
        if not self.boxed_only:
            return text
        found = answers.boxed(text)
        return "" if found is None else f"\\boxed{{{found}}}"

    async def judge_all(
        self, module: str, function: str, arguments: Sequence[tuple[Any, ...]], rollouts: Sequence[Rollout]
    ) -> Scores:
        """Calls a judge (`module.function`) in the worker processes with each rollout's `arguments`; returns part "maths" [G]."""
        judgements = [self._pool.call(module, function, *each) for each in arguments]
        return await judge_together("maths", judgements, rollouts)

    def isolation(self) -> str:
        """Returns how the verifier's processes are isolated."""
        return self._pool.isolation()

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()


def judge(reference: str, text: str) -> float:
    """Returns 1 where `text` ends in an expression equal to `reference`, else 0; runs in a worker process.

    Raises:
      ValueError: `reference` is not an expression.
    """
    import math_verify

    gold = read(reference)
    if not gold:
        raise ValueError(f"the reference {reference!r} is no expression")
    # math-verify's own time limits need SIGALRM; the pool enforces the limit without it.
    answer = math_verify.parse(text, parsing_timeout=None)
    return float(bool(answer) and math_verify.verify(gold, answer, timeout_seconds=None))


def read(reference: str) -> list[Any]:
    """Parses a reference into expressions and texts; an answer that equals one of them is right.

    Bare LaTeX is read as one expression, or as a text where it cannot be parsed, and never as the last number in it: a wrong
    answer may have that number. A full stop or comma at the end may be left out.
    """
    import math_verify

    found = []
    for text in dict.fromkeys((reference.strip().rstrip(".,"), reference.strip())):
        bare = delimited(text) != text
        kinds = {"extraction_config": [math_verify.LatexExtractionConfig()]} if bare else {}
        found += math_verify.parse(delimited(text), parsing_timeout=None, **kinds)
    return found


def delimited(expression: str) -> str:
    """Puts dollar signs around an expression that has no delimiters and is not a number written in digits alone."""
    expression = expression.strip()
    bare = not _DELIMITED.search(expression) and not _PLAIN_NUMBER.fullmatch(expression)
    return f"${expression}$" if bare else expression
